# SPDX-License-Identifier: Apache-2.0
"""A guard, a driver that behaves, a robot that follows, and faults at chosen ticks. Without ROS, on made-up clocks."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from specvla_ros.control.gripper import GripperLimits
from specvla_ros.control.guard.commands import (
    Command,
    Instant,
    JointCommand,
    JointPositions,
    JointVelocities,
    Sent,
    SentJoints,
    SentTwist,
    SentVelocities,
    Stamp,
    ToolPose,
    TwistCommand,
)
from specvla_ros.control.guard.guard import Guard, Outcome, State
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S
from specvla_ros.control.limits import JointLimits, Limits
from specvla_ros.control.pose import Pose

BASE = "base"
LIMITS = Limits(
    linear_speed=0.25,
    angular_speed=1.0,
    linear_acceleration=2.0,
    angular_acceleration=8.0,
    linear_jerk=50.0,
    angular_jerk=200.0,
    workspace_min=(0.2, -0.4, 0.0),
    workspace_max=(0.8, 0.4, 0.6),
)
JOINTS = JointLimits(
    names=("shoulder", "elbow"),
    position_min=(-2.0, -1.0),
    position_max=(2.0, 1.5),
    max_speed=(1.0, 2.0),
    max_acceleration=(8.0, 16.0),
)
GRIPPER = GripperLimits(output="array", joint="finger", open_value=0.04, closed_value=0.0)
HOME = np.array([0.5, 0.0, 0.3])
UPRIGHT = (1.0, 0.0, 0.0, 0.0)
START_NS = 1_000 * 10**9
MOVES_S = 0.02  # two periods


def settings(output: str, **changes: Any) -> GuardSettings:
    """Settings that start."""
    chosen = GuardSettings(output=output, base_frame=BASE, limits=LIMITS, joints=JOINTS, gripper=GRIPPER, rate_hz=100.0)
    return replace(chosen, **changes)


@dataclass
class Rig:
    """Everybody around a guard, one tick at a time.

    Without faults the driver circles with a speed and acceleration well within the limits, the robot follows at once,
    the policy acts, and the hand is on the switch.
    """

    guard: Guard
    output: str
    steady_s: float = 50.0
    clock_ns: int = START_NS
    tool: np.ndarray = field(default_factory=HOME.copy)
    joints: np.ndarray = field(default_factory=lambda: np.zeros(2))
    phase_s: float = 0.0
    passed_phase_s: float = 0.0
    sent: list[tuple[float, Any]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def now(self) -> Instant:
        return Instant(self.steady_s, self.clock_ns)

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.clock_ns, BASE)

    def command(self) -> Any:
        """What a right driver sends now."""
        swing = 0.2 * np.sin(0.6 * self.phase_s)  # at most 0.12 m/s, 0.072 m/s²
        if self.output == "twist":
            return TwistCommand(self.stamp, np.array([0.0, 0.12 * np.cos(0.6 * self.phase_s), 0.0, 0.0, 0.0, 0.1]))
        if self.output == "pose":
            return ToolPose(self.stamp, HOME + np.array([0.0, swing, 0.0]), UPRIGHT)
        positions = np.array([[2 * swing, -swing]])
        if self.output == "position_array":
            return JointCommand(Stamp(None), None, positions, np.zeros(1))
        if self.output == "velocity_array":
            return JointVelocities(Stamp(None), 0.12 * np.cos(0.6 * self.phase_s) * np.array([2.0, -1.0]))
        if self.output == "joint_trajectory_chunk":
            return self._chunk()
        return JointCommand(Stamp(self.clock_ns), ("elbow", "shoulder"), positions[:, ::-1], np.array([0.01]))

    def _chunk(self) -> JointCommand:
        """A third of a second of the circle, then rest."""
        times_s = 0.04 * np.arange(1, 9)
        angles = 0.6 * (self.phase_s + times_s)
        positions = 0.2 * np.sin(angles)[:, None] * np.array([-1.0, 2.0])
        velocities = 0.12 * np.cos(angles)[:, None] * np.array([-1.0, 2.0])
        brake_s = 0.1
        positions = np.vstack([positions, positions[-1] + velocities[-1] * brake_s / 2])
        velocities = np.vstack([velocities, np.zeros(2)])
        times_s = np.append(times_s, times_s[-1] + brake_s)
        return JointCommand(Stamp(self.clock_ns), ("elbow", "shoulder"), positions, times_s, velocities)

    def advance(self, dt_s: float, *, clock_s: float | None = None) -> None:
        """Time goes on; the node's clock perhaps differently."""
        self.steady_s += dt_s
        self.clock_ns += round((dt_s if clock_s is None else clock_s) * 1e9)
        self.phase_s += dt_s

    def hear(self, without: Iterable[str] = (), command: Command | None = None) -> None:
        """Everybody says what they say at each tick, but those named."""
        guard, now, missing = self.guard, self.now, set(without)
        if "tool" not in missing:
            guard.tool(ToolPose(self.stamp, self.tool, UPRIGHT), now)
        if "joints" not in missing:
            guard.joints(JointPositions(self.stamp, ("finger", *JOINTS.names), np.append(0.0, self.joints)), now)
        if "enable" not in missing:
            guard.enable(True, now)
        if "action" not in missing:
            guard.action(Stamp(self.clock_ns - 10**8, BASE), "lift", now)
        if "command" not in missing:
            guard.command(self.command() if command is None else command, now)

    def tick(self) -> Outcome:
        """What goes out; the robot follows it at once."""
        outcome = self.guard.tick(self.now)
        self.sent.append((self.steady_s, outcome.sent))
        self.outcomes.append(outcome)
        self._follow(outcome.sent)
        if self.guard.state is State.PASSING:
            self.passed_phase_s = self.phase_s
        return outcome

    def begin_anew(self) -> None:
        """The driver goes on from where the robot was stopped."""
        self.phase_s = self.passed_phase_s

    def _follow(self, sent: Sent | None) -> None:
        if isinstance(sent, SentTwist):
            last_s = self.sent[-2][0] if len(self.sent) > 1 else self.steady_s
            self.tool = self.tool + sent.velocity[:3] * min(self.steady_s - last_s, 0.1)
        elif isinstance(sent, SentVelocities):
            last_s = self.sent[-2][0] if len(self.sent) > 1 else self.steady_s
            self.joints = self.joints + sent.velocities * (self.steady_s - last_s)
        elif isinstance(sent, Pose):
            self.tool = sent.position
        elif isinstance(sent, SentJoints):
            self.joints = sent.positions

    def run(self, seconds: float, without: Iterable[str] = ()) -> None:
        """A stretch of 100 Hz."""
        for _ in range(round(seconds * 100)):
            self.advance(0.01)
            self.hear(without)
            self.tick()

    def until_passing(self) -> None:
        """Starts motion."""
        for _ in range(300):
            self.begin_anew()
            self.run(0.01)
            if self.guard.state is State.PASSING:
                return
        raise AssertionError(self.guard.reason)


