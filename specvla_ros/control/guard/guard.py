# SPDX-License-Identifier: Apache-2.0
"""The guard: passes commands as bounded motion while all conditions hold, and stops the robot otherwise."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal, Tally
from specvla_ros.control.guard.commands import Command, GripperCommand, Instant, JointPositions, Sent, Stamp, ToolPose
from specvla_ros.control.guard.gate import Gate
from specvla_ros.control.guard.joint_gate import JointGate
from specvla_ros.control.guard.robot_state import Obedience, StateRule
from specvla_ros.control.guard.settings import GuardSettings, Output
from specvla_ros.control.guard.tool_gates import PoseGate, TwistGate
from specvla_ros.control.guard.velocity_gate import JointVelocityGate
from specvla_ros.control.guard.watch import PRESSED, RELEASED, Watch
from specvla_ros.control.robot_model import ToolKinematics

# Time without failures before motion resumes, so that an intermittent failure does not make the robot stutter.
QUIET_S = 0.5
# A latched cause counts as persisting for this long after it was last seen.
_PERSISTS_S = 0.5
# Stall of this process after which the robot has stopped by itself (Servo halts after 0.1 s).
STALL_S = 0.1
_ROUNDING = 1e-9


class State(str, Enum):
    """State of the guard."""

    PASSING = "passing"  # commands go through
    HOLDING = "holding"  # a condition fails: zero or hold is sent; resumes by itself
    STOPPED = "stopped"  # latched: needs clear_stop


@dataclass(frozen=True)
class Outcome:
    """Output of one tick."""

    sent: Sent | None  # to the robot; None: nothing
    gripper: float | None  # position of a new command that passes; else None
    stopped: Refusal | None  # why passing has just ended: a reason to write a recording
    disobeyed: bool = False  # the robot has just been found not to obey: a reason to escalate


class Guard:
    """Denies by default: nothing passes unless every condition holds.

    Not thread-safe. `tick` is called at the settings' rate by a steady clock, all other methods as messages arrive.
    Raises UserError for settings with which nothing would be guarded. `kinematics`: of the commanded joints; None:
    unknown.
    """

    def __init__(self, settings: GuardSettings, kinematics: ToolKinematics | None = None) -> None:
        settings.require()
        self._settings = settings
        self._gate = _gate(settings, kinematics)
        self._watch = Watch(settings, self._gate.return_m)
        self._obedience = Obedience(settings.obey_time_s)
        self._override_s = -np.inf  # last command of the source that replaces the driver
        self.scale_speed(settings.speed_scale)
        self.tally = Tally()
        self.state = State.HOLDING
        self._failing: list[Refusal] = []
        self._between: dict[Cause, Refusal] = {}  # since the last tick: they count however soon they end
        self._latched: Refusal | None = None
        self._first: Refusal | None = None  # first failure since motion started to pass
        self._last: Refusal | None = None
        self._latch_seen_s = self._failed_s = -np.inf
        self._failed = False  # since motion started to pass
        self._ticked: Instant | None = None
        self._gripper: float | None = None
        self.stalls = 0

    # Inputs

    def command(self, command: Command, now: Instant, *, override: bool = False) -> None:
        """Takes a command; a refused one stops motion. `override`: from the source that replaces the driver."""
        if override:
            if not self.overridden(now):
                self._gate.forget()
            self._override_s = now.steady_s
        elif self.overridden(now):
            return
        if not self._watch.accepts(now) or not self._watch.command(command.stamp, now):
            return
        if self.state is not State.PASSING:
            self._gate.forget()  # a driver may start again meanwhile: its commands are not followed
        refusal = self._gate.take(command, self._watch.measured(now), now)
        if refusal is not None:
            self.reject(refusal, now)

    def reject(self, refusal: Refusal, now: Instant) -> None:
        """Refuses a command."""
        self.tally.add(refusal)
        self._gate.forget()
        self._watch.refuse_command(refusal)
        self._fail(refusal, now)

    def gripper(self, command: GripperCommand, now: Instant) -> None:
        """Takes a gripper command. It is sent once, while motion passes, and is not kept for later."""
        if not self._watch.accepts(now):
            return
        refusal = _gripper_problem(command, self._settings)
        if refusal is not None:
            self.reject(refusal, now)
        elif self.state is State.PASSING:
            self._gripper = float(command.positions[0])

    def tool(self, message: ToolPose, now: Instant) -> None:
        pose = self._watch.tool(message, now) if self._watch.accepts(now) else None
        if leap := self._watch.take_leap():
            self.reject(Refusal(Cause.POSE_JUMP, leap), now)
        if pose is not None:
            self._gate.watch(self._watch.measured(now))

    def joints(self, message: JointPositions, now: Instant) -> None:
        if self._settings.kind.of_joints and self._watch.accepts(now):
            self._watch.joints(message, now)
            self._gate.watch(self._watch.measured(now))

    def action(self, stamp: Stamp, instruction: str, now: Instant, rows: int = 1) -> None:
        """Takes the policy's heartbeat: an action of so many rows."""
        if self._watch.accepts(now):
            self._watch.action(stamp, instruction, now, rows)

    def enable(self, held: bool, now: Instant) -> None:
        """Takes the dead-man's heartbeat."""
        if not held or self._watch.accepts(now):
            self._watch.enable(held, now)
        if not held and self._settings.require_enable:
            self._between[RELEASED.cause] = RELEASED

    def instruction(self, text: str) -> None:
        self._watch.confirmation.ask(text)

    def confirm(self, text: str) -> None:
        self._watch.confirmation.confirm(text)

    def sources(self, problem: str) -> None:
        """Takes a problem with the topics' publishers, in words; empty: none."""
        self._watch.sources_problem = problem

    def overridden(self, now: Instant) -> bool:
        """True while another source replaces the driver."""
        return now.steady_s - self._override_s <= self._settings.command_timeout_s

    def scale_speed(self, share: float) -> bool:
        """Sets the fraction of the speed limits, 0 to 1; returns False and keeps the old one if out of range."""
        if not 0 <= share <= 1:
            return False
        self.speed_scale = share
        self._gate.scale(share)
        return True

    def stop_button(self, pressed: bool, now: Instant) -> None:
        """Takes the level of a stop button, which must be repeated once it was received."""
        self._watch.stop_button(pressed, now)
        if pressed:
            self._between[PRESSED.cause] = PRESSED

    def robot_state(self, rule: StateRule, message: object) -> None:
        """Takes a message about the robot's own state."""
        if (refusal := self._watch.robot.take(rule, message)) is not None:
            self._between[refusal.cause] = refusal

    def robot_gone(self, topics: frozenset[str]) -> None:
        """Voids the robot's states on topics that no longer have a publisher."""
        self._watch.robot.gone(topics)

    def press_stop(self, who: str, now: Instant) -> None:
        refusal = Refusal(Cause.STOP, f"stop was pressed ({who})")
        self.tally.add(refusal)
        self._fail(refusal, now)

    def end(self, now: Instant) -> None:
        """Stops passing commands; motion in progress brakes."""
        if self.state is State.PASSING:
            self.press_stop("the guard is shutting down", now)
        else:
            self._fail(Refusal(Cause.NOT_ENABLED, "the guard is shutting down"), now)

    @property
    def at_rest(self) -> bool:
        """True if the output is at rest and no motion can start before a tick."""
        return self._gate.at_rest and self.state is not State.PASSING

    def clear_stop(self, now: Instant) -> str:
        """Ends a latched stop; returns why it cannot, in words, or an empty string."""
        if self._latched is None:
            return ""
        if now.steady_s - self._latch_seen_s < _PERSISTS_S:
            return f"the cause persists: {self._latched.cause.value}, {self._latched.detail}"
        if not self._gate.at_rest:
            return "the robot is still being stopped"
        self._latched, self.state = None, State.HOLDING
        self._failed_s = now.steady_s  # gives the operator a moment to step back
        return ""

    # Output

    def tick(self, now: Instant) -> Outcome:
        dt_s = self._elapsed_s(now)
        self._notice_failures(now)
        measured = self._watch.measured(now)
        before, self.state = self.state, self._next_state(now)
        if self.state is not State.PASSING:
            sent = self._gate.stop(measured, now, dt_s)
            self._gripper = None
            latches = self.state is State.STOPPED and before is not State.STOPPED
            ended = before is State.PASSING or latches
            disobeys = self._obedience.look(False, self._gate.at_rest, measured, now.clock_ns * 1e-9)
            if disobeys is not None:
                self.tally.add(disobeys)
                self._fail(disobeys, now)
            why = (self._latched or self._first) if ended else None
            return Outcome(sent, None, stopped=why, disobeyed=disobeys is not None)
        if before is not State.PASSING:
            self._gate.begin(measured)
        self._obedience.look(True, False, measured, now.clock_ns * 1e-9)
        gripper, self._gripper = self._gripper, None
        return Outcome(self._gate.go(now, dt_s), gripper, stopped=None)

    @property
    def cause(self) -> str:
        """First cause that blocks motion; empty while motion passes or is about to."""
        found = [*([self._latched] if self._latched else []), *self._failing]
        return found[0].cause.value if found and self.state is not State.PASSING else ""

    @property
    def reason(self) -> str:
        """All causes that block motion, in words; empty while motion passes."""
        if self.state is State.PASSING:
            return ""
        found = [*([self._latched] if self._latched else []), *self._failing]
        words = "; ".join(f"{each.cause.value}: {each.detail}" for each in found)
        if words or self._last is None:
            return words or "about to resume: all conditions hold"
        last = f"{self._last.cause.value}: {self._last.detail}"
        return f"about to resume, after {QUIET_S:g} s without failures; the last cause was {last}"

    def report(self) -> dict[str, object]:
        """Figures about the commands, by name, for diagnostics."""
        return self._gate.report()

    def _elapsed_s(self, now: Instant) -> float:
        """Time since the last tick; after a stall or a clock jump, all that was received is void."""
        last, self._ticked = self._ticked, now
        elapsed_s = now.steady_s - last.steady_s if last is not None else 0.0
        jump = self._watch.clock.look(now)
        if elapsed_s > STALL_S:
            self.stalls += 1
            self._void(Refusal(Cause.STALLED, f"the guard itself did not run for {elapsed_s:.3f} s"), now)
            self._gate.halt(now)
            elapsed_s = 0.0
        if jump:
            self._void(Refusal(Cause.CLOCK, jump), now)
        return max(elapsed_s, 1e-6)

    def _void(self, refusal: Refusal, now: Instant) -> None:
        self.tally.add(refusal)
        self._watch.forget(now)
        self._gate.forget()
        self._fail(refusal, now)

    def _notice_failures(self, now: Instant) -> None:
        watch, measured = self._watch, self._watch.measured(now)
        failing = watch.problems(now)
        lasting = {refusal.cause for refusal in failing}
        failing += [refusal for cause, refusal in self._between.items() if cause not in lasting]
        self._between.clear()
        silent = watch.command_silent(now)
        if silent is not None:
            self._gate.forget()
            failing.append(silent)
        dead = None if self.overridden(now) else watch.action_silent(now)
        if dead is not None and (self._gate.wants_motion or self.state is not State.PASSING):
            failing.append(dead)
        failing += self._gate.conditions(measured)
        if self.state is State.PASSING:
            lag = self._gate.lag(now)
            failing += [lag] if lag is not None else []
        elif not failing and (far := self._gate.not_near(measured)) is not None:
            failing.append(far)
        stopped = any(refusal.cause is Cause.ROBOT_STOPPED for refusal in failing)
        self._gate.robot_stopped(measured if stopped else None)
        self._failing = failing
        self.tally.failing(failing)
        for refusal in failing:
            self._fail(refusal, now)

    def _fail(self, refusal: Refusal, now: Instant) -> None:
        self._first = self._first if self._failed else refusal
        self._last = refusal
        self._failed_s, self._failed = now.steady_s, True
        if refusal.cause.latches:
            self._latched = self._latched or refusal
            self._latch_seen_s = now.steady_s

    def _next_state(self, now: Instant) -> State:
        if self._latched is not None:
            return State.STOPPED
        if self._failed and (not self._gate.at_rest or now.steady_s - self._failed_s < QUIET_S):
            return State.HOLDING
        self._failed = False
        return State.PASSING


def _gate(settings: GuardSettings, kinematics: ToolKinematics | None) -> Gate:
    if settings.kind is Output.VELOCITY_ARRAY:
        return JointVelocityGate(settings, kinematics)
    if settings.kind.of_joints:
        return JointGate(settings, kinematics)
    return PoseGate(settings) if settings.kind is Output.POSE else TwistGate(settings)


def _gripper_problem(command: GripperCommand, settings: GuardSettings) -> Refusal | None:
    limits = settings.gripper
    if len(command.positions) != 1 or command.names not in (None, (limits.joint,)):
        return Refusal(Cause.BAD_FORM, "a gripper command must have one position, for gripper.joint")
    position = float(command.positions[0])
    if not np.isfinite(position):
        return Refusal(Cause.NOT_FINITE, "a gripper command holds NaN or infinity")
    low, high = sorted((limits.open_value, limits.closed_value))
    if not low - _ROUNDING <= position <= high + _ROUNDING:
        return Refusal(Cause.OUTSIDE, f"a gripper command of {position:g} is outside {low:g} to {high:g}")
    return None
