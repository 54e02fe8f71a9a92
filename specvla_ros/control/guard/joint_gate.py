# SPDX-License-Identifier: Apache-2.0
"""The gate of commands to joints: trajectories, and arrays of positions."""

from dataclasses import dataclass

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, JointCommand, SentJoints
from specvla_ros.control.guard.gate import NEAR, SLACK_S, TOLERANCE, Measured, time_s
from specvla_ros.control.guard.settings import GuardSettings, Output
from specvla_ros.control.guard.tracking import Bounds, Window, braked, shortened_to, stopping_way, toward
from specvla_ros.control.inverse_kinematics import trajectory_point
from specvla_ros.control.pose import Pose

_REST = 1e-9
_BEHIND_S = 0.1  # at full speed, what goes out may lag so far behind the commands, and by their timeout


@dataclass(frozen=True)
class _Path:
    """What is commanded, from its arrival on.

    Args:
        positions: float64 [points, joints].
        times_s: float64 [points].
        feed: float64 [joints], how fast successive commands of one point go.
        fed_s: for how long the feed holds.
        arrived_s: steady clock.
        begun: float64 [joints], where a trajectory begins: what went out when it came; None: nothing had.
    """

    positions: np.ndarray
    times_s: np.ndarray
    feed: np.ndarray
    fed_s: float
    arrived_s: float
    begun: np.ndarray | None

    def at(self, steady_s: float) -> tuple[np.ndarray, np.ndarray]:
        """Position and velocity, float64 [joints] each."""
        age_s, positions, times_s = steady_s - self.arrived_s, self.positions, self.times_s
        if times_s[-1] <= 0:
            return positions[0] + self.feed * min(age_s, self.fed_s), self.feed
        if self.begun is not None and times_s[0] > 0:  # as a joint_trajectory_controller: from here to its first point
            positions, times_s = np.vstack([self.begun, positions]), np.append(0.0, times_s)
        if age_s < times_s[0] or age_s >= times_s[-1]:
            return positions[0 if age_s < times_s[0] else -1], np.zeros(positions.shape[1])
        after = int(np.searchsorted(times_s, age_s, side="right"))
        span_s = times_s[after] - times_s[after - 1]
        velocity = (positions[after] - positions[after - 1]) / span_s
        return positions[after - 1] + velocity * (age_s - times_s[after - 1]), velocity

    def left_s(self, steady_s: float) -> float:
        """Until its last point is due."""
        return max(0.0, float(self.times_s[-1]) - (steady_s - self.arrived_s))


