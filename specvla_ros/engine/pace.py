# SPDX-License-Identifier: Apache-2.0
"""Mode auto: chooses when to start the next frame and whether to draft, to minimize the age of the image acted on.

This age is the mean over time of now minus the stamp of the image that the robot acts on. One frame at a time has
latency L and period L, hence an age of 1.5 L. A frame started while another is in flight shares its forwards: periods
become shorter and latencies longer. Which effect dominates depends on the cost of a forward on this device and on the
number of forwards per answer. Both are measured while the engine decodes.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean, median

_FRAMES = 24  # simulated per pace
_ANSWERS = 48  # latest answers whose forwards are replayed in the simulation
_NEEDED = 8  # min answers before their statistics are used
_MEMORY = 0.9  # decay of running means: about the last ten values
# The pace changes if another's age is below this share of the current one's twice in a row; at first, once.
_BETTER = 0.97
_UNSETTLED = 4  # candidates simulated per answer until a round changes nothing; then one
_MOST_TREES = 8  # max trees in a kind of tick
_OFTEN = 30  # min ticks of a kind before its mean is compared with the first
_DRIFTED = 1.25  # report tick times that changed by more than this factor since configure, either way
_PLAIN = 400  # plainly decoded answers after which drafting is tried again


@dataclass(frozen=True)
class Pace:
    """A schedule for the successive requests of one robot."""

    in_flight: int = 1  # max requests
    left: float = math.inf  # the next frame starts once the newest is expected to need at most this many forwards
    spread: int = 1  # forwards per prompt while other requests are in flight
    drafts: bool = True

    def __str__(self) -> str:
        how = "drafting" if self.drafts else "plain"
        if self.in_flight == 1:
            return f"one frame at a time, {how}"
        begun = f", the next started {self.left:g} forwards before the end" if math.isfinite(self.left) else ""
        spread = f", prompts over {self.spread} forwards" if self.spread > 1 else ""
        return f"up to {self.in_flight} frames{begun}{spread}, {how}"


@dataclass(frozen=True)
class Kind:
    """A class of ticks with about the same cost."""

    begins: bool  # runs the vision towers on an image
    spread: int  # forwards over which its prompt is spread; 0 without a prompt
    trees: int  # requests past their prompt
    drafts: bool


class TickTimes:
    """The running mean time of each kind of tick, so that thermal throttling is noticed."""

    def __init__(self) -> None:
        self._mean_s: dict[Kind, float] = {}
        self._seen: dict[Kind, int] = {}
        self._first_s: dict[Kind, float] = {}  # as measured in configure

    def add(self, kind: Kind, seconds: float) -> None:
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        known_s = self._mean_s.get(kind, seconds)
        share = 1 - _MEMORY if kind in self._first_s else max(1 / seen, 1 - _MEMORY)
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


class Answers:
    """The number of forwards of the latest answers, by the number of requests in flight at their start.

    A frame started while others are in flight is drafted from an older answer and takes more forwards.
    """

    def __init__(self) -> None:
        self._drafted: dict[int, deque[int]] = {}  # by the number of requests in flight at the start
        self._plain: deque[int] = deque(maxlen=_ANSWERS)

    def add(self, forwards: int, tokens: int, *, others: int, drafted: bool) -> None:
        """Records an answer; `forwards`: verifying ones; `tokens`: also the number of forwards without drafts."""
        self._plain.append(tokens)
        if drafted:
            self._drafted.setdefault(others, deque(maxlen=_ANSWERS)).append(forwards)

    def forwards(self, *, others: int, drafted: bool) -> Sequence[int]:
        """Forwards of the latest answers started with `others` in flight, or fewer if that is not known yet.

        A copy: other threads also check whether a frame may start.
        """
        if not drafted:
            return tuple(self._plain)
        known = [each for each in [*self._drafted] if each <= others and len(self._drafted[each]) >= _NEEDED]
        return tuple(self._drafted[max(known)]) if known else ()

    def known(self, *, drafted: bool) -> bool:
        return len(self.forwards(others=0, drafted=drafted)) >= _NEEDED

    def forget_drafted(self) -> None:
        self._drafted = {}


def expected_left(forwards: Sequence[int], done: int) -> float:
    """Mean number of forwards left after `done` forwards, over the answers that took more than that; 1 if none did."""
    more = [each - done for each in forwards if each > done]
    return fmean(more) if more else 1.0


@dataclass
class _Played:
    """A simulated request."""

    begun_s: float
    others: int
    takes: int  # verifying forwards, including the one that ends the prompt
    chunks: int  # prompt chunks left
    done: int = 0


def expected_age(pace: Pace, answers: Answers, seconds: Callable[[Kind], float | None]) -> float:
    """Mean age in seconds of the image acted on if a new image always waits; infinite if a tick time is unknown.

    Simulates the pace with the forwards of the latest answers in turn. Answer i ends at t_i, its image was started at
    b_i, and it is acted on until t_(i+1):

        age = sum_i (t_(i+1) - t_i) ((t_i + t_(i+1)) / 2 - b_i)  /  sum_i (t_(i+1) - t_i)

    An overtaken frame gives no action. The age of an image at its start adds equally to all paces.

    Args:
        seconds: mean time of a kind of tick.
    """
    seconds = cache(seconds)
    now_s, begun, flights = 0.0, 0, list[_Played]()
    out: list[tuple[float, float]] = []  # t_i, b_i
    while len(out) <= _FRAMES:
        begins = may_begin(pace, answers, [(each.others, each.done, each.chunks > 0) for each in flights])
        if begins:
            takes = answers.forwards(others=len(flights), drafted=pace.drafts)
            spread = pace.spread if flights else 1
            flights.append(_Played(now_s, len(flights), takes[begun % len(takes)], spread))
            begun += 1
        newest = flights[-1]
        spread = pace.spread if newest.others else 1
        trees = sum(not each.chunks for each in flights)
        tick_s = seconds(Kind(begins, spread if newest.chunks else 0, trees, pace.drafts))
        if tick_s is None:
            return math.inf
        now_s += tick_s
        for each in flights:
            each.chunks = max(0, each.chunks - 1)
            each.done += not each.chunks
        ended = [each for each in flights if each.done >= each.takes]
        if ended:
            out.append((now_s, ended[-1].begun_s))
            flights = flights[flights.index(ended[-1]) + 1 :]
    return mean_age([(t, t - b) for t, b in out])


def mean_age(acted: Sequence[tuple[float, float]]) -> float:
    """Mean over time of the age of the image that a robot acts on, seconds, from the first action to the last.

    Args:
        acted: time of each action and the age of its image then, ascending; the result is NaN for fewer than two.
    """
    spans = [(until - since, age) for (since, age), (until, _) in pairwise(acted)]
    whole = sum(span for span, _ in spans)
    return sum(span * (age + span / 2) for span, age in spans) / whole if whole else float("nan")


def may_begin(pace: Pace, answers: Answers, in_flight: Sequence[tuple[int, int, bool]]) -> bool:
    """True if the newest frame should start now.

    Args:
        in_flight: for each request, oldest first: the number of others at its start, the number of forwards that have
            verified its answer, and whether it is still prefilling.
    """
    if not in_flight:
        return True
    others, done, prefilling = in_flight[-1]
    if prefilling or len(in_flight) >= pace.in_flight:
        return False
    if math.isinf(pace.left):
        return True
    return expected_left(answers.forwards(others=others, drafted=pace.drafts), done) <= pace.left


class FirstActions:
    """Decides whether the rest of an answer is needed once k of its actions are published.

    Action i of an answer is for the time up to i dt after its image. A newer image started now yields its first action
    after about F. Until then, the robot does not run out of actions if

        k dt >= age of the image + F.

    A device that decodes an action more slowly than the robot executes it never satisfies this and decodes whole
    answers.

    Args:
        step_s: dt, the duration of an action; 0 if unknown, and the whole answer is decoded.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.mean_s = 0.0  # F, over about the last ten answers

    def add(self, seconds: float) -> None:
        """Records the time from an answer's start to its first actions."""
        self.mean_s = _MEMORY * self.mean_s + (1 - _MEMORY) * seconds if self.mean_s else seconds

    def last(self, actions: int, age_s: float, *, newer_s: float = 0.0) -> bool:
        """True if the published actions last until a newer image's; `newer_s`: time since that image was started."""
        return self.mean_s > 0 and actions * self._step_s >= age_s + max(0.0, self.mean_s - newer_s)


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
