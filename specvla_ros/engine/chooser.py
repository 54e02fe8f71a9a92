# SPDX-License-Identifier: Apache-2.0
"""Mode auto: chooses when to start the next frame and whether to draft, to minimize the age of the image acted on.

Both inputs to `expected_age`, the times of ticks and the forwards of answers, are measured while the engine decodes.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean, median

from specvla_ros.engine.pace import MEMORY, Answers, Kind, Pace, expected_age

# The pace changes if another's age is below this share of the current one's twice in a row; at first, once.
_BETTER = 0.97
_UNSETTLED = 4  # candidates simulated per answer until a round changes nothing; then one
_MOST_TREES = 8  # max trees in a kind of tick
_OFTEN = 30  # min ticks of a kind before its mean is compared with the first
_DRIFTED = 1.25  # report tick times that changed by more than this factor since configure, either way
_PLAIN = 400  # plainly decoded answers after which drafting is tried again


class TickTimes:
    """The running mean time of each kind of tick, so that thermal throttling is noticed."""

    def __init__(self) -> None:
        self._mean_s: dict[Kind, float] = {}
        self._seen: dict[Kind, int] = {}
        self._first_s: dict[Kind, float] = {}  # as measured in configure

    def add(self, kind: Kind, seconds: float) -> None:
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        known_s = self._mean_s.get(kind, seconds)
        share = 1 - MEMORY if kind in self._first_s else max(1 / seen, 1 - MEMORY)
        self._mean_s[kind] = (1 - share) * known_s + share * seconds

    def keep_first(self) -> None:
        """Stores the current means as the baseline of `drift`."""
        self._first_s, self._seen = dict(self._mean_s), {}

    @property
    def drift(self) -> float:
        """Ratio of current to baseline tick times: the median over the kinds with enough ticks since."""
        # A copy: diagnostics call this from another thread.
        often = [kind for kind, seen in [*self._seen.items()] if seen >= _OFTEN and kind in self._first_s]
        return median(self._mean_s[kind] / self._first_s[kind] for kind in often) if often else 1.0

    def seconds(self, kind: Kind) -> float | None:
        """Mean seconds of a kind; if never measured, those of one with more trees, an upper bound.

        None if neither is known: a pace that needs this kind is not chosen.
        """
        more = (replace(kind, trees=trees) for trees in range(kind.trees, _MOST_TREES + 1))
        return next((self._mean_s[each] for each in more if each in self._mean_s), None)


class Chooser:
    """Chooses the pace with the lowest expected age and keeps it until another is clearly better.

    Candidates are simulated one by one while the device computes a forward.

    Args:
        most: max frames of the robot in flight.
        spreads: forwards over which a prompt may be spread.
        drafts: whether any drafter is available.

    Attributes:
        pace: the current one.
        measured: whether every kind of tick was timed; if not, the choice is limited to the kinds seen so far.
    """

    def __init__(self, most: int, spreads: Sequence[int], *, drafts: bool) -> None:
        self.pace = Pace(drafts=drafts)
        self.times, self.answers = TickTimes(), Answers()
        self.measured = False
        self._most, self._spreads, self._can_draft = most, tuple(spreads), drafts
        self._ages: dict[Pace, float] = {}  # in this round
        self._round: list[Pace] = []  # candidates left in this round
        self._better: Pace | None = None  # best in the previous round
        self._due = 0  # candidates to simulate
        self._settled = False  # whether the last round changed nothing
        self._first = True  # whether the next round is the first since drafting began
        self._plain = 0  # answers since the last drafted one
        self._pinned = False

    def every_kind(self) -> list[Pace]:
        """Paces that together cover every kind of tick, for measuring a device."""
        drafts = (True, False) if self._can_draft else (False,)
        more = [Pace(self._most, spread=spread, drafts=each) for each in drafts for spread in self._spreads]
        return [Pace(drafts=each) for each in drafts] + (more if self._most > 1 else [])

    def __str__(self) -> str:
        if not self.measured:
            return f"{self.pace}; the tick times of other paces are measured at the next configure"
        drift = self.times.drift
        if 1 / _DRIFTED < drift < _DRIFTED:
            return str(self.pace)
        return f"{self.pace}; ticks take {drift:.2g} times as long as in configure; the choice uses current times"

    def forget_times(self) -> None:
        """Forgets all tick times, before they are measured, possibly by another clock."""
        self.times, self.measured = TickTimes(), False

    def settle(self) -> None:
        """Marks every kind of tick as timed."""
        self.measured = True
        self.times.keep_first()

    @contextmanager
    def pinned(self, pace: Pace) -> Iterator[None]:
        """Keeps a pace within the context; only tick times are updated."""
        kept, self.pace, self._pinned = self.pace, pace, True
        try:
            yield
        finally:
            self.pace, self._pinned = kept, False

    def candidates(self) -> list[Pace]:
        """One frame at a time, and several with each start time of the next and each spread of a prompt.

        All start times for the current choice of drafting or plain decoding, only the extremes for the other.
        """
        found = []
        for drafts in (True, False) if self._can_draft else (False,):
            if not self.answers.known(drafted=drafts):
                continue
            half = max(1, round(fmean(self.answers.forwards(others=0, drafted=drafts)) / 2))
            moments = sorted({1.0, 2.0, 3.0, 4.0, float(half), math.inf}) if drafts == self.pace.drafts else [math.inf]
            found.append(Pace(drafts=drafts))
            found += [
                Pace(in_flight, left, spread, drafts)
                for in_flight in range(2, self._most + 1)
                for left in moments
                for spread in self._spreads
            ]
        return found

    def answered(self, forwards: int, tokens: int, *, others: int, drafted: bool) -> None:
        """Learns from an answer and schedules more candidates."""
        if self._pinned:
            return
        self.answers.add(forwards, tokens, others=others, drafted=drafted)
        self._plain = 0 if drafted else self._plain + 1
        if self._plain >= _PLAIN and self._can_draft:
            self._try_drafting()
        elif self.answers.known(drafted=self.pace.drafts):
            self._due = min(self._due + (1 if self._settled else _UNSETTLED), _UNSETTLED)

    def play(self) -> None:
        """Simulates the next candidate if one is due, and chooses at the end of a round.

        The first round has only one frame at a time, so that drafts that do not pay end after few answers.
        """
        if not self._due or self._pinned:
            return
        self._due -= 1
        if not self._round:
            most = 1 if self._first else self._most
            others = [pace for pace in self.candidates() if pace != self.pace and pace.in_flight <= most]
            self._ages, self._round = {}, others
        if self._round:
            pace = self._round.pop()
            self._ages[pace] = expected_age(pace, self.answers, self.times.seconds)
        if not self._round:
            self._choose()

    def _try_drafting(self) -> None:
        """Returns to drafting: its benefit may have changed since the last drafted answer."""
        self.answers.forget_drafted()
        self.pace, self._plain, self._ages, self._round, self._better = Pace(), 0, {}, [], None
        self._due, self._settled, self._first = 0, False, True

    def _choose(self) -> None:
        best = min(self._ages, key=self._ages.__getitem__, default=self.pace)
        now = expected_age(self.pace, self.answers, self.times.seconds)
        self._settled = best == self.pace or not self._ages[best] < _BETTER * now
        if self._settled:
            self._better = None
        elif self._better is not None or self._first:
            self.pace, self._better = best, None
        else:
            self._better = best
        self._first = False
