# SPDX-License-Identifier: Apache-2.0
"""Joint velocities that keep an arm at its targets, for a robot that takes no positions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specvla_ros.control.bounded_motion import Target
from specvla_ros.control.inverse_kinematics import JointSolver
from specvla_ros.control.joint_space import JointKinematics

_GAIN = 6.0  # 1/s, as for tool velocities
_REACHED = 5e-4  # rad or m: at rest, nearer errors are left


class JointTracking:
    """Velocities of the targets' joints, corrected by the measured error, within the limits of speed and acceleration.

    A velocity interface follows inexactly: without the correction its joints drift from the targets.
    """

    def __init__(self, commands: JointSolver | JointKinematics) -> None:
        self._commands = commands
        self.rest()

    def rest(self) -> None:
        """Starts at rest."""
        self._velocity = np.zeros(len(self._commands.joints))  # sent last

    def next(self, target: Target[Any], measured: Mapping[str, float] | None, passed_s: float) -> np.ndarray:
        """The velocities to send, float64 [n]; raises UnreachableError.

        `measured`: joint positions by name; None if unknown, and nothing is corrected.
        """
        positions, velocities = self._commands.follow(target)
        if not target.moving:  # a redundant arm's posture may still creep
            velocities = np.zeros_like(velocities)
        self._velocity = self._towards(positions, velocities, measured, passed_s)
        return self._velocity

    def brake(self, passed_s: float) -> np.ndarray:
        """The velocities to send while no target can be followed, float64 [n]."""
        self._velocity = self._within_acceleration(np.zeros_like(self._velocity), passed_s)
        return self._velocity

    def _towards(
        self, positions: np.ndarray, velocities: np.ndarray, measured: Mapping[str, float] | None, passed_s: float
    ) -> np.ndarray:
        speed = self._commands.max_speed
        if measured is not None:
            missing = positions - np.array([measured[name] for name in self._commands.joints])
            missing = np.where((velocities == 0) & (np.abs(missing) < _REACHED), 0.0, missing)
            velocities = np.clip(velocities + _GAIN * missing, -speed, speed)
        return self._within_acceleration(velocities, passed_s)  # a correction that begins must not jump

    def _within_acceleration(self, velocities: np.ndarray, passed_s: float) -> np.ndarray:
        acceleration = self._commands.max_acceleration
        if acceleration is None:
            return velocities
        most = acceleration * passed_s
        return self._velocity + np.clip(velocities - self._velocity, -most, most)
