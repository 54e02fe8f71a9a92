# SPDX-License-Identifier: Apache-2.0
"""What came of attacks of one class: how many cases, their outcomes, and each that did what none may."""

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specvla_ros.errors import UserError

# What none may do. Everything else that a case does has a name of its own, such as `refused`.
FAILURES = ("traceback", "silent", "slow", "memory")
_MUCH_BYTES = 512 << 20
_SHOWN = 20  # failures that a result names


class Silent(Exception):
    """A case that went on as if nothing were wrong, and did something else."""


@dataclass
class Tally:
    """Counts of one class.

    Args:
        slow_s: seconds that no case may take.
        pid: of the process whose memory counts; self: this one.
        outcomes: cases by what they did.
        failures: the first of those that failed: the case, and what it did.
        slowest_s: seconds of the slowest case.
        peak_bytes: the most memory that a case took beyond what was there before it.
    """

    slow_s: float = 20.0
    pid: str = "self"
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    peak_bytes: int = 0

    def judge(self, case: str, attack: Callable[[], str]) -> None:
        """Runs one case, which returns what it did; a UserError is `refused`, any other exception a traceback."""
        before, started = _begin_peak(self.pid), time.perf_counter()
        detail = ""
        try:
            outcome = attack()
        except UserError:
            outcome = "refused"
        except Silent as error:
            outcome, detail = "silent", str(error)
        except KeyboardInterrupt:
            raise
        except BaseException:  # Rust's panics are no Exception
            outcome, detail = "traceback", traceback.format_exc(limit=-3)
        seconds, grown = time.perf_counter() - started, max(0, _peak(self.pid) - before)
        self.slowest_s, self.peak_bytes = max(self.slowest_s, seconds), max(self.peak_bytes, grown)
        if outcome not in FAILURES and seconds > self.slow_s:
            outcome, detail = "slow", f"{seconds:.1f} s"
        if outcome not in FAILURES and grown > _MUCH_BYTES:
            outcome, detail = "memory", f"{grown >> 20} MiB"
        self.outcomes[outcome] += 1
        if outcome in FAILURES and len(self.failures) < _SHOWN:
            self.failures.append(f"{case}: {outcome}: {detail}")

    @property
    def tried(self) -> int:
        """Number of cases."""
        return self.outcomes.total()

    @property
    def failed(self) -> int:
        """Number of cases that did what none may."""
        return sum(self.outcomes[name] for name in FAILURES)

    def as_json(self) -> dict[str, Any]:
        """For the result."""
        return {
            "tried": self.tried,
            "failed": self.failed,
            "outcomes": dict(sorted(self.outcomes.items())),
            "failures": self.failures,
            "slowest_s": round(self.slowest_s, 2),
            "peak_mib": round(self.peak_bytes / 2**20),
        }


def _begin_peak(pid: str) -> int:
    """Sets the kernel's count of the peak back, where it lets us; the resident bytes now."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return resident_bytes(pid)


def resident_bytes(pid: str) -> int:
    """Memory of a process; 0: it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _peak(pid: str) -> int:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
    return 0
