# SPDX-License-Identifier: Apache-2.0
"""The table's episodes: layouts by seed, instructions and success tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specvla_ros.errors import UserError

# First seeds of sets that must not share a start; evaluation's start at 0. Never judge a policy on training starts.
DEMONSTRATION_FIRST_SEED = 1_000_000
FRAME_FIRST_SEED = 2_000_000  # frames that a policy answers, to train a draft head or to calibrate
TEXT_POLICY_FIRST_SEED = 3_000_000  # the benchmark's policy that generates text before actions

CUBES = ("red_cube", "green_cube", "blue_cube")
DISTRACTORS = ("cylinder", "prism")
CUBE_HALF_M = 0.025
BLOCK_HALF_M = 0.05
BLOCK_TOP_M = 0.03
ZONE_NEAR_EDGE_M = 0.67

_LIFTED_M = 0.06
_OPEN_M = 0.075

_HEIGHTS = {"block": 0.015, "cylinder": 0.03, "prism": 0.015} | dict.fromkeys(CUBES, CUBE_HALF_M)
_RADII = {"block": 0.065, "cylinder": 0.022, "prism": 0.03} | dict.fromkeys(CUBES, 0.032)
_NEAR_TOP_M = 0.025
_GAP_M = 0.04  # a finger fits between two objects
_MAX_YAW = 0.3


@dataclass(frozen=True)
class Area:
    """The part of the table in front of an arm, and what lies on it."""

    things: tuple[str, ...]  # bodies in every layout
    extras: tuple[str, ...]  # bodies in about half of them
    x_m: tuple[float, float]  # of the bodies' centres
    y_m: tuple[float, float]
    # Lowest and highest start position of the hand, x y z in metres; None: the arm starts at its home.
    hand_m: tuple[tuple[float, float, float], tuple[float, float, float]] | None


TABLE_AREA = Area(
    (*CUBES, "block"), DISTRACTORS, (0.38, 0.60), (-0.21, 0.21), ((0.42, -0.12, 0.14), (0.54, 0.12, 0.20))
)
SMALL_AREA = Area(CUBES, (), (0.42, 0.50), (-0.13, 0.13), None)


@dataclass(frozen=True)
class Layout:
    """One start state of the world."""

    # Per body x, y, z in metres and yaw in radians; distractors not listed are not on the table.
    poses: dict[str, tuple[float, float, float, float]]
    hand: np.ndarray | None  # float64 [3], the hand's start position, metres; None: the arm starts at its home
    colours: dict[str, np.ndarray]  # per geom red, green, blue in [0, 1]
    camera_shift: np.ndarray  # float64 [3], metres from the camera's own position
    camera_turn: np.ndarray  # float64 [3], rotation vector in radians, camera frame
    lamp_direction: np.ndarray  # float64 [3]
    lamp: float  # brightness of the lamp
    ambient: float  # brightness of the ambient light


def draw_layout(seed: int, area: Area = TABLE_AREA) -> Layout:
    """The layout of a seed in an area; the same seed gives the same layout for every task."""
    rng = np.random.default_rng([20_250_722, seed])
    names = [*area.things, *(name for name in area.extras if rng.random() < 0.5)]
    return Layout(
        poses=_scatter(rng, names, area),
        hand=None if area.hand_m is None else rng.uniform(*area.hand_m),
        colours=_colours(rng),
        camera_shift=rng.uniform(-0.01, 0.01, 3),
        camera_turn=rng.uniform(-0.01, 0.01, 3),
        lamp_direction=np.array([*rng.uniform(-0.15, 0.15, 2), -1.0]),
        lamp=rng.uniform(0.4, 0.6),
        ambient=rng.uniform(0.3, 0.4),
    )


def _scatter(rng: np.random.Generator, names: list[str], area: Area) -> dict[str, tuple[float, float, float, float]]:
    while (spots := _try_to_scatter(rng, names, area)) is None:
        pass
    yaws = rng.uniform(-_MAX_YAW, _MAX_YAW, len(names))
    return {name: (*spots[name], _HEIGHTS[name], float(yaw)) for name, yaw in zip(names, yaws, strict=True)}


def _try_to_scatter(rng: np.random.Generator, names: list[str], area: Area) -> dict[str, tuple[float, float]] | None:
    spots: dict[str, tuple[float, float]] = {}
    for name in names:
        for _ in range(50):
            spot = (float(rng.uniform(*area.x_m)), float(rng.uniform(*area.y_m)))
            if all(_apart(name, spot, other, spots[other]) for other in spots):
                spots[name] = spot
                break
        else:
            return None
    return spots


def _apart(name: str, spot: tuple[float, float], other: str, taken: tuple[float, float]) -> bool:
    dx, dy = spot[0] - taken[0], spot[1] - taken[1]
    if np.hypot(dx, dy) < _RADII[name] + _RADII[other] + _GAP_M:
        return False
    # Keeps the green cube's pushing path free, from behind the cube to the zone.
    if "green_cube" not in (name, other):
        return True
    ahead = dx if other == "green_cube" else -dx
    return ahead < -0.10 or abs(dy) > _RADII[name] + _RADII[other] + 0.01


def _colours(rng: np.random.Generator) -> dict[str, np.ndarray]:
    base = {
        "red_cube": (0.85, 0.10, 0.10),
        "green_cube": (0.10, 0.65, 0.15),
        "blue_cube": (0.10, 0.20, 0.85),
        "block": (0.30, 0.22, 0.16),
        "table": (0.62, 0.55, 0.46),
        "floor": (0.35, 0.37, 0.40),
        "cylinder": (0.90, 0.75, 0.10),
        "prism": (0.55, 0.20, 0.60),
    }
    return {name: np.clip(np.array(rgb) + rng.uniform(-0.05, 0.05, 3), 0, 1) for name, rgb in base.items()}


@dataclass(frozen=True)
class WorldState:
    """The true state, for experts and success tests; metres and radians, base frame."""

    hand: np.ndarray  # float64 [3], the point between the fingertips
    rotation: np.ndarray  # float64 [3, 3], the hand's rotation; columns are its axes, z points out of the fingers
    opening: float  # distance between the fingers, metres
    positions: dict[str, np.ndarray]  # per body float64 [3], its centre
    yaws: dict[str, float]  # per body, its rotation about z


@dataclass(frozen=True)
class Task:
    """One task. All tasks of an arm share the same layouts and differ only in the instruction."""

    name: str  # for files and the command line
    instruction: str  # given to the policy
    cube: str  # the named body
    verb: str  # lift, push, put or point
    max_steps: int  # policy steps of 0.2 s after which the episode fails

    def succeeded(self, state: WorldState) -> bool:
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


def _pointed(state: WorldState, cube: str) -> bool:
    top = state.positions[cube] + np.array([0.0, 0.0, CUBE_HALF_M])
    return bool(np.linalg.norm(state.hand - top) < _NEAR_TOP_M)


_DONE: dict[str, Callable[[WorldState, str], bool]] = {
    "lift": _lifted,
    "push": _pushed,
    "put": _put,
    "point": _pointed,
}

TASKS = (
    Task("lift_red", "lift the red cube", "red_cube", "lift", 40),
    Task("lift_green", "lift the green cube", "green_cube", "lift", 40),
    Task("lift_blue", "lift the blue cube", "blue_cube", "lift", 40),
    Task("push_green", "push the green cube into the white zone", "green_cube", "push", 50),
    Task("put_red", "put the red cube on the block", "red_cube", "put", 60),
)

# For an arm too small for the cubes.
POINTING_TASKS = tuple(
    Task(f"point_{colour}", f"point at the {colour} cube", f"{colour}_cube", "point", 30)
    for colour in ("red", "green", "blue")
)


def choose_tasks(names: Sequence[str], tasks: tuple[Task, ...] = TASKS) -> tuple[Task, ...]:
    """Returns those of an arm's tasks with these names, or all if `names` is empty."""
    known = {task.name: task for task in tasks}
    for name in names:
        if name not in known:
            raise UserError(f"there is no task '{name}'; the tasks are: {', '.join(known)}")
    return tuple(known[name] for name in names) or tasks


def acted_on(start: WorldState, state: WorldState) -> str | None:
    """The cube that was moved most since the start, by at least 3 cm; None if none was."""
    moved = {cube: float(np.linalg.norm(state.positions[cube] - start.positions[cube])) for cube in CUBES}
    furthest = max(moved, key=moved.__getitem__)
    return furthest if moved[furthest] >= 0.03 else None
