"""How a robot follows actions that are displacements over a time."""

import numpy as np

from specvla_ros.simulation.osc import CONTROL_HZ, POSITION_SCALE_M, ROTATION_SCALE_RAD


class DisplacementFollower:
    """Spreads an action evenly over its time; a newer one takes its place; without one the arm holds still.

    So the arm's speed is displacement over `action_dt`, however often actions come.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the action, and opens the gripper."""
        self._per_step = np.zeros(6)
        self._left = 0
        self._gripper = -1.0

    def take(self, values: np.ndarray, action_dt: float) -> None:
        """Starts an action.

        Args:
            values: float64 [7]: metres, radians over action_dt, gripper in [0, 1] with 1 open.
            action_dt: seconds.
        """
        steps = max(1, round(action_dt * CONTROL_HZ))
        scale = np.array([POSITION_SCALE_M] * 3 + [ROTATION_SCALE_RAD] * 3)
        self._per_step = values[:6] / scale / steps
        self._left = steps
        self._gripper = -1.0 if values[6] > 0.5 else 1.0

    def next(self) -> np.ndarray:
        """The next control step's OSC_POSE action, float64 [7]; steps of 50 ms."""
        moving = self._left > 0
        self._left -= moving
        return np.array([*(self._per_step if moving else np.zeros(6)), self._gripper])
