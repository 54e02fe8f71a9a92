# SPDX-License-Identifier: Apache-2.0
"""The tool's measured poses of the last seconds: an action counts from where the tool was in its picture."""

from bisect import bisect_right
from collections import deque

from specvla_ros.control.pose import Pose


class PoseUnknownError(LookupError):
    """The tool's pose at that time is not known."""


class PoseHistory:
    """Poses by their stamps, interpolated in between.

    Args:
        kept_s: how far back it reaches.
        gap_s: two poses further apart than this say nothing about the time between them.
    """

    def __init__(self, kept_s: float = 2.0, gap_s: float = 0.25) -> None:
        self._kept_s, self._gap_s = kept_s, gap_s
        self._poses: deque[tuple[float, Pose]] = deque()

    @property
    def newest(self) -> tuple[float, Pose] | None:
        """Stamp in seconds and pose; None: there is none yet."""
        return self._poses[-1] if self._poses else None

    def clear(self) -> None:
        """Forgets all, as after a jump of the clock."""
        self._poses.clear()

    def add(self, stamp_s: float, pose: Pose) -> bool:
        """Takes a pose; False: it is no newer than the last one, and is left out."""
        if self._poses and stamp_s <= self._poses[-1][0]:
            return False
        self._poses.append((stamp_s, pose))
        while stamp_s - self._poses[0][0] > self._kept_s and len(self._poses) > 2:
            self._poses.popleft()
        return True

    def at(self, stamp_s: float) -> Pose:
        """The pose at a time; that of the newest one holds for as long as a gap may be.

        Raises:
            PoseUnknownError: no pose was measured around that time.
        """
        if not self._poses:
            raise PoseUnknownError("no tool pose has been measured yet")
        first_s, last_s = self._poses[0][0], self._poses[-1][0]
        if stamp_s < first_s:
            raise PoseUnknownError(f"the tool's poses are known from {first_s - stamp_s:.3f} s later on")
        if stamp_s >= last_s:
            if stamp_s - last_s > self._gap_s:
                raise PoseUnknownError(f"the newest tool pose is {stamp_s - last_s:.3f} s older")
            return self._poses[-1][1]
        after = bisect_right(self._poses, stamp_s, key=lambda each: each[0])
        (earlier_s, earlier), (later_s, later) = self._poses[after - 1], self._poses[after]
        if later_s - earlier_s > self._gap_s:
            raise PoseUnknownError(f"no tool pose was measured for {later_s - earlier_s:.3f} s around it")
        return earlier.toward(later, (stamp_s - earlier_s) / (later_s - earlier_s))
