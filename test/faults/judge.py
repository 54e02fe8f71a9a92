# SPDX-License-Identifier: Apache-2.0
"""Judges a run by what the arm really did: its speed, acceleration and place against the limits, and how it stopped."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.lab.simulation.motion_record import TOUCHES_TABLE, TOUCHES_THING, MotionRecord

# What an arm may add to what it is told, by its own control and its inertia: a little more than runs without a
# fault showed. Accelerations while the arm touches something are the contact's.
SPEED_SHARE, ACCELERATION_SHARE, OUTSIDE_M = 1.25, 4.0, 0.01
_TOUCHED_ROWS = 20  # 0.2 s
# Below these a tool stands: a millimetre in a tenth of a second.
STANDS_M_S, STANDS_RAD_S = 0.01, 0.1
# A tool that stands and touches something, such as fingers that close on it, is shaken by less than this.
SHAKES_M, SHAKES_RAD = 0.001, 0.01
_BEFORE_S = 0.5  # in which a contact may lead to a stop


@dataclass(frozen=True)
class Extremes:
    """The largest of a run, as shares of their limits, and metres.

    Args:
        speed_share: of the tool, translation or rotation; of joints where they are commanded.
        acceleration_share: likewise, while the arm touches nothing.
        outside_m: how far out of the workspace the tool was.
        tool_share: speed of the tool, also where joints are commanded.
        free_speed_share, free_outside_m: likewise, while the arm touches nothing and is not thrown by what it touched.
    """

    speed_share: float
    acceleration_share: float
    outside_m: float
    tool_share: float
    free_speed_share: float
    free_outside_m: float

    @property
    def beyond(self) -> list[str]:
        """Which of them are beyond what an arm may add."""
        over = {
            "speed": self.speed_share > SPEED_SHARE,
            "acceleration": self.acceleration_share > ACCELERATION_SHARE,
            "workspace": self.outside_m > OUTSIDE_M,
        }
        return [name for name, found in over.items() if found]

    @property
    def free(self) -> "Extremes":
        """What of them was while the arm touched nothing and was not thrown by what it touched."""
        return replace(self, speed_share=self.free_speed_share, outside_m=self.free_outside_m)

    @property
    def in_contact(self) -> bool:
        """Whether it is beyond only while the arm touches something, or is thrown by what it touched."""
        return bool(self.beyond) and not self.free.beyond


@dataclass(frozen=True)
class Stop:
    """How the arm came to rest.

    Args:
        speed_m_s: of the tool when the stop began.
        time_s: until it stood.
        distance_m: that the tool went meanwhile.
    """

    speed_m_s: float
    time_s: float
    distance_m: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


class Judge:
    """Looks at one record.

    Args:
        record: of the arm.
        settings: with the limits that were promised.
    """

    def __init__(self, record: MotionRecord, settings: GuardSettings) -> None:
        self._record, self._settings, rows = record, settings, record.rows
        self._times_s: np.ndarray = rows["time_s"]
        self._speeds = _lengths(rows["velocity"])  # m/s and rad/s
        self._moving = (self._speeds > (STANDS_M_S, STANDS_RAD_S)).any(axis=1)

    def extremes(self, since_s: float = -np.inf, until_s: float = np.inf) -> Extremes:
        """Of the whole run, or of what lies between two moments."""
        rows, limits, joints = self._record.rows, self._settings.limits, self._settings.joints
        later = (self._times_s >= since_s) & (self._times_s <= until_s)
        tool_speed = (self._speeds / (limits.linear_speed, limits.angular_speed)).max(axis=1)
        if self._settings.kind.of_joints:
            speed = (np.abs(rows["joint_velocity"]) / joints.speeds).max(axis=1)
            changes = np.diff(rows["joint_velocity"], axis=0) / np.diff(self._times_s)[:, None]
            accelerations = (np.abs(changes) / joints.accelerations).max(axis=1)
        else:
            speed = tool_speed
            bounds = (limits.linear_acceleration, limits.angular_acceleration)
            accelerations = (_lengths(acceleration(rows)[1:]) / bounds).max(axis=1)
        position = rows["position"]
        over = speed > SPEED_SHARE
        free = later & ~self._disturbed(over | np.append(False, accelerations > ACCELERATION_SHARE))
        over &= later
        over[1:] |= free[1:] & (accelerations > ACCELERATION_SHARE)
        outside = np.maximum(np.array(limits.workspace_min) - position, position - np.array(limits.workspace_max))
        outside_m = float(outside[later].max(initial=0.0))
        return Extremes(
            float(speed[later].max(initial=0.0)),
            float(accelerations[free[1:]].max(initial=0.0)),
            outside_m,
            float(tool_speed[later].max(initial=0.0)),
            float(speed[free].max(initial=0.0)),
            float(outside[free].max(initial=0.0)),
        )

    def moved_between(self, begin_s: float, end_s: float) -> bool:
        """Whether the arm moved at any moment between; a tool that something shakes does not."""
        moving = self._moving & (self._times_s > begin_s) & (self._times_s < end_s)
        touched = self._touched()
        if (moving & ~touched).any():
            return True
        steps_s = np.diff(self._times_s, prepend=self._times_s[0])
        ways = (self._speeds * steps_s[:, None])[moving & touched].sum(axis=0)
        return bool((ways > (SHAKES_M, SHAKES_RAD)).any())

    def touched_at(self, time_s: float) -> bool:
        """Whether the arm touched anything but itself within half a second before."""
        lately = (self._times_s > time_s - _BEFORE_S) & (self._times_s <= time_s)
        return bool(self._touched()[lately].any())

    def speed_at(self, time_s: float) -> float:
        """Of the tool, m/s."""
        return float(self._speeds[min(int(np.searchsorted(self._times_s, time_s)), len(self._speeds) - 1), 0])

    def stop(self, begin_s: float, end_s: float) -> Stop | None:
        """How it came to rest between two moments; None: it did not, or it stood already."""
        inside = (self._times_s > begin_s) & (self._times_s < end_s)
        moving = np.flatnonzero(self._moving & inside)
        if not len(moving) or moving[-1] == np.flatnonzero(inside)[-1]:
            return None
        until = moving[-1] + 1
        way = self._record.rows["position"][np.flatnonzero(inside)[0] : until + 1]
        distance_m = float(np.linalg.norm(np.diff(way, axis=0), axis=1).sum())
        return Stop(self.speed_at(begin_s), float(self._times_s[until] - begin_s), distance_m)

    def _touched(self) -> np.ndarray:
        """Whether the arm touches anything but itself, or did a moment ago; bool [rows]."""
        touching = (self._record.rows["touching"] & (TOUCHES_TABLE | TOUCHES_THING) > 0).astype(float)
        return np.convolve(touching, np.ones(_TOUCHED_ROWS + 1))[: len(touching)] > 0

    def _disturbed(self, over: np.ndarray) -> np.ndarray:
        """As `_touched`, and until a moment after an excess that began then: a blocked arm is thrown once it is free.

        `over`: where something is beyond its limit, bool [rows].
        """
        disturbed = self._touched()
        for begin, end in np.flatnonzero(np.diff(over, prepend=False, append=False)).reshape(-1, 2):
            if disturbed[begin]:
                disturbed[begin : end + _TOUCHED_ROWS] = True
        return disturbed


def _lengths(twists: np.ndarray) -> np.ndarray:
    """Of translation and rotation, float64 [rows, 2]."""
    return np.stack([np.linalg.norm(twists[:, :3], axis=1), np.linalg.norm(twists[:, 3:], axis=1)], axis=1)


def describe() -> dict[str, Any]:
    """The judge's own figures, for the result."""
    return {
        "speed_share": SPEED_SHARE,
        "acceleration_share": ACCELERATION_SHARE,
        "outside_m": OUTSIDE_M,
        "stands_m_s": STANDS_M_S,
        "stands_rad_s": STANDS_RAD_S,
        "shakes_m": SHAKES_M,
        "shakes_rad": SHAKES_RAD,
    }


def acceleration(rows: np.ndarray) -> np.ndarray:
    """The tool's in a record, float64 [rows, 6] in m/s² and rad/s²: its velocity's change in a step, over the step.

    NaN at the first row and after each reset, across which nothing moved.
    """
    steps = np.diff(rows["time_s"])
    change = np.full((len(rows), 6), np.nan)
    change[1:] = np.diff(rows["velocity"], axis=0) / steps[:, None]
    change[1:][np.diff(rows["episode"]) != 0] = np.nan
    return change
