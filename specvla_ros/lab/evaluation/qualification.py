# SPDX-License-Identifier: Apache-2.0
"""Whether pairs of episodes show that a candidate works as well as the reference."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.e_process import confidence_interval, log_e_values
from specvla_ros.lab.evaluation.statistics import Rate


class Verdict(str, Enum):
    """What the pairs say of a candidate."""

    QUALIFIED = "qualified"
    REFUSED = "refused"
    UNDECIDED = "undecided"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Criterion:
    """What a candidate must show.

    Args:
        margin: its success must be less than this below the reference's.
        success: and above this share of all starts, so that a policy that never works is not said to work as well.
        alpha: probability of a wrong verdict, whenever one stops: of qualifying what does not meet the two, and of
            refusing what does.
    """

    margin: float = 0.1
    success: float = 0.5
    alpha: float = 0.05

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < 1:
                raise UserError(f"{name} is {value:g}, but it must lie between 0 and 1")


@dataclass(frozen=True)
class Pair:
    """One start, twice."""

    task: str
    seed: int
    reference: bool  # whether the reference succeeded
    candidate: bool


@dataclass(frozen=True)
class Judgement:
    """A candidate and its pairs.

    Args:
        name: of the candidate.
        pairs: in the order in which they were drawn.
        criterion: by which they are judged.
    """

    name: str
    pairs: tuple[Pair, ...]
    criterion: Criterion

    @cached_property
    def differences(self) -> np.ndarray:
        """Float64 [pairs]: 1 where the candidate alone succeeded, -1 where the reference alone did."""
        return np.array([pair.candidate - pair.reference for pair in self.pairs], dtype=np.float64)

    @cached_property
    def evidence(self) -> dict[str, np.ndarray]:
        """Logarithms of the e-values after each pair, by what they are evidence for."""
        criterion = self.criterion
        succeeded = np.array([pair.candidate for pair in self.pairs], dtype=np.float64)
        return {
            "not worse": log_e_values(self.differences, -criterion.margin, -1.0),
            "works": log_e_values(succeeded, criterion.success, 0.0),
            "worse": log_e_values(-self.differences, criterion.margin, -1.0),
            "does not work": log_e_values(-succeeded, -criterion.success, -1.0),
        }

    @cached_property
    def verdict(self) -> Verdict:
        """Qualified where both criteria are shown, refused where one is shown not to be met.

        To qualify, both must be wrong for the verdict to be: each has alpha. To refuse one suffices: each has half.
        """
        if not self.pairs:
            return Verdict.NOT_TRIED
        most = {name: float(values.max()) for name, values in self.evidence.items()}
        alpha = self.criterion.alpha
        if max(most["worse"], most["does not work"]) >= -np.log(alpha / 2):
            return Verdict.REFUSED
        if min(most["not worse"], most["works"]) >= -np.log(alpha):
            return Verdict.QUALIFIED
        return Verdict.UNDECIDED

    @cached_property
    def interval(self) -> tuple[float, float]:
        """That of the difference in success, which holds whenever one looks."""
        return self.interval_after(len(self.pairs))

    def interval_after(self, n: int) -> tuple[float, float]:
        """`interval` as it was after n pairs."""
        return confidence_interval(self.differences[:n], -1.0, 1.0, self.criterion.alpha)

    @property
    def rates(self) -> tuple[Rate, Rate]:
        """Of the reference and of the candidate."""
        n = len(self.pairs)
        return Rate(sum(pair.reference for pair in self.pairs), n), Rate(sum(pair.candidate for pair in self.pairs), n)

    def as_json(self) -> dict[str, Any]:
        if not self.pairs:
            return {"name": self.name, "verdict": self.verdict.value}
        reference, candidate = self.rates
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "pairs": len(self.pairs),
            "reference": reference.as_json(),
            "candidate": candidate.as_json(),
            "only_reference": int((self.differences < 0).sum()),
            "only_candidate": int((self.differences > 0).sum()),
            "difference": {"mean": float(self.differences.mean()), "low": self.interval[0], "high": self.interval[1]},
            "log_e_values": {name: float(values.max()) for name, values in self.evidence.items()},
        }

    def __str__(self) -> str:
        if not self.pairs:
            return f"{self.name}: not tried, since the one before it did not qualify"
        reference, candidate = self.rates
        low, high = (100 * bound for bound in self.interval)
        return (
            f"{self.name}: {self.verdict.value} after {len(self.pairs)} pairs: success {candidate} beside {reference}, "
            f"{100 * self.differences.mean():+.1f} points, {low:+.1f} to {high:+.1f} whenever one looks"
        )


def boldest(judgements: Sequence[Judgement]) -> str:
    """The name of the last candidate that qualified; empty: none did."""
    return next((each.name for each in reversed(judgements) if each.verdict is Verdict.QUALIFIED), "")
