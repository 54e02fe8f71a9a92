# SPDX-License-Identifier: Apache-2.0
"""Simulated robots for rollouts and nodes: the protocol, the followers of actions, and the arm at the table."""

import math
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specvla_ros.control.convention import ACTION_NAMES, positions_joints
from specvla_ros.control.pose import Pose
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.arm import TABLE_ARM, WRIST_CAMERA, Arm
from specvla_ros.lab.simulation.tasks import Task, WorldState, acted_on, choose_tasks, draw_layout
from specvla_ros.lab.simulation.world import CONTROL_HZ, FRONT_CAMERA, SCALE, Camera, World

if TYPE_CHECKING:  # a policy's actions, as its checkpoint describes them; the demo does not need torch
    from specvla_ros.models.codecs.codec import Codec
    from specvla_ros.models.codecs.statistics import ActionStatistics

IMAGE_SIZE = 224
ACTION_DT_S = 0.2  # a policy of about 5 Hz over a controller of 20 Hz
_REMEMBERED_S = 20.0


def check_policy(actions: "Codec | ActionStatistics", taken: tuple[str, ...], largest_translation: float) -> None:
    """Raises UserError if a policy's actions cannot come from a robot's training data.

    Args:
        taken: names of the values that the robot takes.
        largest_translation: see `SimulatedRobot`.
    """
    key, (low, high) = actions.unnorm_key, actions.action_range
    if positions_joints(key):
        if actions.names != taken:
            names, own = (", ".join(each) for each in (actions.names, taken))
            raise UserError(f"the policy moves the joints {names}, but this robot has {own}")
        return
    if len(low) != len(taken):
        raise UserError(f"the policy's actions ('{key}') have {len(low)} values, the robot takes {len(taken)}")
    reach = np.maximum(np.abs(low), np.abs(high))[:3].max()
    if not largest_translation / 50 < reach < largest_translation * 4:
        raise UserError(
            f"the action statistics '{key}' do not fit this robot: the policy moves by up to {reach:g} per action, the "
            f"robot's training data by {largest_translation:g}; was the policy trained for another robot, or does it "
            "need another --unnorm-key?"
        )


class SimulatedRobot(Protocol):
    """A robot in a simulated world with a task. Not thread-safe: only the thread that created it may use it."""

    control_dt: float  # world seconds that one `advance` takes
    action_dt: float  # duration of an action's displacements in seconds: the period of the training data
    largest_translation: float  # maximum of the training data, in actions' units; detects policies of other robots
    cameras: tuple[str, ...]  # names; the camera of the whole scene comes first
    state_names: tuple[str, ...]  # names of the state's values; empty if the state cannot be read
    action_names: tuple[str, ...]  # names of an action's values

    @property
    def instruction(self) -> str:
        """The episode's instruction."""

    @property
    def max_steps(self) -> int:
        """Actions of `action_dt` after which the episode fails."""

    def reset(self, task: str, seed: int) -> None:
        """Starts an episode; the same task and seed give the same start.

        Raises UserError if the task is unknown, or if the suite has no such initial state.
        """

    def look(self, camera: str | None = None) -> np.ndarray:
        """A camera's image in the policy's format, RGB uint8 [height, width, 3]; None: the whole scene's camera."""

    def feel(self) -> np.ndarray:
        """The robot's state, float64, one value per name in `state_names`."""

    def take(self, values: np.ndarray, age_s: float = 0.0) -> None:
        """Starts to follow an action, float64 [7] in the units of the policy; a newer one replaces it.

        Displacements are relative to the arm's pose in the action's image, `age_s` of world time ago, and last
        `action_dt`; gripper 1 opens, 0 closes.
        """

    def advance(self) -> None:
        """Advances the world by `control_dt`; without an action to follow the arm holds still.

        Raises SimulationDiverged if the world's state is no longer finite.
        """

    def succeeded(self) -> bool:
        """Checks whether the task is done now."""

    def acted_on(self) -> str | None:
        """The object that was moved most since the reset; None if none was, or the world does not report it."""

    def close(self) -> None: ...


