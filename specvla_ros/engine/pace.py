# SPDX-License-Identifier: Apache-2.0
"""Mode auto: when the next frame is begun and whether it is drafted, so that the image acted on is youngest.

The age that counts is the mean over time of now minus the stamp of the image that the robot acts on. One frame at a
time has a latency L and a period as long, so an age of 1.5 L. A frame that is begun while another is in flight shares
its forwards: periods become shorter, and each latency longer. Which of the two weighs more depends on what a forward
costs on this device and on how many an answer takes. Both are measured while the engine decodes.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean, median

_FRAMES = 24  # that a pace is played for
_ANSWERS = 48  # of the last ones whose forwards are played
_NEEDED = 8  # answers before they are relied on
_MEMORY = 0.9  # of the mean time of a kind of tick: about the last ten
_BETTER = 0.97  # an age below this share of the present pace's, twice in a row, changes the pace
_UNSETTLED = 4  # candidates played per answer until a round of them changes nothing; then one
_MOST_TREES = 8  # of a kind of tick
_OFTEN = 30  # ticks of a kind, after which its mean is told from the first
_DRIFTED = 1.25  # a device whose ticks take so many times as long as in configure, or so many times less, is named
_PLAIN = 400  # answers decoded plainly, after which drafting is tried again


@dataclass(frozen=True)
class Pace:
    """How the requests of a robot follow each other."""

    in_flight: int = 1  # at most
    left: float = math.inf  # forwards that the newest request may still take, as expected, when the next is begun
    spread: int = 1  # forwards over which a prompt is spread that begins beside others
    drafts: bool = True  # whether its answers are drafted

    def __str__(self) -> str:
        how = "drafting" if self.drafts else "plain"
        if self.in_flight == 1:
            return f"one frame at a time, {how}"
        begun = f", the next begun {self.left:g} forwards before the end" if math.isfinite(self.left) else ""
        spread = f", prompts over {self.spread} forwards" if self.spread > 1 else ""
        return f"up to {self.in_flight} frames{begun}{spread}, {how}"


@dataclass(frozen=True)
class Kind:
    """A kind of tick, of about the same cost."""

    begins: bool  # an image goes through the vision towers
    spread: int  # forwards over which the prompt in it is spread; 0: no prompt
    trees: int  # requests whose prompt is through
    drafts: bool


class TickTimes:
    """The mean time of each kind of tick, learnt from ticks: a device that grows hot is noticed."""

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
        """What is known now is what `drift` compares with."""
        self._first_s, self._seen = dict(self._mean_s), {}

    @property
    def drift(self) -> float:
        """How many times as long as at first ticks take by now: the median over the kinds that came often since."""
        # A copy: diagnostics ask from another thread.
        often = [kind for kind, seen in [*self._seen.items()] if seen >= _OFTEN and kind in self._first_s]
        return median(self._mean_s[kind] / self._first_s[kind] for kind in often) if often else 1.0

    def seconds(self, kind: Kind) -> float | None:
        """Of a kind that never was, those of one with more trees, which takes no less.

        None where there is none: a pace that needs it is not chosen.
        """
        more = (replace(kind, trees=trees) for trees in range(kind.trees, _MOST_TREES + 1))
        return next((self._mean_s[each] for each in more if each in self._mean_s), None)


class Answers:
    """How many forwards the last answers took, by how they were begun.

    A frame that is begun while others are in flight is drafted from an older answer, and takes more.
    """

    def __init__(self) -> None:
        self._drafted: dict[int, deque[int]] = {}  # by the number of requests in flight when it was begun
        self._plain: deque[int] = deque(maxlen=_ANSWERS)

    def add(self, forwards: int, tokens: int, *, others: int, drafted: bool) -> None:
        """`forwards` that verified; `tokens`: of the answer, each of which takes one forward without drafts."""
        self._plain.append(tokens)
        if drafted:
            self._drafted.setdefault(others, deque(maxlen=_ANSWERS)).append(forwards)

    def forwards(self, *, others: int, drafted: bool) -> Sequence[int]:
        """Those of the last answers that were begun beside so many others; not known yet: beside fewer.

        A copy: other threads ask, too, whether a frame may begin.
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
    """Mean number of forwards that an answer still takes after `done`, of those that took more; 1 where none did."""
    more = [each - done for each in forwards if each > done]
    return fmean(more) if more else 1.0


@dataclass
class _Played:
    """A request while a pace is played."""

    begun_s: float
    others: int
    takes: int  # forwards that verify, the prompt's end among them
    chunks: int  # of its prompt that are left
    done: int = 0


def expected_age(pace: Pace, answers: Answers, seconds: Callable[[Kind], float | None]) -> float:
    """Mean age in seconds of the image acted on, a new image always waiting; infinite where a tick's time is unknown.

    The pace is played with the last answers' numbers of forwards, in turn. Answer i is out at t_i, of an image begun
    at b_i, and is acted on until t_(i+1):

        age = sum_i (t_(i+1) - t_i) ((t_i + t_(i+1)) / 2 - b_i)  /  sum_i (t_(i+1) - t_i)

    A frame that a newer one overtakes gives no action. How old an image is when it is begun adds to all paces alike.

    Args:
        seconds: of a kind of tick.
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
        acted: of each action, ascending, the second at which it came and how old its image was then; NaN for fewer than
            two.
    """
    spans = [(until - since, age) for (since, age), (until, _) in pairwise(acted)]
    whole = sum(span for span, _ in spans)
    return sum(span * (age + span / 2) for span, age in spans) / whole if whole else float("nan")


