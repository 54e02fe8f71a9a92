# SPDX-License-Identifier: Apache-2.0
"""Decoding statistics summed over answers: the figures of Spec-VLA's tables 1 to 3."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specvla_ros.engine.outcome import DecodeRecord


@dataclass
class DecodeTally:
    """Numbers of forwards and tokens, summed over actions.

    Attributes:
        forwards: packed forwards that carried the actions' rows, prefill included.
        accepted: verification forwards by (position of the first drafted token in the answer, accept length).
        tokens: tokens committed by verification forwards.
        bins_off: tokens by (position in the answer, distance to the target's own choice in bins).
        why: tokens by the reason for their acceptance, see DecodeStats.msg.
    """

    actions: int = 0
    forwards: int = 0
    tokens: int = 0
    accepted: Counter[tuple[int, int]] = field(default_factory=Counter)
    bins_off: Counter[tuple[int, int]] = field(default_factory=Counter)
    why: Counter[int] = field(default_factory=Counter)

    def add(self, record: DecodeRecord) -> None:
        self.actions += 1
        self.forwards += record.forwards
        first = len(record.tokens_per_forward) - len(record.accept_lengths)
        position = sum(record.tokens_per_forward[:first])
        for accepted, tokens in zip(record.accept_lengths, record.tokens_per_forward[first:], strict=True):
            self.accepted[position, accepted] += 1
            self.tokens += tokens
            position += tokens
        self.bins_off.update(enumerate(record.bins_off))
        self.why.update(record.why)

    @property
    def tau(self) -> float:
        """Tokens committed per verification forward; 0 without any."""
        forwards = self.accepted.total()
        return self.tokens / forwards if forwards else 0.0

    @property
    def forwards_per_action(self) -> float:
        return self.forwards / self.actions if self.actions else 0.0

    def by_length(self) -> dict[int, float]:
        """Share of the verification forwards by accept length (Spec-VLA, Table 2)."""
        counts: Counter[int] = Counter()
        for (_, length), count in self.accepted.items():
            counts[length] += count
        return {length: counts[length] / counts.total() for length in sorted(counts)}

    def by_position(self) -> dict[int, float]:
        """Mean accept length by the position of the first drafted token (Spec-VLA, Table 3)."""
        means: dict[int, float] = {}
        for position in sorted({position for position, _ in self.accepted}):
            counts = {length: count for (at, length), count in self.accepted.items() if at == position}
            means[position] = sum(length * count for length, count in counts.items()) / sum(counts.values())
        return means

    def as_json(self) -> dict[str, Any]:
        """All counts, with pairs as `a,b`; see `of_json`."""
        return {
            "actions": self.actions,
            "forwards": self.forwards,
            "tokens": self.tokens,
            "accepted": {f"{a},{b}": count for (a, b), count in sorted(self.accepted.items())},
            "bins_off": {f"{a},{b}": count for (a, b), count in sorted(self.bins_off.items())},
            "why": {str(code): count for code, count in sorted(self.why.items())},
        }

    def summary(self) -> dict[str, Any]:
        """The counts and their means, for a summary.json."""
        return self.as_json() | {"tau": self.tau, "forwards_per_action": self.forwards_per_action}

    @property
    def words(self) -> str:
        """The means as text; empty without a verification forward."""
        if not self.accepted:
            return ""
        return f"{self.forwards_per_action:.2f} forwards per action, τ {self.tau:.2f} tokens per forward"

    @staticmethod
    def of_json(raw: dict[str, Any]) -> "DecodeTally":
        pairs = {
            name: Counter({(int(a), int(b)): n for key, n in raw[name].items() for a, b in [key.split(",")]})
            for name in ("accepted", "bins_off")
        }
        why = Counter({int(code): count for code, count in raw["why"].items()})
        return DecodeTally(raw["actions"], raw["forwards"], raw["tokens"], why=why, **pairs)

    @staticmethod
    def sum(tallies: Iterable["DecodeTally"]) -> "DecodeTally":
        total = DecodeTally()
        for each in tallies:
            for name, value in vars(each).items():
                setattr(total, name, getattr(total, name) + value)
        return total


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """p50, p95, p99, mean and max; empty without values."""
    if not len(values):
        return {}
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "mean": float(np.mean(values)), "max": float(np.max(values))}