class JointGate:
    """Positions of joints. What goes out follows the command within each joint's limits, and brakes to hold.

    Args:
        settings: the guard's.
    """

    def __init__(self, settings: GuardSettings) -> None:
        joints = settings.joints
        self._names = joints.names
        self._low, self._high = np.array(joints.position_min), np.array(joints.position_max)
        self._bounds = Bounds(joints.speeds, joints.accelerations)
        self._lead = settings.max_lead_rad
        self._ahead = settings.kind is Output.JOINT_TRAJECTORY
        self._behind = self._bounds.speed * (_BEHIND_S + settings.command_timeout_s)
        self._path: _Path | None = None
        self._sent: np.ndarray | None = None
        self._velocity = np.zeros((len(self._names), 1))
        self._joined = False
        self._held = True  # at rest by stop, not by command
        self._sent_s = 0.0  # when the driver sent the command
        self._window: Window[np.ndarray] = Window()

    @property
    def wants_motion(self) -> bool:
        if self._path is None or self._sent is None:
            return self._path is not None
        return bool(np.abs(self._path.positions - self._sent).max() > _REST)

    @property
    def at_rest(self) -> bool:
        return bool(np.abs(self._velocity).max() <= _REST)

    def take(self, command: JointCommand, measured: Measured, now: Instant) -> Refusal | None:
        positions, sent_s = self._ordered(command), time_s(command.stamp, now)
        if not isinstance(positions, Refusal):
            refusal = self._problem(positions, command.times_s, measured) or self._jump(
                positions, sent_s - self._sent_s
            )
            positions = positions if refusal is None else refusal
        self._sent_s = sent_s
        if isinstance(positions, Refusal):
            self.forget()
            return positions
        earlier = self._window.add(sent_s, positions[0])
        feed, fed_s = np.zeros(len(self._names)), 0.0
        if earlier is not None:
            first, span_s, fed_s = earlier
            feed = shortened_to((positions[0] - first)[:, None] / span_s, self._bounds.speed)[:, 0]
        self._path = _Path(positions, command.times_s, feed, fed_s, now.steady_s, self._sent)
        return None

    def forget(self) -> None:
        self._path = None
        self._window.forget()

    def watch(self, tool: Pose) -> None:
        """Joints are measured by themselves."""

    def conditions(self, measured: Measured) -> list[Refusal]:
        if measured.joints is None or self._sent is None or self._held:
            return []
        lead = np.abs(self._sent - measured.joints)
        if (lead <= self._lead).all():
            return []
        detail = f"{self._names[lead.argmax()]} is {lead.max():.3f} from where it was sent"
        return [Refusal(Cause.NOT_FOLLOWING, detail)]

    def not_near(self, measured: Measured) -> Refusal | None:
        if self._path is None or measured.joints is None:
            return Refusal(Cause.NOT_NEAR, "there is no command to resume with")
        away = np.abs(self._path.positions[0] - measured.joints)
        if (away <= NEAR * self._lead).all():
            return None
        detail = f"the command for {self._names[away.argmax()]} is {away.max():.3f} from where it is measured"
        return Refusal(Cause.NOT_NEAR, f"{detail}, too far to resume")

    def begin(self, measured: Measured) -> None:
        if self._sent is None or self._left_behind(measured):
            self._sent = measured.joints
        self._velocity, self._joined, self._held = np.zeros((len(self._names), 1)), False, False

    def go(self, now: Instant, dt_s: float) -> SentJoints | None:
        if self._sent is None or self._path is None:
            return None
        position, feed = self._path.at(now.steady_s)
        velocity = toward(self._velocity, (position - self._sent)[:, None], feed[:, None], self._bounds, dt_s)
        rest = self._sent + (velocity * dt_s + stopping_way(velocity, self._bounds))[:, 0]
        low, high = np.minimum(self._low, self._sent), np.maximum(self._high, self._sent)
        leaves = (rest < low - 1e-9) | (rest > high + 1e-9)
        return self._move(np.where(leaves[:, None], braked(self._velocity, self._bounds, dt_s), velocity), dt_s)

    def stop(self, measured: Measured, dt_s: float) -> SentJoints | None:
        if self._sent is None:
            return None
        sent = self._move(braked(self._velocity, self._bounds, dt_s), dt_s)
        self._held = self.at_rest
        # Somebody moved the robot meanwhile: to hold it where it was would move it.
        return None if self._held and self._left_behind(measured) else sent

    def halt(self) -> None:
        if self._sent is not None and self._ahead:
            self._sent = trajectory_point(self._sent, self._velocity[:, 0])  # there the controller went, and holds
        self._velocity = np.zeros((len(self._names), 1))

    def lag(self, now: Instant) -> Refusal | None:
        """Commands that change faster than the limits let anything follow."""
        if self._sent is None or self._path is None:
            return None
        left_s = self._path.left_s(now.steady_s)
        there = self._path.positions[-1] if left_s else self._path.at(now.steady_s)[0]
        behind, allowed = np.abs(there - self._sent), self._behind + self._bounds.speed * left_s
        self._joined |= bool((behind <= 0.5 * allowed).all())
        if not self._joined or (behind <= allowed).all():
            return None
        worst = (behind / allowed).argmax()
        detail = f"the commands for {self._names[worst]} ran away by {behind[worst]:.3f} from what the limits allow"
        return Refusal(Cause.OVER_ACCELERATION, detail)

    def _move(self, velocity: np.ndarray, dt_s: float) -> SentJoints:
        assert self._sent is not None
        self._velocity = velocity
        self._sent = self._sent + velocity[:, 0] * dt_s
        return SentJoints(self._sent, velocity[:, 0])

    def _left_behind(self, measured: Measured) -> bool:
        if self._sent is None or measured.joints is None:
            return False
        return bool((np.abs(self._sent - measured.joints) > self._lead).any())

    def _ordered(self, command: JointCommand) -> np.ndarray | Refusal:
        """Positions [points, joints] in the order of the parameters, or what is wrong with the message's form."""
        names, positions, times_s = command.names, command.positions, command.times_s
        if positions.ndim != 2 or not len(positions) or len(times_s) != len(positions):
            return Refusal(Cause.BAD_FORM, "the command has no points of one position per joint")
        if positions.shape[1] != len(self._names):
            detail = f"the command has {positions.shape[1]} positions, and joints.names {len(self._names)}"
            return Refusal(Cause.BAD_FORM, detail)
        if not (np.isfinite(positions).all() and np.isfinite(times_s).all()):
            return Refusal(Cause.NOT_FINITE, "the command holds NaN or infinity")
        if times_s[0] < 0 or (np.diff(times_s) <= 0).any():
            return Refusal(Cause.BAD_FORM, "the points' times do not rise")
        if names is None:
            return positions
        if sorted(names) != sorted(self._names):
            return Refusal(Cause.BAD_FORM, f"the command is for {', '.join(names)}, not for joints.names")
        return positions[:, [names.index(name) for name in self._names]]

    def _problem(self, positions: np.ndarray, times_s: np.ndarray, measured: Measured) -> Refusal | None:
        low, high = self._low, self._high
        if measured.joints is not None:  # it may come back, and never get further out
            low, high = np.minimum(low, measured.joints), np.maximum(high, measured.joints)
        outside = ((positions < low - 1e-9) | (positions > high + 1e-9)).any(axis=0)
        if outside.any():
            worst = int(outside.argmax())
            detail = f"{self._names[worst]} is commanded out of {self._low[worst]:g} to {self._high[worst]:g}"
            return Refusal(Cause.OUTSIDE, detail)
        speed = np.abs(np.diff(positions, axis=0)) / np.diff(times_s)[:, None]
        if (speed > self._bounds.speed * TOLERANCE).any():
            worst = int((speed / self._bounds.speed).max(axis=0).argmax())
            detail = f"the trajectory moves {self._names[worst]} at {speed[:, worst].max():.4g} per second"
            return Refusal(Cause.OVER_SPEED, f"{detail}, and joints.max_speed is {self._bounds.speed[worst]:g}")
        if measured.joints is None:
            return None
        away = np.abs(positions[0] - measured.joints)
        if (away <= self._lead).all():
            return None
        detail = f"the command for {self._names[away.argmax()]} is {away.max():.3f} from where it is measured"
        return Refusal(Cause.FAR, f"{detail}; max_lead_rad is {self._lead:g}")

    def _jump(self, positions: np.ndarray, elapsed_s: float) -> Refusal | None:
        if self._path is None:
            return None
        step = positions[0] - self._path.positions[0]
        over = np.abs(step) / (self._bounds.speed * (elapsed_s * TOLERANCE + SLACK_S))
        if (over <= 1).all():
            return None
        worst = int(over.argmax())
        detail = f"a step of {self._names[worst]} by {abs(step[worst]):.4g} within {elapsed_s:.3f} s"
        return Refusal(Cause.OVER_SPEED, f"{detail} is faster than joints.max_speed {self._bounds.speed[worst]:g}")
