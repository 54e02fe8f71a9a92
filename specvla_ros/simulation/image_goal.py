"""What an action asks for that answers a picture from a while ago: the way there may have been gone in part."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from specvla_ros.simulation.osc import (
    CONTROL_HZ,
    POSITION_SCALE_M,
    ROTATION_SCALE_RAD,
    Pose,
    rotation_matrix,
    rotation_vector,
)

_REMEMBERED_S = 20.0
_SCALE = np.array([POSITION_SCALE_M] * 3 + [ROTATION_SCALE_RAD] * 3)


@dataclass(frozen=True)
class Motion:
    """What is left of an action.

    Args:
        values: float64 [7], as the action's, but from where the arm is going now.
        seconds: to spread them over; whole control steps, one at least.
    """

    values: np.ndarray
    seconds: float


class ImageGoal:
    """Remembers where the arm was being sent, so that displacements start from where it was in their picture.

    A policy's displacement is meant from the pose in its picture, to be reached `action_dt` after it. By the time that
    it has been decided, the arm has been going on with the actions before: added on top of that motion, it would count
    the same way twice, and the more often, the more frames are in flight.
    """

    def __init__(self) -> None:
        self._goals: deque[Pose] = deque(maxlen=round(_REMEMBERED_S * CONTROL_HZ))

    def reset(self, goal: Pose) -> None:
        """Begins an episode with the arm's goal."""
        self._goals.clear()
        self.add(goal)

    def add(self, goal: Pose) -> None:
        """Takes the goal behind another control step."""
        self._goals.append(goal)

    def left(self, values: np.ndarray, action_dt: float, age_s: float) -> Motion:
        """What to do now for an action.

        The rest of the way takes the rest of the time; where that is too short for it, no longer than the arm would
        take at the speed of the training data's largest actions, or of this one.

        Args:
            values: float64 [7]: metres, radians over action_dt, gripper.
            action_dt: seconds.
            age_s: of the picture; what is older than 20 s counts as 20 s old.
        """
        steps = min(round(age_s * CONTROL_HZ), len(self._goals) - 1)
        if steps <= 0:
            return Motion(values, action_dt)
        then, now = self._goals[-1 - steps], self._goals[-1]
        turned = now.rotation @ then.rotation.T
        rest = values.copy()
        rest[:3] -= now.position - then.position
        rest[3:6] = rotation_vector(rotation_matrix(values[3:6]) @ turned.T)
        share = np.abs(rest[:6] / _SCALE).max() / max(1.0, np.abs(values[:6] / _SCALE).max())
        seconds = max(action_dt - age_s, action_dt * share)
        return Motion(rest, max(1, math.ceil(seconds * CONTROL_HZ - 1e-6)) / CONTROL_HZ)