class ImageGoal:
    """Remembers the robot's goals, so that displacements start from the pose in their image.

    A policy's displacement is relative to the pose in its image and ends `action_dt` after it. While it is decoded, the
    robot follows earlier actions. Added on top of that motion, the displacement would count the same path twice, or
    more often with more frames in flight. `largest`, float64 [6], is the training data's largest action: metres and
    radians over its `action_dt`.
    """

    def __init__(self, rate_hz: float, largest: np.ndarray) -> None:
        self._rate_hz = rate_hz
        self._largest = largest
        self._goals: deque[Pose] = deque(maxlen=round(_REMEMBERED_S * rate_hz))

    def reset(self, goal: Pose) -> None:
        self._goals.clear()
        self.add(goal)

    def add(self, goal: Pose) -> None:
        """Adds the goal after another control step."""
        self._goals.append(goal)

    def left(self, values: np.ndarray, action_dt: float, age_s: float) -> tuple[np.ndarray, float]:
        """Returns the rest of an action whose image is `age_s` old, and the seconds to spread it over.

        Both actions are float64 [7]: metres, radians over action_dt, gripper; the rest starts at the robot's current
        goal. Its duration is the time left, in whole control steps. If that is too short, it is the time needed at the
        speed of the training data's largest action, or of this one if it is faster. Ages are capped at 20 s.
        """
        steps = min(round(age_s * self._rate_hz), len(self._goals) - 1)
        if steps <= 0:
            return values, action_dt
        rest = self._goals[-1].way_to(self._goals[-1 - steps].displaced(values[:6]))
        share = np.abs(rest / self._largest).max() / max(1.0, np.abs(values[:6] / self._largest).max())
        seconds = max(action_dt - age_s, action_dt * share)
        whole = max(1, math.ceil(seconds * self._rate_hz - 1e-6)) / self._rate_hz
        return np.append(rest, values[6]), whole


class DisplacementFollower:
    """Spreads an action evenly over its duration. A newer action replaces it; without one the robot holds still.

    The robot's speed is thus displacement / `action_dt`, whatever the action rate. `scale`, float64 [6], is one unit of
    the controller's input in metres and radians.
    """

    def __init__(self, rate_hz: float, scale: np.ndarray) -> None:
        self._rate_hz = rate_hz
        self._scale = scale
        self.reset()

    def reset(self) -> None:
        """Forgets the action and opens the gripper."""
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
        """The next control step, float64 [7]: displacements in units of `scale`, then -1 to open or +1 to close."""
        moving = self._left > 0
        self._left -= moving
        return np.array([*(self._per_step if moving else np.zeros(6)), self._gripper])


class TableRobot:
    """One table with one arm, a front camera and a wrist camera, both with square images of `image_size` pixels.

    See SimulatedRobot for the methods. The state holds the joint positions.
    """

    control_dt = 1.0 / CONTROL_HZ
    action_dt = ACTION_DT_S
    largest_translation = 0.05
    cameras: tuple[str, ...] = (FRONT_CAMERA, WRIST_CAMERA)
    action_names: tuple[str, ...] = ACTION_NAMES

    def __init__(self, image_size: int = IMAGE_SIZE, arm: Arm = TABLE_ARM) -> None:
        self.world = World(arm)
        self._camera = Camera(self.world, image_size, image_size)
        self._follower = DisplacementFollower(CONTROL_HZ, SCALE)
        self._goal = ImageGoal(CONTROL_HZ, SCALE)
        self.state_names = arm.joint_names
        self.task: Task = arm.tasks[0]

    @property
    def instruction(self) -> str:
        return self.task.instruction

    @property
    def max_steps(self) -> int:
        return self.task.max_steps

    def reset(self, task: str, seed: int) -> None:
        arm = self.world.arm
        (self.task,) = choose_tasks([task], arm.tasks)
        self.world.reset(draw_layout(seed, arm.area))
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
        """The true state, hidden from the policy."""
        return self.world.state()

    def succeeded(self) -> bool:
        return self.task.succeeded(self.world.state())

    def acted_on(self) -> str | None:
        return acted_on(self._start, self.world.state())

    def close(self) -> None:
        self._camera.close()
