# SPDX-License-Identifier: Apache-2.0
"""Gate of joint commands: trajectories and position arrays."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.chunk import ChunkCheck
from specvla_ros.control.guard.commands import Instant, JointCommand, Measured, Sent, SentJoints, Stamp
from specvla_ros.control.guard.gate import REST, SLACK_S, TOLERANCE, Bounds, SmoothGate, braked, stopping_way
from specvla_ros.control.guard.settings import HEARD_S, GuardSettings, Output
from specvla_ros.control.guard.tool_gates import (
    AHEAD_S,
    ANSWERS_S,
    EDGE_M,
    leads_out,
    slow_enough,
    text,
    tool_bounds,
    tool_problem,
    within,
)
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, kept_in, trajectory_point
from specvla_ros.control.joint_path import REPEAT_S, JointPath
from specvla_ros.control.robot_model import ToolKinematics

_NO_TIME_S = 1e-6
_CATCH_UP = 0.25  # fraction of a joint's speed with which a controller may make up for its lag
_MOVED = 0.005  # radians or metres, more than encoder noise
_MAX_SAG, _MOVED_BY_HAND = 0.01, 0.05  # radians or metres: more than a held arm sinks; less than a hand moves it
_UNANSWERED = 0.03  # max radians or metres commanded to a joint for ANSWERS_S that it does not follow


@dataclass(frozen=True)
class _Followed:
    """A chunk that the robot's controller follows by itself."""

    path: JointPath
    begun_s: float  # on the steady clock
    whole: bool = True  # False: point by point, and this is what the controller does if no further message comes

    def at(self, now: Instant) -> tuple[np.ndarray, np.ndarray]:
        position, velocity = self.path.at(now.steady_s - self.begun_s)
        return position, velocity[:, None]


