# SPDX-License-Identifier: Apache-2.0
"""`specvla robot stops`: a robot's stopping times and distances, from the guard's black box.

All times are on the guard's clock: when its process received or sent a message. Three moments count:

- *Time zero*: arrival of the cause. For a stop, the message on ~/stop. For a dead-man's switch, the message with false
  or, if it fell silent, the last one with true. For silence of driver, policy or robot, the last message with a new
  stamp. For a refused command, that command. If the file lacks that message, or the cause is a condition rather than a
  message, time zero is the start of braking.
- *Braking*: the first tick that passed no command; the guard records it in the file.
- *The end*: the start of 0.1 s in which the measured tool is slower than 10 mm/s and 0.1 rad/s. Speeds are averages
  over 50 ms of the poses' own stamps.

The speed is the maximum from 50 ms before time zero until braking. The reach is the tool's distance from the base at
time zero. The distance is the length of the measured path from time zero to the end, in steps of 50 ms so that noise
does not add up. A file describes the stop that it was written for: the first one, if several share it.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from mcap.exceptions import McapError
from mcap.reader import make_reader

from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.pose import Pose, quaternion_matrix
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.message_types import MessageTypes
from specvla_ros.lab.bags.reader import Storage, open_storage

STANDS_M_S, STANDS_RAD_S, STANDS_S = 0.01, 0.1, 0.1
_HALF_WINDOW_S = 0.025
_STEP_S = 0.05
_GAP_S = 0.2  # without a measured pose; after a longer gap the robot's motion is unknown
_PRESSED_S = 0.5  # maximum time from a ~/stop message to the braking that it caused
_ACTION = "specvla_ros/msg/VlaAction"
_STAMPED_BYTES = 12  # encapsulation and stamp
_UNSTAMPED = ("std_msgs/msg/Float64MultiArray", "trajectory_msgs/msg/JointTrajectory")  # or a zero stamp, for "now"
_REFUSED_COMMANDS = (Cause.NOT_FINITE, Cause.BAD_FORM, Cause.OVER_SPEED, Cause.OVER_ACCELERATION, Cause.FAR)


class NotMeasuredError(Exception):
    """A file contains no stop that can be measured; the message gives the reason."""


@dataclass(frozen=True)
class Stop:
    """One stop of a moving robot."""

    file: str
    output: str  # the guard's: pose, twist, joint_trajectory, …
    cause: str
    time_zero: str  # the event that time zero is taken from, in words
    speed_m_s: float
    reach_m: float
    time_s: float  # from time zero to the end
    braking_s: float  # the part of `time_s` after the guard began to brake
    way_m: float


@dataclass(frozen=True)
class LeftOut:
    """A file without a measured stop."""

    file: str
    why: str


@dataclass(frozen=True)
class Stops:
    """The stops found in all black-box files."""

    measured: tuple[Stop, ...]
    left_out: tuple[LeftOut, ...]
    reach_m: float  # maximum over all measured poses


def find_black_boxes(given: Sequence[str]) -> list[Path]:
    """Finds the MCAP files under paths, folders and globs; raises UserError for one that matches none."""
    found: dict[Path, None] = {}
    for each in given:
        path = Path(each).expanduser()
        matches = [path] if path.exists() else sorted(map(Path, glob(str(path), recursive=True)))
        files = [file for match in matches for file in (sorted(match.rglob("*.mcap")) if match.is_dir() else [match])]
        if not files:
            raise UserError(
                f"no .mcap file matches {each}; give files of the guard's black box, or their folder (black_box_dir, "
                "by default ~/.ros/black_box)"
            )
        found |= dict.fromkeys(files)
    return list(found)


def measure_stops(files: Sequence[Path]) -> Stops:
    """Measures the stop in each file; lists the files without one."""
    measured, left_out, reach_m = [], [], 0.0
    for file in files:
        try:
            # Beside the file nothing may be written: it is evidence.
            with TemporaryDirectory() as scratch, closing(open_storage(file, Path(scratch))) as storage:
                box = BlackBoxFile(file, storage)
                reach_m = max(reach_m, float(np.linalg.norm(box.tool.positions, axis=1).max(initial=0.0)))
                measured.append(box.stop())
        except (NotMeasuredError, UserError) as error:
            left_out.append(LeftOut(str(file), str(error)))
    return Stops(tuple(measured), tuple(left_out), reach_m)


class ToolMotion:
    """The measured tool motion: each pose's arrival, stamp and speed."""

    def __init__(self, poses: Sequence[tuple[float, float, Pose]]) -> None:
        self._poses = [pose for *_, pose in poses]
        self.arrived_s = np.array([arrived_s for arrived_s, *_ in poses])
        self._stamps_s = np.array([stamp_s for _, stamp_s, _ in poses])
        self.positions = np.array([pose.position for pose in self._poses]).reshape(-1, 3)

    @cached_property
    def speeds(self) -> np.ndarray:
        """Translation in m/s and rotation in rad/s at each pose, float64 [poses, 2]."""
        stamps_s, last = self._stamps_s, len(self._poses) - 1
        before = np.maximum(np.searchsorted(stamps_s, stamps_s - _HALF_WINDOW_S, side="right") - 1, 0)
        after = np.minimum(np.searchsorted(stamps_s, stamps_s + _HALF_WINDOW_S), last)
        ways = np.array([self._poses[i].distance(self._poses[j]) for i, j in zip(before, after, strict=True)])
        return ways / np.maximum(stamps_s[after] - stamps_s[before], 1e-9)[:, None]

    @cached_property
    def moves(self) -> np.ndarray:
        """True where the tool moves, bool [poses]."""
        return np.asarray((self.speeds >= (STANDS_M_S, STANDS_RAD_S)).any(axis=1))

    def at(self, time_s: float) -> int:
        """Index of the last pose that had arrived."""
        return max(0, bisect_right(self.arrived_s, time_s) - 1)

    def end(self, zero: int, braking_s: float) -> int:
        """Index of the first pose of the standstill: STANDS_S or longer, and lasting beyond the start of braking.

        Raises NotMeasuredError if the file ends earlier, or poses are missing in between.
        """
        arrived_s, began = self.arrived_s, int(np.searchsorted(self.arrived_s, braking_s))
        for index in range(began, len(arrived_s)):
            gap_s = arrived_s[index] - arrived_s[max(index - 1, 0)]
            if gap_s > _GAP_S:
                raise NotMeasuredError(f"no measured pose for {gap_s:.2f} s during the stop")
            last_move = zero + int(np.flatnonzero(self.moves[zero : index + 1])[-1])
            if last_move < index and arrived_s[index] - arrived_s[last_move + 1] >= STANDS_S - 1e-6:
                return last_move + 1
        raise NotMeasuredError("the file ends before the tool stands still")

    def way_m(self, first: int, last: int) -> float:
        """Length of the path between two poses, given by their indices."""
        kept = [first]
        for index in range(first + 1, last):
            if self.arrived_s[index] - self.arrived_s[kept[-1]] >= _STEP_S:
                kept.append(index)
        steps = np.diff(self.positions[[*kept, last]], axis=0)
        return float(np.linalg.norm(steps, axis=1).sum())


