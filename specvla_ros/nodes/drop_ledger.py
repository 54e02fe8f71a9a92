"""Which frames ended without an action, why, and when to say so in the log."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from specvla_ros.engine.outcome import DropCounter, DropReason

# These are how a queue of length one works, not faults.
_NORMAL = frozenset({DropReason.SUPERSEDED, DropReason.OVERTAKEN, DropReason.EPOCH_CHANGED})


@dataclass(frozen=True)
class RecentDrops:
    """Drops since the last diagnostics: how many of each reason, and the last detail of each."""

    counts: dict[DropReason, int]
    details: dict[DropReason, str]

    def worst(self, reasons: tuple[DropReason, ...]) -> str:
        """The most frequent of `reasons` in words; empty when there was none."""
        present = [reason for reason in reasons if self.counts.get(reason)]
        if not present:
            return ""
        reason = max(present, key=lambda each: self.counts[each])
        return f"{self.counts[reason]} dropped as {reason.value}: {self.details[reason]}"


class DropLedger:
    """Counts drops from any thread.

    Args:
        log_period_s: at most one log message per reason in this time.
        monotonic_s: the time for it.
    """

    def __init__(self, log_period_s: float = 5.0, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._log_period_s = log_period_s
        self._monotonic_s = monotonic_s
        self._since_activation = DropCounter()
        self._recent = DropCounter()
        self._details: dict[DropReason, str] = {}
        self._silenced = DropCounter()
        self._logged_s: dict[DropReason, float] = {}

    def add(self, reason: DropReason, detail: str = "") -> str | None:
        """Counts one drop and returns what to log, if it is time to."""
        with self._lock:
            self._since_activation.add(reason)
            self._recent.add(reason)
            self._details[reason] = detail
            if reason in _NORMAL:
                return None
            now_s = self._monotonic_s()
            if now_s - self._logged_s.get(reason, -self._log_period_s) < self._log_period_s:
                self._silenced.add(reason)
                return None
            self._logged_s[reason] = now_s
            silenced, self._silenced.counts[reason] = self._silenced.counts[reason], 0
        more = f" ({silenced} more since the last message)" if silenced else ""
        return f"frame dropped as {reason.value}: {detail}{more}"

    def since_activation(self) -> dict[str, int]:
        """Counts by name, every reason included."""
        with self._lock:
            return self._since_activation.by_name()

    def take_recent(self) -> RecentDrops:
        """Drops since the last call."""
        with self._lock:
            counts, self._recent = self._recent.counts, DropCounter()
            return RecentDrops(counts, dict(self._details))

    def start_over(self) -> None:
        """Counts from zero, as on activation."""
        with self._lock:
            self._since_activation = DropCounter()
            self._recent = DropCounter()
