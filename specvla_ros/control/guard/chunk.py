# SPDX-License-Identifier: Apache-2.0
"""Checks whether a trajectory of several points may go to the robot's controller whole.

The controller then follows it without the guard, to its end if no other message arrives. So every limit is checked
along the motion between its points, and it must end at rest, soon.
"""

import numpy as np

from specvla_ros.control.guard.gate import REST, SLACK_S, TOLERANCE
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.control.guard.tool_gates import EDGE_M
from specvla_ros.control.joint_path import SAMPLES, JointPath
from specvla_ros.control.robot_model import ToolKinematics

_TOOL_SPEED = 1.05  # factor on the tool's speed, which is the mean between two samples
_ROUNDING = 1e-9


class ChunkCheck:
    """Checks paths against the limits of joints and tool."""

    def __init__(self, settings: GuardSettings, kinematics: ToolKinematics | None) -> None:
        self._joints, self._limits, self._kinematics = settings.joints, settings.limits, kinematics
        self._braking = settings.joint_braking

    def unfit(self, path: JointPath, speed: np.ndarray, tool_speed: float) -> str:
        """Describes why a path may not be sent whole; empty: it may.

        Args:
            speed, tool_speed: float64 [joints] and m/s, at the present speed scale.
        """
        if path.velocities is None or len(path.times_s) < 2:
            return "its points have no velocities" if path.velocities is None else "it has a single point"
        if (np.abs(path.velocities[-1]) > REST).any():
            return "it does not end at rest"
        if path.end_s > self._joints.chunk_s + SLACK_S:
            return f"it ends {path.end_s:.2f} s ahead, and joints.chunk_s is {self._joints.chunk_s:g}"
        positions, velocities, accelerations = path.sampled()
        return (
            self._too_high("speed", velocities, speed * TOLERANCE)
            or self._too_high("acceleration", accelerations, self._joints.accelerations * TOLERANCE)
            or self._out_of_range(positions, velocities)
            or self._tool_problem(positions, path.times_s, tool_speed)
        )

    def _too_high(self, what: str, values: np.ndarray, allowed: np.ndarray) -> str:
        found = np.abs(values).max(axis=0)
        over = found - allowed
        worst = int(over.argmax())
        if over[worst] <= _ROUNDING:
            return ""
        return f"the {what} of {self._joints.names[worst]} would be {found[worst]:.3g}, more than {allowed[worst]:.3g}"

    def _out_of_range(self, positions: np.ndarray, velocities: np.ndarray) -> str:
        """Checks where the joints go, and where they would come to rest if they were stopped on their way."""
        low = np.minimum(self._joints.position_min, positions[0]) - _ROUNDING
        high = np.maximum(self._joints.position_max, positions[0]) + _ROUNDING
        rest = positions + velocities * np.abs(velocities) / (2 * self._braking)
        for places, when in ((positions, ""), (rest, " if it were stopped")):
            outside = ((places < low) | (places > high)).any(axis=0)
            if outside.any():
                return f"{self._joints.names[int(outside.argmax())]} would leave its range{when}"
        return ""

    def _tool_problem(self, positions: np.ndarray, times_s: np.ndarray, tool_speed: float) -> str:
        if self._kinematics is None:  # then the guard knows the tool's motion only as it is measured
            return ""
        places = np.array([self._kinematics.pose_at(each).position for each in positions])
        low, high = self._limits.widened(places[0], EDGE_M)
        if ((places < low) | (places > high)).any():
            return "the tool would leave the workspace"
        steps_s = np.diff(times_s) / (SAMPLES - 1)
        ways = np.linalg.norm(np.diff(places.reshape(-1, SAMPLES, 3), axis=1), axis=2)
        fastest = float((ways / steps_s[:, None]).max())
        if fastest <= tool_speed * _TOOL_SPEED:
            return ""
        return f"the tool would move at {fastest:.3g} m/s, more than {tool_speed:.3g}"