class JointGate(SmoothGate[np.ndarray]):
    """Gate of joint positions, float64 [joints]; each joint has its own limits.

    With `kinematics` the tool of the commanded joints is also limited to the workspace and its speed limit. Without,
    motion stops once the measured tool exceeds them.
    """

    not_following = "{name} is {away:.3f} from its commanded position"
    too_far_to_resume = "the command for {name} is {away:.3f} from its measured position, too far to resume"
    ran_away = "the commands for {name} ran away by {away:.3f} from what the limits allow"

    def __init__(self, settings: GuardSettings, kinematics: ToolKinematics | None = None) -> None:
        self._kinematics = kinematics
        if kinematics is None:
            self.return_m = EDGE_M  # the direction back is unknown
        joints = settings.joints
        count = len(joints.names)
        lead, sag, moved = (np.full(count, most) for most in (settings.max_lead_rad, _MAX_SAG, _MOVED_BY_HAND))
        bounds = Bounds(joints.speeds, settings.joint_braking)
        super().__init__(
            settings,
            bounds,
            np.zeros((count, 1)),
            lead,
            max_offset=lead,
            reached_within=sag,
            max_offset_once_reached=moved,
        )
        self._names = joints.names
        self._low, self._high = np.array(joints.position_min), np.array(joints.position_max)
        # Of the command, if there is one: its points, and the linear path from the output to them.
        self._commanded: np.ndarray  # float64 [points, joints]
        self._path: JointPath
        self._ahead_s = 0.0  # of its first point
        self._chunks = ChunkCheck(settings, kinematics)
        self._reached_s = 0.0  # when the output was where it is, on the steady clock
        self._passes_chunks = False  # motion passes, and chunks may go out whole
        self._followed: _Followed | None = None
        self._chunk_sent_s = -np.inf  # when the controller was sent it, on the steady clock
        self._taken: Counter[str] = Counter()  # chunks, by how they were sent
        self._split = ""  # why one was not passed whole, in words; empty: all were
        self._tool_bounds, self._tool_speed = tool_bounds(settings), settings.limits.linear_speed
        self._here: np.ndarray | None = None  # float64 [joints], as measured
        self._unmoved_from: np.ndarray | None = None  # positions when each joint last moved, and commands then
        self._sent_then: np.ndarray | None = None
        self._unanswered_s = np.zeros(count)

    @property
    def wants_motion(self) -> bool:
        if self._command is None or self._sent is None:
            return self._command is not None
        return bool(np.abs(self._path.positions - self._sent).max() > REST)

    def watch(self, measured: Measured) -> None:
        self._here = here = measured.joints
        if here is None or self._sent is None:
            return
        if self._unmoved_from is None or self._sent_then is None:
            self._unmoved_from, self._sent_then = here, self._sent
        moved = np.abs(here - self._unmoved_from) >= _MOVED
        self._unmoved_from = np.where(moved, here, self._unmoved_from)
        self._sent_then = np.where(moved, self._sent, self._sent_then)

    def take(self, command: Any, measured: Measured, now: Instant) -> Refusal | None:
        self._catch_up(now)
        refusal = super().take(command, measured, now)
        if not self._passes_chunks or self._sent is None:
            return refusal
        self._no_longer_whole()
        self._chunk_sent_s = -np.inf
        if refusal is not None:
            return refusal
        velocities = None if command.velocities is None else command.velocities[:, self._order(command)]
        passed_s = self._passed_s(now)
        times_s = command.times_s + passed_s - _transit_s(command.stamp, now)
        path = JointPath(times_s, self._commanded, velocities)
        path = path.from_state(self._sent, self._velocity[:, 0])
        unfit = self._chunks.unfit(path, self._pace.speed, self._tool_speed)
        self._split = unfit or self._split
        self._taken["followed point by point" if unfit else "passed whole"] += 1
        if not unfit:
            self._followed = _Followed(path, now.steady_s - passed_s)
        return None

    def report(self) -> dict[str, object]:
        found: dict[str, object] = {f"chunks {what}": count for what, count in sorted(self._taken.items())}
        return found | ({"last chunk that was not passed whole": self._split} if self._split else {})

    def _catch_up(self, now: Instant) -> None:
        """Takes over the state of a controller that continues by itself."""
        if self._followed is not None:
            self._sent, self._velocity = self._followed.at(now)
            self._reached_s = now.steady_s

    def _no_longer_whole(self) -> None:
        if self._followed is not None:
            self._followed = replace(self._followed, whole=False)

    def begin(self, measured: Measured) -> None:
        super().begin(measured)
        self._followed = None
        self._unmoved_from, self._sent_then = measured.joints, self._sent
        self._unanswered_s = np.zeros(len(self._names))

    def go(self, now: Instant, dt_s: float) -> Sent | None:
        if self._sent is not None and self._sent_then is not None:
            unanswered = np.abs(self._sent - self._sent_then) > _UNANSWERED
            self._unanswered_s = np.where(unanswered, self._unanswered_s + dt_s, 0.0)
        self._passes_chunks = self._settings.kind is Output.JOINT_TRAJECTORY_CHUNK
        if self._followed is not None and self._followed.whole:
            self._joined, self._lost_s = True, 0.0
            return self._chunk(self._followed, now)
        if self._passes_chunks and self._sent is not None:
            return self._led_on(now, dt_s)
        return super().go(now, self._step_s(now, dt_s))

    def _led_on(self, now: Instant, dt_s: float) -> Sent | None:
        """The next step and, after it, the way to rest, so that it is known what a controller does meanwhile."""
        self._catch_up(now)
        assert self._sent is not None
        begun = self._sent, self._velocity[:, 0]
        point = super().go(now, dt_s)
        if not isinstance(point, SentJoints):
            return point
        path = self._then_rest(min(dt_s, self._longest_s))
        self._followed = _Followed(path.from_state(*begun), now.steady_s, whole=False)
        self._catch_up(now)
        return replace(point, positions=begun[0], velocities=begun[1], path=path)

    def _then_rest(self, step_s: float) -> JointPath:
        """The path through the output, due after `step_s`, that continues for a message's way and then brakes."""
        assert self._sent is not None
        velocity, acceleration = self._velocity[:, 0], self._bounds.acceleration
        if self._leaves(self._sent, self._velocity, HEARD_S).any():
            return JointPath.braking(self._sent, velocity, acceleration).delayed(step_s)
        later = self._sent + velocity * HEARD_S
        path = JointPath.braking(later, velocity, acceleration).delayed(step_s + HEARD_S)
        return path.begun_at(step_s, self._sent, velocity)

    def stop(self, measured: Measured, now: Instant, dt_s: float) -> Sent | None:
        self._catch_up(now)
        if self._passes_chunks and self._sent is not None:
            followed = self._followed
            self._followed = None if self.at_rest or followed is None else self._braking(followed, now)
        self._passes_chunks = False
        if self._followed is not None and not self.at_rest:
            return self._chunk(self._followed, now)
        self._followed = None
        return super().stop(measured, now, self._step_s(now, dt_s))

    def _brake_lost_time(self, dt_s: float) -> float:
        lost_s = dt_s - self._longest_s
        if lost_s > 0 and self._sent is not None and self._settings.kind is Output.JOINT_TRAJECTORY:
            # Meanwhile the controller continued towards its last point: an output before that would take the arm back.
            self._sent = self._sent + self._lookahead_velocity(self._sent) * min(lost_s, TRAJECTORY_AHEAD_S)
        return super()._brake_lost_time(dt_s)

    def _braking(self, followed: _Followed, now: Instant) -> _Followed:
        """Continues as the controller does until it hears of the stop, and then brakes."""
        self._chunk_sent_s = -np.inf
        position, velocity = followed.at(replace(now, steady_s=now.steady_s + HEARD_S))
        path = JointPath.braking(position, velocity[:, 0], self._bounds.acceleration).delayed(HEARD_S)
        return _Followed(path.begun_at(0.0, *followed.path.at(now.steady_s - followed.begun_s)), now.steady_s)

    def _passed_s(self, now: Instant) -> float:
        """Time since the output was where it is."""
        return min(now.steady_s - self._reached_s, self._longest_s)

    def _step_s(self, now: Instant, dt_s: float) -> float:
        """Duration of the next step of the output: from where it is, which may be ahead of the last tick."""
        step_s = min(dt_s, max(now.steady_s - self._reached_s, _NO_TIME_S))
        self._reached_s = now.steady_s
        return step_s

    def conditions(self, measured: Measured) -> list[Refusal]:
        found = super().conditions(measured) + self._tool_problems(measured) + self._leads_out()
        late = self._unanswered_s > ANSWERS_S
        if self._held or not late.any() or self._sent is None or self._sent_then is None:
            return found
        on = np.abs(self._sent - self._sent_then) * late
        detail = f"{self._names[on.argmax()]} was commanded {on.max():.3f} further but did not move for {ANSWERS_S:g} s"
        return [*found, *self._not_moved(measured, detail)]

    def _tool_problems(self, measured: Measured) -> list[Refusal]:
        found = None if self._held else tool_problem(measured, self._tool_bounds, self._settings.limits)
        return [] if found is None else [found]

    def _leads_out(self) -> list[Refusal]:
        """Checks where the tool of the sent joints would come to rest if they braked now."""
        if self._kinematics is None or self._sent is None or self._held:
            return []
        way = self._velocity * AHEAD_S + stopping_way(self._velocity, self._bounds)
        rest, limits = self._kinematics.pose_at(self._sent + way[:, 0]).position, self._settings.limits
        if limits.outside_m(rest) <= EDGE_M:
            return []
        if within(rest, limits.widened(self._kinematics.pose_at(self._sent).position, EDGE_M)):
            return []
        return [Refusal(Cause.OUTSIDE, f"the joints take the tool to {text(rest)} m, outside the workspace")]

    def scale(self, share: float) -> None:
        super().scale(share)
        self._tool_speed = share * self._settings.limits.linear_speed
        if self._passes_chunks:  # until a chunk is slow enough
            self._no_longer_whole()

    def halt(self, now: Instant) -> None:
        if self._followed:  # the controller continued; `stop` brakes it
            return
        if self._sent is not None and self._settings.kind is not Output.POSITION_ARRAY:
            # Where the controller moved and holds.
            self._sent = trajectory_point(self._sent, self._lookahead_velocity(self._sent))
        super().halt(now)

    def _way(self, there: np.ndarray, here: np.ndarray) -> np.ndarray:
        return (there - here)[:, None]

    def _moved(self, here: np.ndarray, way: np.ndarray) -> np.ndarray:
        return here + way[:, 0]

    def _where(self, measured: Measured) -> np.ndarray | None:
        return measured.joints

    def _accept(self, command: JointCommand, measured: Measured, elapsed_s: float) -> np.ndarray | Refusal:
        positions = self._ordered(command)
        if isinstance(positions, Refusal):
            return positions
        # Between the first points of two chunks lies the time by which they are ahead, besides that between messages.
        step_s = abs(elapsed_s + float(command.times_s[0]) - self._ahead_s)
        refusal = self._problem(positions, command.times_s, measured) or self._jump(positions, step_s)
        refusal = refusal or self._tool_outside(positions, measured)
        if refusal is not None:
            return refusal
        self._commanded, path = positions, JointPath(command.times_s, positions)
        self._ahead_s = float(command.times_s[0])
        self._path = path if self._sent is None else path.from_state(self._sent, self._velocity[:, 0])
        return positions[0]

    def _ahead(self, command: np.ndarray, sent: np.ndarray, now: Instant) -> tuple[np.ndarray, np.ndarray]:
        if self._path.times_s[-1] <= 0:
            return super()._ahead(command, sent, now)
        position, velocity = self._path.at(now.steady_s - self._arrived_s)
        return self._way(position, sent), velocity[:, None]

    def _behind(self, command: np.ndarray, sent: np.ndarray, now: Instant) -> tuple[np.ndarray, float]:
        left_s = max(0.0, float(self._path.times_s[-1]) - (now.steady_s - self._arrived_s))
        if left_s:
            return self._way(self._path.positions[-1], sent), left_s
        return self._ahead(command, sent, now)[0], 0.0

    def _inside(self, sent: np.ndarray, velocity: np.ndarray, dt_s: float) -> np.ndarray:
        brakes = braked(self._velocity, self._bounds, dt_s)
        leaves = self._leaves(sent, velocity, dt_s)[:, None]
        return self._slow_enough(sent, brakes, np.where(leaves, brakes, velocity))

    def _leaves(self, sent: np.ndarray, velocity: np.ndarray, seconds: float) -> np.ndarray:
        """The joints that leave their range if they keep a velocity for some time and then brake; bool [joints]."""
        rest = sent + (velocity * seconds + stopping_way(velocity, self._bounds))[:, 0]
        low, high = np.minimum(self._low, sent), np.maximum(self._high, sent)
        return (rest < low - 1e-9) | (rest > high + 1e-9)

    def _slow_enough(self, sent: np.ndarray, brakes: np.ndarray, velocity: np.ndarray) -> np.ndarray:
        """The velocity closest to `velocity` within the tool's speed limit; any from `brakes` to it is reachable."""
        if self._kinematics is None:
            return velocity
        slower = slow_enough(self._kinematics.tool_moves(sent)[:3], brakes, velocity, self._tool_speed)
        self._joined = self._joined and slower is velocity  # the resulting lag is not the driver's fault
        return slower

    def _lookahead_velocity(self, sent: np.ndarray) -> np.ndarray:
        return kept_in(self._low, self._high, sent, self._velocity[:, 0])

    def _chunk(self, followed: _Followed, now: Instant) -> SentJoints:
        """The message of a chunk: the points that the controller reaches in time, or its end as soon as it can."""
        self._catch_up(now)
        assert self._sent is not None
        known = now.steady_s - self._chunk_sent_s < REPEAT_S
        self._chunk_sent_s = self._chunk_sent_s if known else now.steady_s
        point, left = self._message(self._sent), followed.path.after(now.steady_s - followed.begun_s)
        if left is None:
            return replace(point, sent_before=known)
        need_s = self._need_s(left)
        in_time = left.times_s >= need_s
        first = int(in_time.argmax()) if in_time.any() else len(left.times_s) - 1
        path = left.points(first)
        return replace(point, path=replace(path, times_s=np.maximum(path.times_s, need_s[first])), sent_before=known)

    def _need_s(self, left: JointPath) -> np.ndarray:
        """The time that the controller needs to each point of a chunk, float64 [points].

        It continues from its own command (`interpolate_from_desired_state`). A controller that is not set up so starts
        at the measured joints, and must not make up for its lag too fast; a stop does not wait for this.
        """
        if not self._passes_chunks:
            return np.full(len(left.times_s), HEARD_S)
        need_s = np.full(len(left.times_s), TRAJECTORY_AHEAD_S)
        if self._here is None or self._sent is None:
            return need_s
        speed = self._bounds.speed
        need_s = np.maximum(need_s, (np.abs(self._sent - self._here) / (_CATCH_UP * speed)).max())
        return np.maximum(need_s, (np.abs(left.positions - self._here) / speed).max(axis=1))

    def _message(self, sent: np.ndarray) -> SentJoints:
        after_s, velocity = TRAJECTORY_AHEAD_S, self._lookahead_velocity(sent)
        if self._here is not None:  # a controller that starts at the measured joints must not catch up too fast
            way = np.abs(trajectory_point(sent, velocity) - self._here)
            after_s = max(after_s, float((way / self._bounds.speed).max()))
        return SentJoints(sent, velocity, after_s)

    def _words(self, message: str, away: np.ndarray, allowed: np.ndarray) -> str:
        worst = int((away / allowed).argmax())
        return message.format(name=self._names[worst], away=away[worst])

    def _ordered(self, command: JointCommand) -> np.ndarray | Refusal:
        """Positions [points, joints] in the order of the parameters, or a refusal of the message's form."""
        names, positions, times_s = command.names, command.positions, command.times_s
        if positions.ndim != 2 or not len(positions) or len(times_s) != len(positions):
            return Refusal(Cause.BAD_FORM, "the command must have points with one position per joint")
        if positions.shape[1] != len(self._names):
            detail = f"the command has {positions.shape[1]} positions, but joints.names has {len(self._names)}"
            return Refusal(Cause.BAD_FORM, detail)
        velocities = np.zeros_like(positions) if command.velocities is None else command.velocities
        if velocities.shape != positions.shape:
            return Refusal(Cause.BAD_FORM, "the command's points must all have a velocity for each joint, or none")
        if not all(np.isfinite(each).all() for each in (positions, times_s, velocities)):
            return Refusal(Cause.NOT_FINITE, "the command holds NaN or infinity")
        if times_s[0] < 0 or (np.diff(times_s) <= 0).any():
            return Refusal(Cause.BAD_FORM, "the points' times do not increase")
        if names is not None and sorted(names) != sorted(self._names):
            return Refusal(Cause.BAD_FORM, f"the command is for {', '.join(names)}, not for joints.names")
        return positions[:, self._order(command)]

    def _order(self, command: JointCommand) -> list[int]:
        """The command's column of each joint."""
        names = self._names if command.names is None else command.names
        return [names.index(name) for name in self._names]

    def _problem(self, positions: np.ndarray, times_s: np.ndarray, measured: Measured) -> Refusal | None:
        low, high = self._low, self._high
        if measured.joints is not None:  # it may move back, but not further out
            low, high = np.minimum(low, measured.joints), np.maximum(high, measured.joints)
        outside = ((positions < low - 1e-9) | (positions > high + 1e-9)).any(axis=0)
        if outside.any():
            worst = int(outside.argmax())
            detail = f"{self._names[worst]} is commanded outside {self._low[worst]:g} to {self._high[worst]:g}"
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
        detail = f"the command for {self._names[away.argmax()]} is {away.max():.3f} from its measured position"
        return Refusal(Cause.FAR, f"{detail}; max_lead_rad is {self._settings.max_lead_rad:g}")

    def _tool_outside(self, positions: np.ndarray, measured: Measured) -> Refusal | None:
        """Refuses joints, float64 [points, joints], whose tool is outside; it may move back, but not further out."""
        if self._kinematics is None:
            return None
        limits = self._settings.limits
        here = np.array(limits.workspace_min) if measured.tool is None else measured.tool.position
        for place in (self._kinematics.pose_at(point).position for point in positions):
            if leads_out(place, here, limits, EDGE_M):
                detail = f"the joints are commanded to take the tool to {text(place)} m, outside the workspace"
                return Refusal(Cause.OUTSIDE, detail)
        return None

    def _jump(self, positions: np.ndarray, elapsed_s: float) -> Refusal | None:
        if self._command is None:
            return None
        step = positions[0] - self._command
        over = np.abs(step) / (self._bounds.speed * (elapsed_s * TOLERANCE + SLACK_S))
        if (over <= 1).all():
            return None
        worst = int(over.argmax())
        detail = f"a step of {self._names[worst]} by {abs(step[worst]):.4g} within {elapsed_s:.3f} s"
        return Refusal(Cause.OVER_SPEED, f"{detail} is faster than joints.max_speed {self._bounds.speed[worst]:g}")


def _transit_s(stamp: Stamp, now: Instant) -> float:
    """Time since a command was sent."""
    return 0.0 if stamp.ns is None else max(0.0, (now.clock_ns - stamp.ns) * 1e-9)
