# SPDX-License-Identifier: Apache-2.0
"""Mode auto: chooses when to start the next frame and whether to draft, to minimize the age of the image acted on.

The time of every kind of tick is measured in configure. While decoding, only the kinds of the current pace occur; the
times of the others are scaled by their change, since a device that becomes slower does so for all. From these times and
the latest answers, `expected_age` predicts the age of every pace. Another pace that promises less is tried for some
answers. It is kept if its age, by its own ticks then, is less than that of the pace before it, both before and after
the trial.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, median

from specvla_ros.engine.pace import MEMORY, Answers, Kind, Length, Pace, expected_age, waits_for_thought

# A pace is tried if its age is below this share of the current one's in two rounds in a row; at first, in one.
_BETTER = 0.97
_TRIED = 12  # answers in each pace of a trial: the first are still those of the pace before
_AT_ONCE = 4  # candidates per answer until a round changes nothing; then one
_REST = 128  # answers between rounds once one changed nothing
_FIRST_REST, _LONGEST_REST = 16, 1024  # answers between rounds after a trial that failed; twice as many after each
_PLAIN = 400  # plainly decoded answers after which drafting is tried again; after each failure, twice as many
_OVERLAPPED = 1000  # answers of overlapping frames after which one frame at a time is tried, whatever is predicted
_SLOWEST = 2.0  # a tick counts for at most so many times its mean: another program may have had the device
_MOST_TREES = 8  # max trees in a kind of tick
_OFTEN = 30  # min ticks of a kind before its mean is compared with the first
_DRIFTED = 1.25  # report tick times that changed by more than this factor since configure, either way


class TickTimes:
    """The time of each kind of tick: measured in configure, then from the ticks of the current pace.

    A kind that occurs has a running mean. The others have their time in configure times the change of those that occur:

        scale = sum_k n_k mean_k / sum_k n_k first_k

    with n_k ticks of kind k in this pace. Ticks that start a frame and the others have a scale each: the former also
    wait for the towers and compete with the preparation of the next image. Of drafted ticks the others are longer than
    in configure for a reason of their own, too: trees of real images are larger than those of black ones. What plain
    ticks share with these, and drafted ones with plain ones, is the smaller scale.
    """

    def __init__(self) -> None:
        self._mean_s: dict[Kind, float] = {}
        self._seen: dict[Kind, int] = {}  # ticks in this pace
        self._first_s: dict[Kind, float] = {}  # as measured in configure

    def add(self, kind: Kind, seconds: float) -> None:
        """Records a tick. The time known before counts like one tick, until about the last ten count."""
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        known_s = self._mean_s.get(kind, seconds)
        share = max(1 / (seen + (kind in self._first_s)), 1 - MEMORY)
        self._mean_s[kind] = (1 - share) * known_s + share * min(seconds, _SLOWEST * known_s)

    def keep_first(self) -> None:
        """Stores the current means as the baseline, at the end of configure."""
        self._first_s, self._seen = dict(self._mean_s), {}

    def of_next_pace(self) -> "TickTimes":
        """A copy with the same times, for the ticks of another pace."""
        found = TickTimes()
        found._mean_s = {kind: self._now_s(kind) for kind in self._mean_s}
        found._first_s = self._first_s
        return found

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
        return next((self._now_s(each) for each in more if each in self._mean_s), None)

    def _now_s(self, kind: Kind) -> float:
        if kind in self._seen or kind not in self._first_s:
            return self._mean_s[kind]
        known = [each for each in self._seen if each in self._first_s]
        shares = [kind.begins]
        if not kind.begins and all(each.drafts != kind.drafts for each in known):
            shares = [True, False]
        scales = [self._scale([each for each in known if each.begins == begins]) for begins in shares]
        return min((self._first_s[kind] * scale for scale in scales if scale), default=self._mean_s[kind])

    def _scale(self, kinds: Sequence[Kind]) -> float:
        """Current over baseline times of kinds that occur; 0 if none does."""
        now_s, first_s = (sum(self._seen[each] * of[each] for each in kinds) for of in (self._mean_s, self._first_s))
        return now_s / first_s if first_s else 0.0


@dataclass
class _Trial:
    """A comparison of a pace with the one before it: tried once, and compared with before and after."""

    before: Pace
    before_s: float  # its age
    times: TickTimes  # until then
    tried: Pace
    tried_s: float = math.nan
    left: int = _TRIED  # answers


class Chooser:
    """Chooses the pace with the lowest age and keeps it until another is clearly better.

    Candidates are computed one by one while the device computes a forward.

    Args:
        most: max frames of the robot in flight.
        spreads: forwards over which a prompt may be spread.
        drafts: whether any drafter is available.
        ahead: whether the device may process an image beside a forward of others.

    Attributes:
        pace: the current one.
        ahead: see above.
        measured: whether every kind of tick was timed; if not, the choice is limited to the kinds seen so far.
    """

    def __init__(self, most: int, spreads: Sequence[int], *, drafts: bool, ahead: bool = False) -> None:
        self.pace, self.ahead = Pace(drafts=drafts), ahead
        self.times, self.answers = TickTimes(), Answers()
        self.measured = False
        self._thoughts: dict[bool, float] = {}  # mean forwards of answers with their own text, by whether drafted
        self._most, self._spreads, self._can_draft = most, tuple(spreads), drafts
        self._round: list[Pace] = []  # candidates left in this round
        self._best = (1.0, self.pace)  # in this round: share of the current pace's age, and pace
        self._promised = True  # whether the round before had a better pace; also before the first one
        self._first = True  # whether the next round is the first
        self._due = 0  # candidates to compute
        self._at_once = _AT_ONCE
        self._trial: _Trial | None = None
        self._answers_to_round = 0  # answers until the next round
        self._rest_after_failure = _FIRST_REST  # the same, after the next trial that fails
        self._undrafted = 0  # answers since the last drafted one
        self._redraft_after = _PLAIN  # so many of them, and drafting is tried
        self._overlapped = 0  # answers since frames overlap, or since one frame at a time was tried
        self._pinned = False

    def every_kind(self) -> list[Pace]:
        """Paces that together cover every kind of tick, for measuring a device; those that seldom pay come last."""
        drafts = (True, False) if self._can_draft else (False,)
        found = [Pace(drafts=each) for each in drafts]
        if self._most > 1:
            ways = product(self._sides, drafts, self._spreads)
            found += [Pace(self._most, math.inf, spread, each, ahead) for ahead, each, spread in ways]
        return found

    @property
    def _sides(self) -> Sequence[bool]:
        """Values that `Pace.ahead` may have."""
        return (False, True) if self.ahead else (False,)

    def __str__(self) -> str:
        if not self.measured:
            return f"{self.pace}; the tick times of other paces are measured at the next configure"
        drift = self.times.drift
        if 1 / _DRIFTED < drift < _DRIFTED:
            return str(self.pace)
        return f"{self.pace}; ticks take {drift:.2g} times as long as in configure; the choice uses current times"

    def forget_times(self) -> None:
        """Forgets all tick times, before they are measured, possibly by another clock, and ends a trial."""
        self.pace = self._trial.before if self._trial is not None else self.pace
        self._trial, self.times, self.measured = None, TickTimes(), False

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
        """One frame at a time, and several with each start time of the next, with each way to start it.

        All start times for the current choice of drafting or plain decoding, only the extremes for the other.
        """
        found = []
        for drafts in (True, False) if self._can_draft else (False,):
            if not self.answers.known(drafted=drafts):
                continue
            half = max(1, round(fmean(self.answers.forwards(others=0, drafted=drafts)) / 2))
            moments = sorted({1.0, 2.0, 3.0, 4.0, float(half), math.inf}) if drafts == self.pace.drafts else [math.inf]
            found.append(Pace(drafts=drafts))
            ways = product(range(2, self._most + 1), moments, self._spreads, [drafts], self._sides)
            found += [Pace(*each) for each in ways]
        return found

    def answered(self, taken: Length, plain: Length, *, others: int, drafted: bool) -> None:
        """Learns from an answer, see `Answers.add`; ends a trial, starts one of drafting, or schedules candidates."""
        if self._pinned:
            return
        self.answers.add(taken, plain, others=others, drafted=drafted)
        self._undrafted = 0 if drafted else self._undrafted + 1
        self._overlapped = self._overlapped + 1 if self.pace.in_flight > 1 else 0
        self._answers_to_round = max(0, self._answers_to_round - 1)
        if self._trial is not None:
            self._trial.left -= 1
            if self._trial.left <= 0 and self.answers.known(drafted=self.pace.drafts):
                self._judge(self._trial)
        elif self._undrafted >= self._redraft_after and self._can_draft:
            self.answers.forget_drafted()
            self._try(Pace())
        elif self._overlapped >= _OVERLAPPED:
            self._try(Pace(drafts=self.pace.drafts))
        elif not self._answers_to_round and self.answers.known(drafted=self.pace.drafts):
            self._due = min(self._due + self._at_once, _AT_ONCE)

    def thought(self, forwards: int, *, drafted: bool) -> None:
        """Learns from an answer with its own text, beside which frames may start; see `waits_for_thought`."""
        before = self._thoughts.get(drafted, float(forwards))
        self._thoughts[drafted] = MEMORY * before + (1 - MEMORY) * forwards

    @property
    def waits_for_thought(self) -> bool:
        """True if a frame should not start beside such an answer."""
        drafts = self.pace.drafts
        answers = self.answers.forwards(others=0, drafted=drafts)
        if not answers or drafts not in self._thoughts:
            return False
        forwards = (round(self._thoughts[drafts]), round(fmean(answers)))
        return waits_for_thought(*forwards, drafts, self.times.seconds)

    def evaluate_next_candidate(self) -> None:
        """Computes the next candidate's age if one is due, relative to the current pace's, and decides after the last.

        The first round has only one frame at a time, so that drafts that do not pay end after few answers.
        """
        if not self._due or self._pinned:
            return
        self._due -= 1
        if not self._round:
            most = 1 if self._first else self._most
            self._round = [pace for pace in self.candidates() if pace != self.pace and pace.in_flight <= most]
            self._best = (1.0, self.pace)
        if self._round:
            pace = self._round.pop()
            # Both now: ages of different moments differ by the device's load.
            share = self._age(pace) / self._age(self.pace)
            self._best = min(self._best, (share, pace), key=lambda each: each[0])
        if not self._round:
            self._decide(*self._best)

    def _age(self, pace: Pace) -> float:
        return expected_age(pace, self.answers, self.times.seconds)

    def _decide(self, share: float, best: Pace) -> None:
        """Ends a round: tries its best pace, waits for another round to confirm it, or rests."""
        better, promised = share < _BETTER, self._promised
        self._promised = better
        if better and promised:
            self._try(best)
        elif not better and not self._first:
            self._answers_to_round, self._at_once = _REST, 1
        self._first = False

    def _try(self, pace: Pace) -> None:
        """Decodes some answers in another pace."""
        self._trial = _Trial(self.pace, self._age(self.pace), self.times, pace)
        self.pace, self.times = pace, self.times.of_next_pace()
        self._round, self._due, self._promised = [], 0, False

    def _judge(self, trial: _Trial) -> None:
        """Compares a tried pace with the one before it: with its age before, then with its age after.

        The device may have changed meanwhile, so that one comparison alone proves nothing. After a failure the next
        trial is later, and the times are as before.
        """
        age_s = self._age(self.pace)
        if self.pace == trial.tried and age_s < trial.before_s:
            trial.tried_s, trial.left = age_s, _TRIED
            self.pace, self.times = trial.before, self.times.of_next_pace()
            return
        self._trial = None
        if kept := trial.tried_s < age_s:
            self.pace, self.times = trial.tried, self.times.of_next_pace()
            self._rest_after_failure, self._at_once = _FIRST_REST, _AT_ONCE
        else:
            self.pace, self.times, self._answers_to_round = trial.before, trial.times, self._rest_after_failure
            self._rest_after_failure = min(2 * self._rest_after_failure, _LONGEST_REST)
        if trial.tried.drafts and not trial.before.drafts:
            self._redraft_after = _PLAIN if kept else 2 * self._redraft_after