class BlackBoxFile:
    """One file of the guard's black box; NotMeasuredError if it is not one, or of an older version.

    Topic names are the user's, so topics are identified by type and by the guard's order: the command first, the
    measured pose after it.
    """

    def __init__(self, path: Path, storage: Storage) -> None:
        self._path, self._storage, self._types = path, storage, MessageTypes()
        about = _metadata(path)
        self.cause, self.reason = about["cause"], about.get("reason", "")
        if missing := [name for name in ("time_ns", "output") if name not in about]:
            raise NotMeasuredError(f"an older version of the guard wrote it, without {missing[0]}")
        self.output = about["output"]
        self.braking_s = int(about["time_ns"]) * 1e-9
        self._connections = sorted(storage.connections, key=lambda each: each.id)
        for each in self._connections:
            self._types.learn(each.msgtype, each.msgdef)
        self._command = self._connections[0].msgtype if self._connections else ""
        self.tool = ToolMotion(list(self._poses()))

    def stop(self) -> Stop:
        if not len(self.tool.arrived_s):
            raise NotMeasuredError("it holds no measured pose of the tool")
        if self.cause == Cause.POSE_JUMP:
            raise NotMeasuredError("the measured pose jumped: the tool's motion is unknown")
        zero_s, judged_by = self._time_zero()
        tool, zero = self.tool, self.tool.at(zero_s)
        until = tool.at(self.braking_s) + 1
        if not tool.moves[zero:until].any():
            raise NotMeasuredError("the tool was at rest before the stop")
        end, before = tool.end(zero, self.braking_s), tool.at(zero_s - _STEP_S)
        return Stop(
            file=str(self._path),
            output=self.output,
            cause=self.cause,
            time_zero=judged_by,
            speed_m_s=float(tool.speeds[before:until, 0].max()),
            reach_m=float(np.linalg.norm(tool.positions[zero])),
            time_s=float(tool.arrived_s[end] - zero_s),
            braking_s=max(0.0, float(tool.arrived_s[end] - self.braking_s)),
            way_m=tool.way_m(zero, end),
        )

    def _time_zero(self) -> tuple[float, str]:
        """Time of the cause's arrival in seconds, and the event that it is taken from."""
        judges: dict[str, tuple[Callable[[], float | None], str]] = {
            Cause.STOP: (self._pressed, "the message on ~/stop"),
            Cause.NOT_ENABLED: (self._released, "~/enable with false, or the last one with true"),
            Cause.DRIVER_SILENT: (partial(self._newest, self._command), "the last new command"),
            Cause.POLICY_SILENT: (partial(self._newest, _ACTION), "the last new action"),
            Cause.STATE_MISSING: (self._last_state, "the last new state of the robot"),
            **dict.fromkeys(_REFUSED_COMMANDS, (self._last_command, "the refused command")),
        }
        find, words = judges.get(self.cause, (lambda: None, ""))
        time_s = find()
        return (self.braking_s, "the guard's first braking tick") if time_s is None else (time_s, words)

    def _pressed(self) -> float | None:
        times_s = [time_s for time_s, _ in self._messages("std_msgs/msg/Empty")]
        return _last([each for each in times_s if each > self.braking_s - _PRESSED_S])  # else the service was called

    def _last_command(self) -> float | None:
        return _last([time_s for time_s, _ in self._messages(self._command)])

    def _last_state(self) -> float | None:
        if "joint_states" in self.reason:
            return self._newest("sensor_msgs/msg/JointState")
        return _last([each for each in self.tool.arrived_s if each <= self.braking_s])

    def _released(self) -> float | None:
        kind = "std_msgs/msg/Bool"
        said = [(time_s, self._read(raw, kind)) for time_s, raw in self._messages(kind)]
        held_s = _last([time_s for time_s, message in said if message is not None and message.data])
        if held_s is None:
            return None
        return next((time_s for time_s, message in said if message is not None and time_s > held_s), held_s)

    def _newest(self, msgtype: str) -> float | None:
        """Time of the last message with a new highest stamp; for a type without stamps, of the last message."""
        found, newest, unstamped = None, -1, msgtype in _UNSTAMPED
        for time_s, raw in self._messages(msgtype):
            if unstamped or _stamp_ns(raw) > newest:
                found, newest = time_s, _stamp_ns(raw)
        return found

    def _messages(self, msgtype: str) -> Iterator[tuple[float, bytes]]:
        """Yields arrival time and bytes of the messages on a type's first topic, until the guard braked."""
        name = next((each.topic for each in self._connections if each.msgtype == msgtype), None)
        if name is None:
            return
        for _, time_ns, raw in self._storage.messages(frozenset({name})):
            if time_ns * 1e-9 <= self.braking_s:
                yield time_ns * 1e-9, raw

    def _poses(self) -> Iterator[tuple[float, float, Pose]]:
        """Yields arrival, stamp and pose of the valid poses with new stamps."""
        kind, newest = "geometry_msgs/msg/PoseStamped", -1
        poses = [each.topic for each in self._connections[1:] if each.msgtype == kind]
        name = next((topic for topic in poses if not topic.endswith("/override/pose")), None)
        for _, time_ns, raw in self._storage.messages(frozenset({name} if name else ())):
            message = self._read(raw, kind)
            if message is None or _stamp_ns(raw) <= newest:
                continue
            place, turn = message.pose.position, message.pose.orientation
            position = np.array([place.x, place.y, place.z])
            with suppress(ValueError):  # a NaN among them
                rotation = quaternion_matrix(turn.w, turn.x, turn.y, turn.z)
                if np.isfinite(position).all():
                    newest = _stamp_ns(raw)
                    yield time_ns * 1e-9, newest * 1e-9, Pose(position, rotation)

    def _read(self, raw: bytes, msgtype: str) -> Any:
        """Deserialises a message; None if the bytes are invalid, which the guard refused too."""
        try:
            return self._types.deserialise(raw, msgtype)
        except UserError:
            return None


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        try:
            found = [each.metadata for each in make_reader(file).iter_metadata() if each.name == "guard"]
        except (McapError, ValueError, KeyError) as error:
            raise NotMeasuredError(f"the file is damaged ({error})") from None
    if not found or "cause" not in found[0]:
        raise NotMeasuredError("it names no cause: not written by the guard's black box")
    return found[0]


def _stamp_ns(raw: bytes) -> int:
    """Stamp of a message whose first field is its header, from its CDR bytes; -1 if there are too few bytes."""
    if len(raw) < _STAMPED_BYTES:
        return -1
    seconds, nanoseconds = struct.unpack_from("<iI" if raw[1] & 1 else ">iI", raw, 4)
    return int(seconds * 10**9 + nanoseconds)


def _last(times_s: Sequence[float]) -> float | None:
    return times_s[-1] if times_s else None
