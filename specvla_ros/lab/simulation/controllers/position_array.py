# SPDX-License-Identifier: Apache-2.0
"""Joint positions, by the rules of a forward position controller (ros2_controllers, forward_controllers_base.cpp).

- The newest array is the joints' reference, in the order of the controller's joints: nothing interpolates, nothing
  looks at its age, and silence holds the last one.
- An array that is not all finite is dropped. One of another length is an error; the controller manager then
  deactivates the real controller, this one drops it.

What keeps a leap from being one is the robot: its joints' own speed limits and torques (`commanded_arm.JointServo`).
"""

import numpy as np

from specvla_ros.lab.simulation.controllers.controller import CommandRefusedError, JointState


class PositionArray:
    """Hands positions on."""

    def start(self, measured: JointState) -> None:
        self._reference = measured.positions.copy()

    def take(self, command: np.ndarray, now_s: float) -> None:
        if command.shape != self._reference.shape:
            raise CommandRefusedError(f"it has {command.size} values for {self._reference.size} joints")
        if not np.isfinite(command).all():
            raise CommandRefusedError("its values are not all finite")
        self._reference = command.copy()

    def update(self, measured: JointState, now_s: float) -> JointState:
        return JointState(self._reference, np.zeros_like(self._reference))
