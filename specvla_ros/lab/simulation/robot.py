# SPDX-License-Identifier: Apache-2.0
"""Simulated robots as rollouts and nodes use them: the protocol, how they follow actions, and the arm at the table."""

import math
from collections import deque
from typing import Protocol

import numpy as np

from specvla_ros.control.pose import Pose, rotation_matrix, rotation_vector
from specvla_ros.lab.simulation.arms import TABLE_ARM, WRIST_CAMERA, Arm
from specvla_ros.lab.simulation.tasks import Task, WorldState, acted_on, choose_tasks, draw_layout
from specvla_ros.lab.simulation.world import CONTROL_HZ, FRONT_CAMERA, SCALE, Camera, World

IMAGE_SIZE = 224
ACTION_DT_S = 0.2  # a policy of about 5 Hz over a controller of 20 Hz
_REMEMBERED_S = 20.0


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

        A UserError says that there is no such task, or that the suite has no such initial state.
        """

    def look(self, camera: str | None = None) -> np.ndarray:
        """A camera's image as the policy expects it, RGB uint8 [height, width, 3]; None: that of the whole scene."""

    def feel(self) -> np.ndarray:
        """Its state, float64, a number for each of `state_names`."""

    def take(self, values: np.ndarray, age_s: float = 0.0) -> None:
        """Starts to follow an action, float64 [7] in the units of the policy; a newer one replaces it.

        Displacements are from where the arm was in the action's image, `age_s` of world time ago, and meant over
        `action_dt`; gripper 1 opens, 0 closes.
        """

    def advance(self) -> None:
        """Lets `control_dt` pass; without an action to follow the arm holds still.

        Raises SimulationDiverged where the world is not finite any more.
        """

    def succeeded(self) -> bool:
        """Whether the task is done now."""

    def acted_on(self) -> str | None:
        """The object that was moved most since the reset; None: none, or the world does not tell."""

    def close(self) -> None: ...


def remaining(displacement: np.ndarray, then: Pose, now: Pose) -> np.ndarray:
    """What is left of a displacement after the robot has moved on, float64 [6] from `now`.

    Args:
        displacement: float64 [6], from `then`: translation in metres and rotation vector in radians, base frame.
        then: the tool's pose at the stamp of the action's image.
        now: the pose that the robot has reached, or is on its way to; displaced by the rest it is the goal.
    """
    turned = now.rotation @ then.rotation.T
    rotation = rotation_vector(rotation_matrix(displacement[3:6]) @ turned.T)
    return np.concatenate([displacement[:3] - (now.position - then.position), rotation])


class ImageGoal:
    """Remembers where the robot was being sent, so that displacements start from where it was in their image.

    A policy's displacement is meant from the pose in its image, to be reached `action_dt` after it. By the time that it
    has been decided, the robot has moved on with the actions before: added on top of that motion, it would count the
    same way twice, and the more often, the more frames are in flight. `largest`, float64 [6], is the training data's
    largest action: metres and radians over its `action_dt`.
    """

    def __init__(self, rate_hz: float, largest: np.ndarray) -> None:
        self._rate_hz = rate_hz
        self._largest = largest
        self._goals: deque[Pose] = deque(maxlen=round(_REMEMBERED_S * rate_hz))

    def reset(self, goal: Pose) -> None:
        self._goals.clear()
        self.add(goal)

    def add(self, goal: Pose) -> None:
        """Takes the goal after another control step."""
        self._goals.append(goal)

    def left(self, values: np.ndarray, action_dt: float, age_s: float) -> tuple[np.ndarray, float]:
        """The rest of an action, float64 [7]: metres, radians over action_dt, gripper; its image is `age_s` old.

        As the action, but from where the robot is going now; and the seconds to spread it over, whole control steps.
        The rest of the way takes the rest of the time; where that is too short for it, no longer than the robot would
        take at the speed of the training data's largest actions, or of this one. Ages count up to 20 s.
        """
        steps = min(round(age_s * self._rate_hz), len(self._goals) - 1)
        if steps <= 0:
            return values, action_dt
        rest = remaining(values[:6], self._goals[-1 - steps], self._goals[-1])
        share = np.abs(rest / self._largest).max() / max(1.0, np.abs(values[:6] / self._largest).max())
        seconds = max(action_dt - age_s, action_dt * share)
        whole = max(1, math.ceil(seconds * self._rate_hz - 1e-6)) / self._rate_hz
        return np.append(rest, values[6]), whole


class DisplacementFollower:
    """Spreads an action evenly over its time; a newer one replaces it; without one the robot holds still.

    So the robot's speed is displacement over `action_dt`, however often actions come. `scale`, float64 [6], is metres
    and radians of one unit of what the robot's controller takes.
    """

    def __init__(self, rate_hz: float, scale: np.ndarray) -> None:
        self._rate_hz = rate_hz
        self._scale = scale
        self.reset()

    def reset(self) -> None:
        """Forgets the action, and opens the gripper."""
        self._per_step = np.zeros(6)
        self._left = 0
        self._gripper = -1.0

    def take(self, values: np.ndarray, action_dt: float) -> None:
        """Starts an action, float64 [7]: metres, radians over action_dt, gripper in [0, 1] with 1 open."""
        steps = max(1, round(action_dt * self._rate_hz))
        self._per_step = values[:6] / self._scale / steps
        self._left = steps
        self._gripper = -1.0 if values[6] > 0.5 else 1.0

    def next(self) -> np.ndarray:
        """The next control step, float64 [7]: displacements in units of `scale`, and -1 to open or +1 to close."""
        moving = self._left > 0
        self._left -= moving
        return np.array([*(self._per_step if moving else np.zeros(6)), self._gripper])


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
