# SPDX-License-Identifier: Apache-2.0
"""Poses, by the rules of a Cartesian motion controller (FZI's cartesian_controllers, cartesian_motion_controller.cpp).

- The newest target is followed; without a new one the arm goes on to it, and stays there for ever. The stamp is not
  looked at.
- A NaN and a frame other than the base's are ignored, and the target before stays.
- How fast it goes there is its gain alone, up to what the joints allow: a target far away is no error, and is gone to
  at once.

FZI's controller searches with a simulated mass in place of a Jacobian's damped inverse; what a user meets is alike: an
error that decays with a time constant, here 1/20 s, and no singular leap.
"""

import numpy as np

from specvla_ros.control.pose import Pose, rotation_vector
from specvla_ros.lab.simulation.controllers.controller import (
    BASE_FRAME,
    CONTROL_DT_S,
    ArmKinematics,
    CommandRefusedError,
    JointState,
)

_GAIN = 20.0  # 1/s
_MAX_ERROR_M, _MAX_ERROR_RAD = 1.0, 1.0
_DAMPING = 0.02
_POSTURE_GAIN = 1.0  # 1/s


class CartesianPose:
    """Moves the tool to the newest target.

    Args:
        kinematics: of the arm.
    """

    def __init__(self, kinematics: ArmKinematics) -> None:
        self._kinematics = kinematics

    def start(self, measured: JointState) -> None:
        self._position = self._posture = measured.positions.copy()
        self._target = self._kinematics.tool(self._position)

    def take(self, command: tuple[str, Pose], now_s: float) -> None:
        """`command`: the frame and the pose."""
        frame, pose = command
        if not (np.isfinite(pose.position).all() and np.isfinite(pose.rotation).all()):
            raise CommandRefusedError("its values are not all finite, or its quaternion is zero")
        if frame != BASE_FRAME:
            raise CommandRefusedError(f"its frame is '{frame}', not '{BASE_FRAME}'")
        self._target = pose

    def update(self, measured: JointState, now_s: float) -> JointState:
        tool, jacobian = self._kinematics.tool(self._position), self._kinematics.jacobian(self._position)
        way = _shortened(self._target.position - tool.position, _MAX_ERROR_M)
        turn = _shortened(rotation_vector(self._target.rotation @ tool.rotation.T), _MAX_ERROR_RAD)
        damped = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + _DAMPING**2 * np.eye(6))
        velocity = damped @ (_GAIN * np.concatenate([way, turn]))
        free = np.eye(len(velocity)) - damped @ jacobian
        velocity += free @ (_POSTURE_GAIN * (self._posture - self._position))
        velocity *= min(1.0, float((self._kinematics.speed / np.maximum(np.abs(velocity), 1e-12)).min()))
        reached = np.clip(self._position + velocity * CONTROL_DT_S, self._kinematics.low, self._kinematics.high)
        velocity, self._position = (reached - self._position) / CONTROL_DT_S, reached
        return JointState(reached, velocity)


def _shortened(vector: np.ndarray, longest: float) -> np.ndarray:
    return vector * min(1.0, longest / max(float(np.linalg.norm(vector)), 1e-12))
