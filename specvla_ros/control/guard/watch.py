# SPDX-License-Identifier: Apache-2.0
"""Liveness of driver, policy, robot, clock and dead-man's switch, and the confirmation of the instruction."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, JointPositions, Measured, Stamp, ToolPose
from specvla_ros.control.guard.gate import RETURN_M
from specvla_ros.control.guard.robot_state import RobotStates
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.control.guard.tool_gates import pose_of, text
from specvla_ros.control.joint_parts import UNSTAMPED, JointParts
from specvla_ros.control.pose import Pose
from specvla_ros.control.robot_model import unit_hint
from specvla_ros.errors import SYNCHRONISE, UserError

MAX_FUTURE_S = 0.1  # max lead of a stamp over the node's clock
_JUMP_S = 0.25  # max lead that the node's clock may gain on the steady clock at once
# Messages still queued after a stall of this process or a clock jump are old.
_QUEUE_S = 0.05
# A measured pose may move between two messages at twice the speed limits, for an arm that overshoots, plus this.
_LEAP_M, _LEAP_RAD = 0.02, 0.1
PRESSED, RELEASED = Refusal(Cause.STOP, "~/stop_pressed is true"), Refusal(Cause.NOT_ENABLED, "~/enable is false")
_SWING_S = 0.1  # window to detect an arm that swings too far without a jump between two messages


@dataclass
class _Seen:
    """The newest message of one kind."""

    at_s: float = -np.inf  # steady clock at its arrival; -inf: none yet
    stamp_ns: int = -(2**63)  # its stamp
    problem: str = ""  # why the last one does not count; empty: it counts

    def age_s(self, now: Instant) -> float:
        return now.steady_s - self.at_s


class ClockWatch:
    """Compares the node's clock with the steady one."""

    def __init__(self) -> None:
        self._advanced: Instant | None = None

    def look(self, now: Instant) -> str:
        """A clock jump since the last call, in words; empty: none."""
        last = self._advanced
        if last is None or now.clock_ns != last.clock_ns:
            self._advanced = now
        if last is None:
            return ""
        went_s, real_s = (now.clock_ns - last.clock_ns) * 1e-9, now.steady_s - last.steady_s
        if went_s < 0:
            return f"the clock went back by {-went_s:.3f} s"
        return f"the clock jumped ahead by {went_s - real_s:.3f} s" if went_s - real_s > _JUMP_S else ""

    def still_s(self, now: Instant) -> float:
        """Seconds for which the node's clock has stood still."""
        return now.steady_s - self._advanced.steady_s if self._advanced is not None else 0.0


class Confirmation:
    """The confirmed instruction. A different one ends the confirmation; returning to it needs a new one."""

    def __init__(self) -> None:
        self._confirmed = self._asked = self._followed = ""

    def confirm(self, instruction: str) -> None:
        self._confirmed = instruction

    def ask(self, instruction: str) -> None:
        self._asked = instruction
        if instruction != self._confirmed:
            self._confirmed = ""

    def follow(self, instruction: str) -> None:
        """Takes the instruction that the policy follows."""
        if self._followed == self._confirmed != instruction:
            self._confirmed = ""
        self._followed = instruction

    def problem(self) -> str:
        """Returns the reason why motion is not confirmed; empty if it is."""
        if not self._confirmed:
            return f"'{(self._followed or self._asked)[:80]}' is not confirmed on ~/confirm"
        if self._asked and self._asked != self._confirmed:
            return f"'{self._confirmed[:80]}' is confirmed, but '{self._asked[:80]}' is requested"
        if self._followed != self._confirmed:
            return f"'{self._confirmed[:80]}' is confirmed, but the policy follows '{self._followed[:80]}'"
        return ""


