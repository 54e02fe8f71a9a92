# SPDX-License-Identifier: Apache-2.0
"""How a robot follows actions that are displacements from where it was in their image, meant over a time."""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from specvla_ros.control.pose import Pose, rotation_matrix, rotation_vector

_REMEMBERED_S = 20.0


def remaining(displacement: np.ndarray, then: Pose, now: Pose) -> np.ndarray:
    """What is left of a displacement after the robot has moved on.

    Args:
        displacement: float64 [6], from `then`: translation in metres and rotation vector in radians, base frame.
        then: the tool's pose at the stamp of the action's image.
        now: the pose that the robot has reached, or is on its way to.

    Returns:
        float64 [6], from `now`; `now.displaced(…)` is the goal pose, the same as `then.displaced(displacement)`.
    """
    turned = now.rotation @ then.rotation.T
    rotation = rotation_vector(rotation_matrix(displacement[3:6]) @ turned.T)
    return np.concatenate([displacement[:3] - (now.position - then.position), rotation])


class Motion(NamedTuple):
    """The rest of an action."""

    values: np.ndarray  # float64 [7], as the action's, but from where the robot is going now
    seconds: float  # to spread them over; whole control steps, one at least


class ImageGoal:
    """Remembers where the robot was being sent, so that displacements start from where it was in their image.

    A policy's displacement is meant from the pose in its image, to be reached `action_dt` after it. By the time that it
    has been decided, the robot has moved on with the actions before: added on top of that motion, it would count the
    same way twice, and the more often, the more frames are in flight.

    Args:
        rate_hz: control steps per second.
        largest: float64 [6], the training data's largest action: metres and radians over its `action_dt`.
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

    def left(self, values: np.ndarray, action_dt: float, age_s: float) -> Motion:
        """The rest of an action, float64 [7]: metres, radians over action_dt, gripper; its image is `age_s` old.

        The rest of the way takes the rest of the time; where that is too short for it, no longer than the robot would
        take at the speed of the training data's largest actions, or of this one. Ages count up to 20 s.
        """
        steps = min(round(age_s * self._rate_hz), len(self._goals) - 1)
        if steps <= 0:
            return Motion(values, action_dt)
        rest = remaining(values[:6], self._goals[-1 - steps], self._goals[-1])
        share = np.abs(rest / self._largest).max() / max(1.0, np.abs(values[:6] / self._largest).max())
        seconds = max(action_dt - age_s, action_dt * share)
        whole = max(1, math.ceil(seconds * self._rate_hz - 1e-6)) / self._rate_hz
        return Motion(np.append(rest, values[6]), whole)


class DisplacementFollower:
    """Spreads an action evenly over its time; a newer one replaces it; without one the robot holds still.

    So the robot's speed is displacement over `action_dt`, however often actions come.

    Args:
        rate_hz: control steps per second.
        scale: float64 [6], metres and radians of one unit of what the robot's controller takes.
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
