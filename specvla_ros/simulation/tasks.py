"""What the robot is told, and when it has done it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.simulation.layout import BLOCK_HALF_M, BLOCK_TOP_M, CUBE_HALF_M, CUBES, ZONE_NEAR_EDGE_M
from specvla_ros.simulation.world import WorldState

_LIFTED_M = 0.06
_OPEN_M = 0.075


@dataclass(frozen=True)
class Task:
    """One thing to do. All tasks share all layouts: only the instruction tells them apart.

    Args:
        name: for files and the command line.
        instruction: what the policy is told.
        cube: the body it is about.
        verb: lift, push or put.
        max_steps: policy steps of 0.2 s, after which the episode has failed.
    """

    name: str
    instruction: str
    cube: str
    verb: str
    max_steps: int

    def succeeded(self, state: WorldState) -> bool:
        """Whether the task is done in this state."""
        return _DONE[self.verb](state, self.cube)


def _lifted(state: WorldState, cube: str) -> bool:
    return bool(state.positions[cube][2] > CUBE_HALF_M + _LIFTED_M)


def _pushed(state: WorldState, cube: str) -> bool:
    x, _, z = state.positions[cube]
    return bool(x > ZONE_NEAR_EDGE_M and z < CUBE_HALF_M + 0.01)


def _put(state: WorldState, cube: str) -> bool:
    away = state.positions[cube] - state.positions["block"]
    resting = abs(state.positions[cube][2] - (BLOCK_TOP_M + CUBE_HALF_M)) < 0.006
    return bool(np.abs(away[:2]).max() < BLOCK_HALF_M and resting and state.opening > _OPEN_M)


_DONE: dict[str, Callable[[WorldState, str], bool]] = {"lift": _lifted, "push": _pushed, "put": _put}

TASKS = (
    Task("lift_red", "lift the red cube", "red_cube", "lift", 40),
    Task("lift_green", "lift the green cube", "green_cube", "lift", 40),
    Task("lift_blue", "lift the blue cube", "blue_cube", "lift", 40),
    Task("push_green", "push the green cube into the white zone", "green_cube", "push", 50),
    Task("put_red", "put the red cube on the block", "red_cube", "put", 60),
)


def choose_tasks(names: list[str]) -> tuple[Task, ...]:
    """The tasks of these names, all for none.

    Raises:
        UserError: a name that is no task's.
    """
    known = {task.name: task for task in TASKS}
    for name in names:
        if name not in known:
            raise UserError(f"there is no task '{name}'; the tasks are: {', '.join(known)}")
    return tuple(known[name] for name in names) or TASKS


def acted_on(start: WorldState, state: WorldState) -> str | None:
    """The cube that was moved most since the start, by 3 cm or more; None if none was."""
    moved = {cube: float(np.linalg.norm(state.positions[cube] - start.positions[cube])) for cube in CUBES}
    most = max(moved, key=moved.__getitem__)
    return most if moved[most] >= 0.03 else None