def rig(output: str, **changes: Any) -> Rig:
    """A guard that has heard nothing yet."""
    return Rig(Guard(settings(output, **changes)), output)


def velocities(sent: list[tuple[float, Sent | None]], *, output: str = "") -> list[tuple[float, float, np.ndarray]]:
    """Of what went out: time, seconds since the one before, and float64 [blocks, dims] velocity.

    A trajectory's point lies ahead: while the guard is late the controller goes there. A robot that is sent to other
    positions waits for a late message, and goes there at once: in two periods, as it is judged. Along a chunk it goes
    on by itself.
    """
    found = []
    follows = False  # a chunk
    for (before_s, before), (at_s, now) in pairwise(sent):
        dt_s = at_s - before_s
        if isinstance(now, SentTwist):
            found.append((at_s, dt_s, now.velocity.reshape(2, 3)))
        elif isinstance(now, SentVelocities):
            found.append((at_s, dt_s, now.velocities[:, None]))
        elif isinstance(now, Pose) and isinstance(before, Pose):
            turn = now.rotation @ before.rotation.T
            vector = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]) / 2
            found.append((at_s, dt_s, np.stack([now.position - before.position, vector]) / min(dt_s, MOVES_S)))
        elif isinstance(now, SentJoints) and isinstance(before, SentJoints):
            follows = before.path is not None or (follows and before.sent_before)
            if follows:
                found.append((at_s, dt_s, ((now.positions - before.positions) / dt_s)[:, None]))
                continue
            late_s = max(dt_s - MOVES_S, 0.0) if output.startswith("joint_trajectory") else 0.0
            reached = before.positions + before.velocities * min(late_s, TRAJECTORY_AHEAD_S)
            found.append((at_s, dt_s, ((now.positions - reached) / min(dt_s, MOVES_S))[:, None]))
    return found
