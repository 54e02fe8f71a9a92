# SPDX-License-Identifier: Apache-2.0
"""Simulated robots as rollouts and nodes use them: the protocol, and the arm at the table."""

from typing import Protocol

import numpy as np

from specvla_ros.lab.simulation.arms import TABLE_ARM, WRIST_CAMERA, Arm
from specvla_ros.lab.simulation.displacement import DisplacementFollower, ImageGoal
from specvla_ros.lab.simulation.osc import CONTROL_HZ, SCALE
from specvla_ros.lab.simulation.tasks import Task, WorldState, acted_on, choose_tasks, draw_layout
from specvla_ros.lab.simulation.world import FRONT_CAMERA, Camera, World

IMAGE_SIZE = 224
ACTION_DT_S = 0.2  # a policy of about 5 Hz over a controller of 20 Hz


class SimulatedRobot(Protocol):
    """A robot in a world with a task. Belongs to the thread that made it."""

    control_dt: float  # seconds that one `advance` takes in the world
    action_dt: float  # seconds over which an action's displacements are meant: the period of the training data
    largest_translation: float  # of the training data, in the unit of the actions; shows a policy of another robot
    cameras: tuple[str, ...]  # their names, that of the whole scene first
    state_names: tuple[str, ...]  # of the numbers of its state; empty: none can be read

    @property
    def instruction(self) -> str:
        """Of this episode."""

    @property
    def max_steps(self) -> int:
        """Actions of `action_dt` after which the episode has failed."""

    def reset(self, task: str, seed: int) -> None:
        """Begins an episode; the same task and seed give the same start.

        Raises:
            UserError: there is no such task, or the suite has no such initial state.
        """

    def look(self, camera: str | None = None) -> np.ndarray:
        """A camera's image as the policy expects it, RGB uint8 [height, width, 3]; None: that of the whole scene."""

    def feel(self) -> np.ndarray:
        """Its state, float64, a number for each of `state_names`."""

    def take(self, values: np.ndarray, age_s: float = 0.0) -> None:
        """Starts to follow an action; a newer one replaces it.

        Args:
            values: float64 [7], in the units of the policy: displacements from where the arm was in the action's
                image, meant over `action_dt`; gripper 1 opens, 0 closes.
            age_s: world time that has passed since that image.
        """

    def advance(self) -> None:
        """Lets `control_dt` pass; without an action to follow the arm holds still.

        Raises:
            SimulationDiverged: the world is not finite any more.
        """

    def succeeded(self) -> bool:
        """Whether the task is done now."""

    def acted_on(self) -> str | None:
        """The object that was moved most since the reset; None: none, or the world does not tell."""

    def close(self) -> None: ...


class TableRobot:
    """One table with one arm, a camera in front of it and one at its wrist, both of `image_size` pixels squared.

    See SimulatedRobot for the methods. Its state is the positions of its joints.
    """

    control_dt = 1.0 / CONTROL_HZ
    action_dt = ACTION_DT_S
    largest_translation = 0.05
    cameras: tuple[str, ...] = (FRONT_CAMERA, WRIST_CAMERA)

    def __init__(self, image_size: int = IMAGE_SIZE, arm: Arm = TABLE_ARM) -> None:
        self.world = World(arm)
        self._camera = Camera(self.world, image_size, image_size)
        self._follower = DisplacementFollower(CONTROL_HZ, SCALE)
        self._goal = ImageGoal(CONTROL_HZ, SCALE)
        self.state_names = arm.joint_names
        self.task: Task = choose_tasks([])[0]

    @property
    def instruction(self) -> str:
        return self.task.instruction

    @property
    def max_steps(self) -> int:
        return self.task.max_steps

    def reset(self, task: str, seed: int) -> None:
        (self.task,) = choose_tasks([task])
        self.world.reset(draw_layout(seed))
        self._follower.reset()
        self._goal.reset(self.world.goal)
        self._start = self.world.state()

    def look(self, camera: str | None = None) -> np.ndarray:
        return self._camera.render(camera or FRONT_CAMERA)

    def feel(self) -> np.ndarray:
        return self.world.joint_state()[0]

    def take(self, values: np.ndarray, age_s: float = 0.0) -> None:
        """Starts to follow an action: metres and radians over 0.2 s, base frame; see `ImageGoal`."""
        self._follower.take(*self._goal.left(values, self.action_dt, age_s))

    def advance(self) -> None:
        self.world.control_step(self._follower.next())
        self._goal.add(self.world.goal)

    def state(self) -> WorldState:
        """The true state, which the policy does not see."""
        return self.world.state()

    def succeeded(self) -> bool:
        return self.task.succeeded(self.world.state())

    def acted_on(self) -> str | None:
        return acted_on(self._start, self.world.state())

    def close(self) -> None:
        self._camera.close()