def may_begin(pace: Pace, answers: Answers, in_flight: Sequence[tuple[int, int, bool]]) -> bool:
    """Whether the newest frame is begun now.

    Args:
        in_flight: of each request, oldest first: how many others there were when it was begun, how many forwards have
            verified its answer, and whether its prompt is not through.
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
    """Tells whether the rest of an answer is needed, of which k actions are published.

    Action i of an answer is for the time up to i dt after its image. A newer image that is begun now has its first
    action out after about F. The robot does not run out of actions meanwhile if

        k dt >= age of the image + F.

    A device that takes longer to decode an action than the robot to execute it never gets there: it decodes whole
    answers.

    Args:
        step_s: dt, what an action takes; 0: unknown, and all is needed.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._mean_s = 0.0  # F, of about the last ten answers

    def add(self, seconds: float) -> None:
        """An answer's first actions are out, so many seconds after it was begun."""
        self._mean_s = _MEMORY * self._mean_s + (1 - _MEMORY) * seconds if self._mean_s else seconds

    def last(self, actions: int, age_s: float, *, newer_s: float = 0.0) -> bool:
        """Whether actions that are published last until a newer image's; `newer_s`: since that was begun."""
        return self._mean_s > 0 and actions * self._step_s >= age_s + max(0.0, self._mean_s - newer_s)


class Chooser:
    """Chooses a pace by its expected age, and keeps to it while no other is clearly better.

    Candidates are played one by one, while the device computes a forward.

    Args:
        most: frames of the robot in flight.
        spreads: forwards over which a prompt may be spread.
        drafts: whether anything can draft.

    Attributes:
        pace: from now on.
        measured: whether every kind of tick was timed; otherwise only what happened by itself is chosen among.
    """

    def __init__(self, most: int, spreads: Sequence[int], *, drafts: bool) -> None:
        self.pace = Pace(drafts=drafts)
        self.times, self.answers = TickTimes(), Answers()
        self.measured = False
        self._most, self._spreads, self._can_draft = most, tuple(spreads), drafts
        self._ages: dict[Pace, float] = {}  # of this round
        self._round: list[Pace] = []  # candidates that are left in it
        self._better: Pace | None = None  # that was best in the round before
        self._due = 0  # candidates to be played
        self._settled = False  # whether the last round changed nothing
        self._plain = 0  # answers since something was drafted
        self._pinned = False

    def every_kind(self) -> list[Pace]:
        """Paces that between them have every kind of tick, for a device whose times are not known."""
        drafts = (True, False) if self._can_draft else (False,)
        more = [Pace(self._most, spread=spread, drafts=each) for each in drafts for spread in self._spreads]
        return [Pace(drafts=each) for each in drafts] + (more if self._most > 1 else [])

    def __str__(self) -> str:
        if not self.measured:
            return f"{self.pace}; times of others are measured at the next configure"
        drift = self.times.drift
        if 1 / _DRIFTED < drift < _DRIFTED:
            return str(self.pace)
        return f"{self.pace}; ticks take {drift:.2g} times as long as in configure, and are chosen by as they are now"

    def settle(self) -> None:
        """Every kind of tick was timed."""
        self.measured = True
        self.times.keep_first()

    @contextmanager
    def pinned(self, pace: Pace) -> Iterator[None]:
        """Meanwhile this pace is kept, and nothing is learnt but the times of ticks."""
        kept, self.pace, self._pinned = self.pace, pace, True
        try:
            yield
        finally:
            self.pace, self._pinned = kept, False

    def candidates(self) -> list[Pace]:
        """One frame at a time, and more with each moment to begin the next and each spread of a prompt.

        Of drafting and plain decoding, all of what the present pace does, and the ends of the other.
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
        """Learns from an answer, and has more candidates played."""
        if self._pinned:
            return
        self.answers.add(forwards, tokens, others=others, drafted=drafted)
        self._plain = 0 if drafted else self._plain + 1
        if self._plain >= _PLAIN and self._can_draft:
            self._try_drafting()
        elif self.answers.known(drafted=self.pace.drafts):
            self._due = min(self._due + (1 if self._settled else _UNSETTLED), _UNSETTLED)

    def play(self) -> None:
        """Plays the next candidate if one is due, and chooses when all of a round were played."""
        if not self._due or self._pinned:
            return
        self._due -= 1
        if not self._round:
            self._ages, self._round = {}, [pace for pace in self.candidates() if pace != self.pace]
        if self._round:
            pace = self._round.pop()
            self._ages[pace] = expected_age(pace, self.answers, self.times.seconds)
        if not self._round:
            self._choose()

    def _try_drafting(self) -> None:
        """What drafts were worth may have changed since nothing is drafted."""
        self.answers.forget_drafted()
        self.pace, self._plain, self._ages, self._round, self._better = Pace(), 0, {}, [], None
        self._due, self._settled = 0, False

    def _choose(self) -> None:
        best = min(self._ages, key=self._ages.__getitem__, default=self.pace)
        now = expected_age(self.pace, self.answers, self.times.seconds)
        self._settled = best == self.pace or not self._ages[best] < _BETTER * now
        if self._settled:
            self._better = None
        elif self._better is not None:
            self.pace, self._better = best, None
        else:
            self._better = best