class Watch:
    """Checks that all required messages are fresh: arrivals by the steady clock, stamps by the node's.

    `return_m`: max distance of the tool outside the workspace.
    """

    def __init__(self, settings: GuardSettings, return_m: float = RETURN_M) -> None:
        self._settings, self._return_m = settings, return_m
        self.clock, self.confirmation, self.robot = ClockWatch(), Confirmation(), RobotStates(settings.state_rules)
        self._button_s: float | None = None  # last message of the stop button
        self._button_pressed = False
        self._poses: deque[tuple[int, Pose]] = deque()  # stamps and poses of the last _SWING_S
        self._reset_inputs()
        self._ignore_until_s = -np.inf
        self._enable_problem = self._leap = self.sources_problem = ""

    def forget(self, now: Instant) -> None:
        """Voids everything received, after a clock jump or a stall of this process."""
        self._reset_inputs()
        self._ignore_until_s = now.steady_s + _QUEUE_S

    def _reset_inputs(self) -> None:
        self._tool, self._joints, self._action, self._command = _Seen(), _Seen(), _Seen(), _Seen()
        self._rows = 0  # of the newest action
        self._enabled_s = -np.inf
        self._poses.clear()
        self._parts = JointParts(self._settings.joints.names)
        self._positions: np.ndarray | None = None

    def accepts(self, now: Instant) -> bool:
        """True if a message that arrives now can be new."""
        return now.steady_s >= self._ignore_until_s

    def tool(self, message: ToolPose, now: Instant) -> Pose | None:
        """Takes the measured pose; returns it if it is valid and newer."""
        unstamped = Refusal(Cause.BAD_FORM, UNSTAMPED)
        pose = pose_of(message, self._settings.base_frame) if message.stamp.ns else unstamped
        if isinstance(pose, Refusal):
            self._tool.problem = pose.detail
            return None
        if self._tool.age_s(now) > self._settings.state_timeout_s:
            self._poses.clear()
        if not self._newer(self._tool, message.stamp, now):
            return None
        stamp_ns = self._tool.stamp_ns
        while len(self._poses) > 1 and stamp_ns - self._poses[0][0] > _SWING_S * 1e9:
            self._poses.popleft()
        for before_ns, before in [self._poses[0], self._poses[-1]] if self._poses else []:
            self._leap = self._leap or self._leap_between(before, pose, (stamp_ns - before_ns) * 1e-9)
        self._poses.append((stamp_ns, pose))
        return pose

    def take_leap(self) -> str:
        """Returns a jump of the measured pose since the last call, in words; empty: none."""
        leap, self._leap = self._leap, ""
        return leap

    def _leap_between(self, before: Pose, after: Pose, passed_s: float) -> str:
        limits, (way_m, turn_rad) = self._settings.limits, before.distance(after)
        most_m, most_rad = 2 * limits.linear_speed * passed_s + _LEAP_M, 2 * limits.angular_speed * passed_s + _LEAP_RAD
        if way_m <= most_m and turn_rad <= most_rad:
            return ""
        return f"the measured pose moved {way_m:.3f} m and {turn_rad:.2f} rad within {passed_s:.3f} s"

    def joints(self, message: JointPositions, now: Instant) -> None:
        """Takes measured joints, merged by name; joints that are not commanded are ignored."""
        try:
            if self._parts.add(message.names, message.positions.tolist(), message.stamp.ns or 0):
                stamp_ns, positions = self._parts.take()
                if self._newer(self._joints, Stamp(stamp_ns), now):
                    self._positions = np.array([*positions.values()])
            elif self._joints.at_s == -np.inf:
                self._joints.problem = self._parts.lacking
        except UserError as error:
            self._joints.problem = str(error)

    def action(self, stamp: Stamp, instruction: str, now: Instant, rows: int = 1) -> None:
        """Takes an action as the policy's heartbeat; more rows with the stamp of a partial one are news too."""
        age_s = (now.clock_ns - (stamp.ns or 0)) * 1e-9
        if age_s > self._settings.max_action_age_s:
            self._action.problem = f"the last action's image was {age_s:.3f} s old"
        elif stamp.ns == self._action.stamp_ns and rows > self._rows:
            self._action.at_s, self._action.problem, self._rows = now.steady_s, "", rows
        elif self._newer(self._action, stamp, now):
            self._rows = rows
            self.confirmation.follow(instruction)

    def command(self, stamp: Stamp, now: Instant) -> bool:
        """Notes that a command arrived; returns whether it is new enough to be checked."""
        if stamp.ns is None:
            self._command.at_s, self._command.problem = now.steady_s, ""
            return True
        age_s = (now.clock_ns - stamp.ns) * 1e-9
        if age_s > self._settings.command_timeout_s:
            self._command.problem = f"the last one was {age_s:.3f} s old"
            return False
        return self._newer(self._command, stamp, now)

    def refuse_command(self, refusal: Refusal) -> None:
        """Voids the last command."""
        self._command.at_s = -np.inf
        self._command.problem = f"the last one was refused ({refusal.cause.value}): {refusal.detail}"

    def enable(self, held: bool, now: Instant) -> None:
        self._enabled_s = now.steady_s if held else -np.inf
        self._enable_problem = "" if held else RELEASED.detail

    def stop_button(self, pressed: bool, now: Instant) -> None:
        self._button_s, self._button_pressed = now.steady_s, pressed

    def _button_problem(self, now: Instant) -> Refusal | None:
        if self._button_pressed:
            return PRESSED
        if self._button_s is None:
            if not self._settings.require_stop_button:
                return None
            return Refusal(Cause.NOT_ENABLED, "~/stop_pressed: no message yet, and require_stop_button is set")
        silent_s = now.steady_s - self._button_s
        if silent_s <= self._settings.enable_timeout_s:
            return None
        return Refusal(Cause.NOT_ENABLED, f"~/stop_pressed is silent for {silent_s:.2f} s: is the button connected?")

    def measured(self, now: Instant) -> Measured:
        """The robot's state, as far as it is known now."""
        limit_s = self._settings.state_timeout_s
        seen = bool(self._poses) and self._tool.age_s(now) <= limit_s and not self._tool.problem
        return Measured(
            tool=self._poses[-1][1] if seen else None,
            joints=self._positions if self._joints.age_s(now) <= limit_s and not self._joints.problem else None,
            velocity=self._velocity() if seen else None,
        )

    def _velocity(self) -> np.ndarray | None:
        if len(self._poses) < 2:
            return None
        (first_ns, first), (last_ns, last) = self._poses[0], self._poses[-1]
        passed_s = (last_ns - first_ns) * 1e-9
        return (last.position - first.position) / passed_s if passed_s >= _SWING_S / 2 else None

    def command_silent(self, now: Instant) -> Refusal | None:
        if self._command.age_s(now) <= self._settings.command_timeout_s:
            return None
        words = _silence("command", self._command, now)
        if self._command.at_s == -np.inf and not self._command.problem:
            words += (
                f" on command/{self._settings.kind.topic}: the driver's diagnostics may say why, or it is not remapped"
            )
        return Refusal(Cause.DRIVER_SILENT, words)

    def action_silent(self, now: Instant) -> Refusal | None:
        if self._action.age_s(now) <= self._settings.action_timeout_s:
            return None
        return Refusal(Cause.POLICY_SILENT, _silence("action", self._action, now))

    def problems(self, now: Instant) -> list[Refusal]:
        """All failing conditions except the commands themselves."""
        settings, found = self._settings, []
        still_s = self.clock.still_s(now)
        if still_s > settings.clock_timeout_s:
            found.append(Refusal(Cause.CLOCK, f"the clock has stood still for {still_s:.2f} s"))
        measured = self.measured(now)
        if measured.tool is None:
            found.append(Refusal(Cause.STATE_MISSING, _silence("tool pose", self._tool, now)))
        elif settings.limits.outside_m(measured.tool.position) > self._return_m:
            where = f"the tool is at {text(measured.tool.position)} m, outside the workspace"
            hint = "" if self._positions is None else unit_hint(self._positions)
            found.append(Refusal(Cause.OUTSIDE, f"{where}: move it back by hand{hint}"))
        if settings.kind.of_joints and measured.joints is None:
            found.append(Refusal(Cause.STATE_MISSING, self._joint_silence(now)))
        if settings.require_enable and now.steady_s - self._enabled_s > settings.enable_timeout_s:
            problem = self._enable_problem or "~/enable is silent: the dead-man's switch is not held"
            found.append(Refusal(Cause.NOT_ENABLED, problem))
        if button := self._button_problem(now):
            found.append(button)
        found += self.robot.problems()
        if settings.require_confirm and self.confirmation.problem():
            found.append(Refusal(Cause.NOT_CONFIRMED, self.confirmation.problem()))
        if self.sources_problem:
            found.append(Refusal(Cause.TWO_SOURCES, self.sources_problem))
        return found

    def _joint_silence(self, now: Instant) -> str:
        silence = _silence("joint_states", self._joints, now)
        lacking = self._parts.lacking
        return silence if self._joints.problem or not lacking else f"{silence}; {lacking}"

    def _newer(self, seen: _Seen, stamp: Stamp, now: Instant) -> bool:
        """True for a newer message. Frozen, repeated, reordered and future messages do not count."""
        stamp_ns = stamp.ns or 0
        ahead_s = (stamp_ns - now.clock_ns) * 1e-9
        if ahead_s > MAX_FUTURE_S:
            seen.problem = f"its stamp lies {ahead_s:.3f} s ahead of the clock: {SYNCHRONISE}"
            return False
        if stamp_ns <= seen.stamp_ns:
            return False
        of_state = seen is self._tool or seen is self._joints
        if of_state and -ahead_s > self._settings.state_timeout_s:
            seen.problem = f"the last one was {-ahead_s:.3f} s old"
            return False
        seen.at_s, seen.stamp_ns, seen.problem = now.steady_s, stamp_ns, ""
        return True


def _silence(topic: str, seen: _Seen, now: Instant) -> str:
    if seen.problem:
        return f"{topic}: {seen.problem}"
    if seen.at_s == -np.inf:
        return f"{topic}: no message yet"
    return f"{topic}: nothing new for {seen.age_s(now):.3f} s"
