# SPDX-License-Identifier: Apache-2.0
"""A joint trajectory of several points, and the motion between them as ros2_control's controllers interpolate it."""

from dataclasses import dataclass, replace

import numpy as np

# Samples of each segment, at its ends and its middle: its speed is quadratic in time, its acceleration linear.
SAMPLES = 3
REPEAT_S = 0.05  # what is left of a path is sent again after this time, in case a message was lost


@dataclass(frozen=True)
class JointPath:
    """Positions of joints at times: cubic between points if they have velocities, else linear.

    See joint_trajectory_controller's trajectory.rst (ros2_controllers), "Interpolation".
    """

    times_s: np.ndarray  # float64 [points], increasing
    positions: np.ndarray  # float64 [points, joints]
    velocities: np.ndarray | None = None  # float64 [points, joints]

    def from_state(self, positions: np.ndarray, velocities: np.ndarray) -> "JointPath":
        """The path from a state of the joints, float64 [joints] each, through the points after time 0, if any."""
        ahead = self.points(int(np.searchsorted(self.times_s, 0.0, side="right")))
        if not len(ahead.times_s):
            return self
        if ahead.velocities is not None:
            return ahead.begun_at(0.0, positions, velocities)
        return JointPath(np.append(0.0, ahead.times_s), np.vstack([positions, ahead.positions]))

    @property
    def end_s(self) -> float:
        return float(self.times_s[-1])

    def at(self, time_s: float) -> tuple[np.ndarray, np.ndarray]:
        """Position and velocity, float64 [joints] each; outside the path it is at rest at the nearer end."""
        times_s = self.times_s
        if time_s < times_s[0] or time_s >= times_s[-1]:
            return self.positions[0 if time_s < times_s[0] else -1], np.zeros(self.positions.shape[1])
        after = int(np.searchsorted(times_s, time_s, side="right"))
        share = (time_s - times_s[after - 1]) / (times_s[after] - times_s[after - 1])
        position, velocity, _ = self._segments(slice(after - 1, after), np.array([share]))
        return position[0, 0], velocity[0, 0]

    def sampled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions, velocities and accelerations, float64 [segments * SAMPLES, joints] each."""
        found = self._segments(slice(None), np.linspace(0.0, 1.0, SAMPLES))
        positions, velocities, accelerations = (each.reshape(-1, each.shape[-1]) for each in found)
        return positions, velocities, accelerations

    def points(self, first: int) -> "JointPath":
        """The path without the points before one."""
        velocities = None if self.velocities is None else self.velocities[first:]
        return JointPath(self.times_s[first:], self.positions[first:], velocities)

    def delayed(self, seconds: float) -> "JointPath":
        return replace(self, times_s=self.times_s + seconds)

    def begun_at(self, time_s: float, positions: np.ndarray, velocities: np.ndarray) -> "JointPath":
        """The path with an earlier first point, float64 [joints] each."""
        assert self.velocities is not None
        return JointPath(
            np.append(time_s, self.times_s),
            np.vstack([positions, self.positions]),
            np.vstack([velocities, self.velocities]),
        )

    def after(self, time_s: float) -> "JointPath | None":
        """The points later than a time, with their times from then; None: there is none."""
        left = self.points(int(np.searchsorted(self.times_s, time_s, side="right")))
        return replace(left, times_s=left.times_s - time_s) if len(left.times_s) else None

    @staticmethod
    def braking(position: np.ndarray, velocity: np.ndarray, acceleration: np.ndarray) -> "JointPath":
        """The path on which each joint brakes to rest at its acceleration; all float64 [joints]."""
        ends_s = np.abs(velocity) / acceleration
        times_s = np.unique(np.append(ends_s, 0.0).round(6))  # a cubic between two of them is exact
        passed_s = np.minimum(times_s[:, None], ends_s)
        slows = np.sign(velocity) * acceleration
        positions = position + velocity * passed_s - 0.5 * slows * passed_s**2
        velocities = velocity - slows * passed_s
        velocities[-1] = 0.0  # but for rounding
        return JointPath(times_s, positions, velocities)

    def _segments(self, which: slice, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions, velocities and accelerations at shares of segments, float64 [segments, shares, joints]."""
        span = np.diff(self.times_s)[which, None, None]
        start, way = self.positions[:-1][which, None], np.diff(self.positions, axis=0)[which, None]
        share = shares[None, :, None]
        if self.velocities is None:
            steady = np.broadcast_to(way / span, (len(span), len(shares), way.shape[-1]))
            return start + way * share, steady, np.zeros_like(steady)
        left, arrives = self.velocities[:-1][which, None] * span, self.velocities[1:][which, None] * span
        second, third = 3 * way - 2 * left - arrives, left + arrives - 2 * way
        position = start + share * (left + share * (second + share * third))
        velocity = (left + share * (2 * second + 3 * share * third)) / span
        return position, velocity, (2 * second + 6 * share * third) / span**2
