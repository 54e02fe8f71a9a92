# SPDX-License-Identifier: Apache-2.0
"""The pace of decoding in mode auto, and the age of the image acted on that it is expected to have.

This age is the mean over time of now minus the stamp of the image that the robot acts on. One frame at a time has
latency L and period L, hence an age of 1.5 L; less if the first actions of an answer are out before its end. A frame
started while another is in flight shares its forwards: periods become shorter and latencies longer. Which effect
dominates depends on the cost of a forward on this device and on the number of forwards per answer. `chooser.py`
measures both while the engine decodes.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, cycle, islice, pairwise
from statistics import fmean

_FRAMES = 24  # answers per pace that count
_ANSWERS = 48  # latest answers whose forwards are replayed in the simulation
_NEEDED = 8  # min answers before their statistics are used
MEMORY = 0.9  # decay of running means: about the last ten values


@dataclass(frozen=True)
class Pace:
    """A schedule for the successive requests of one robot."""

    in_flight: int = 1  # max requests
    max_forwards_left: float = math.inf  # expected of the newest frame when the next one starts
    spread: int = 1  # forwards per prompt while other requests are in flight
    drafts: bool = True
    ahead: bool = False  # the towers process its images beside a forward of others, in the tick before its prompt

    def __str__(self) -> str:
        how = "drafting" if self.drafts else "plain"
        if self.in_flight == 1:
            return f"one frame at a time, {how}"
        left = self.max_forwards_left
        begun = f", the next started {left:g} forwards before the end" if math.isfinite(left) else ""
        spread = f", prompts over {self.spread} forwards" if self.spread > 1 else ""
        ahead = ", images beside the forward before" if self.ahead else ""
        return f"up to {self.in_flight} frames{begun}{ahead}{spread}, {how}"


@dataclass(frozen=True)
class Kind:
    """A class of ticks with about the same cost."""

    begins: bool  # runs the vision towers on an image, beside the forward if it has no prompt
    spread: int  # forwards over which the prompt in it is spread; 0 without a prompt
    trees: int  # requests past their prompt
    drafts: bool


@dataclass(frozen=True)
class Length:
    """An answer's length, in forwards."""

    first: int  # until its first actions were out
    whole: int  # until a newer frame replaced it, or until its end


class Answers:
    """The lengths of the latest answers, by the number of requests in flight when their prompts started.

    A frame whose prompt starts while others are in flight is drafted from an older answer and takes more forwards.
    """

    def __init__(self) -> None:
        self._drafted: dict[int, deque[Length]] = {}  # by the number of others
        self._plain: deque[Length] = deque(maxlen=_ANSWERS)
        self._left: dict[tuple[int, int, bool], float] = {}  # by the arguments of `left`, until the next answer

    def add(self, taken: Length, plain: Length, *, others: int, drafted: bool) -> None:
        """Records an answer; `taken`: in verifying forwards; `plain`: without drafts, in tokens."""
        self._plain.append(plain)
        if drafted:
            self._drafted.setdefault(others, deque(maxlen=_ANSWERS)).append(taken)
        self._left = {}

    def lengths(self, *, others: int, drafted: bool) -> Sequence[Length]:
        """The lengths of the latest answers started with `others` in flight, or fewer if that is not known yet.

        A copy: other threads also check whether a frame may start.
        """
        if not drafted:
            return tuple(self._plain)
        known = [each for each in [*self._drafted] if each <= others and len(self._drafted[each]) >= _NEEDED]
        return tuple(self._drafted[max(known)]) if known else ()

    def forwards(self, *, others: int, drafted: bool) -> Sequence[int]:
        """`lengths` of whole answers."""
        return tuple(each.whole for each in self.lengths(others=others, drafted=drafted))

    def left(self, done: int, *, others: int, drafted: bool) -> float:
        """Expected number of forwards left of an answer after `done`."""
        left, key = self._left, (done, others, drafted)
        if key not in left:
            left[key] = expected_left(self.forwards(others=others, drafted=drafted), done)
        return left[key]

    def known(self, *, drafted: bool) -> bool:
        return len(self.forwards(others=0, drafted=drafted)) >= _NEEDED

    def forget_drafted(self) -> None:
        self._drafted, self._left = {}, {}


def expected_left(forwards: Sequence[int], done: int) -> float:
    """Mean number of forwards left after `done` forwards, over the answers that took more than that; 1 if none did."""
    more = [each - done for each in forwards if each > done]
    return fmean(more) if more else 1.0


def expected_age(pace: Pace, answers: Answers, seconds: Callable[[Kind], float | None]) -> float:
    """Mean age in seconds of the image acted on if a new image always waits; infinite if a tick time is unknown.

    The latest answers are decoded in turn, each in its number of forwards. The first actions of answer i are out at
    t_i, its image was started at b_i, and it is acted on until t_(i+1):

        age = sum_i (t_(i+1) - t_i) ((t_i + t_(i+1)) / 2 - b_i)  /  sum_i (t_(i+1) - t_i)

    One frame at a time starts each when the one before ends. The first forward of each has the prompt. Other paces are
    simulated. The age of an image at its start adds equally to all paces.

    Args:
        seconds: mean time of a kind of tick.
    """
    if pace.in_flight > 1:
        return simulated_age(pace, answers, seconds)
    takes = [*islice(cycle(answers.lengths(others=0, drafted=pace.drafts)), _FRAMES + 1)]
    first_s, other_s = seconds(Kind(True, 1, 0, pace.drafts)), seconds(Kind(False, 0, 1, pace.drafts))
    if first_s is None or (other_s is None and max(each.whole for each in takes) > 1):
        return math.inf

    def after_s(forwards: int) -> float:
        return first_s + (forwards - 1) * (other_s or 0.0)

    begun_s = accumulate((after_s(each.whole) for each in takes), initial=0.0)
    latencies_s = [after_s(each.first) for each in takes]
    return mean_age([(begun + latency, latency) for begun, latency in zip(begun_s, latencies_s, strict=False)])


@dataclass
class _Played:
    """A simulated request."""

    begun_s: float
    spread: int  # prompt chunks
    chunks: int  # those left, and one while its images are processed ahead of them
    others: int = 0
    takes: Length = Length(1, 1)  # in verifying forwards, including the one that ends the prompt
    done: int = 0

    @property
    def next(self) -> int:
        """Forwards until its first actions are out, or until its end."""
        return (self.takes.whole if self.done >= self.takes.first else self.takes.first) - self.done


def simulated_age(pace: Pace, answers: Answers, seconds: Callable[[Kind], float | None]) -> float:
    """`expected_age` of any pace, tick by tick. An overtaken frame gives no action."""
    seconds, lengths = cache(seconds), cache(partial(answers.lengths, drafted=pace.drafts))
    now_s, begun, flights = 0.0, 0, list[_Played]()
    acted_s = -1.0  # start of the newest image that was acted on
    out: list[tuple[float, float]] = []  # t_i, and the age of its image then
    while len(out) <= _FRAMES:
        newest = flights[-1] if flights else None
        begins = newest is None or may_begin(
            pace, answers, len(flights), (newest.others, newest.done, newest.chunks > 0)
        )
        trees = sum(not each.chunks for each in flights)
        if newest is None or begins:
            spread, ahead = (pace.spread, pace.ahead) if flights else (1, False)
            newest = _Played(now_s, spread, spread + ahead)
            flights.append(newest)
            begun += 1
        if newest.chunks == newest.spread:  # its prompt starts
            newest.others = len(flights) - 1
            takes = lengths(others=newest.others)
            newest.takes = takes[(begun - 1) % len(takes)]
        has_rows = 0 < newest.chunks <= newest.spread
        tick_s = seconds(Kind(begins, newest.spread if has_rows else 0, trees, pace.drafts))
        if tick_s is None:
            return math.inf
        ticks = 1 if newest.chunks else _alike(pace, answers, flights)
        now_s += ticks * tick_s
        for each in flights:
            each.chunks = max(0, each.chunks - 1)
            each.done += ticks * (not each.chunks)
        acted = [each.begun_s for each in flights if each.done >= each.takes.first and each.begun_s > acted_s]
        if acted:
            acted_s = acted[-1]
            out.append((now_s, now_s - acted_s))
        ended = [each for each in flights if each.done >= each.takes.whole]
        if ended:
            flights = flights[flights.index(ended[-1]) + 1 :]
    return mean_age(out)


def _alike(pace: Pace, answers: Answers, flights: Sequence[_Played]) -> int:
    """Ticks, all of one kind, until first actions are out, an answer ends, or the next frame may start.

    None of `flights` is prefilling.
    """
    ends, newest = min(each.next for each in flights), flights[-1]
    if len(flights) >= pace.in_flight:
        return ends
    left = partial(answers.left, others=newest.others, drafted=pace.drafts)
    return next((ticks for ticks in range(1, ends) if left(newest.done + ticks) <= pace.max_forwards_left), ends)


def mean_age(acted: Sequence[tuple[float, float]]) -> float:
    """Mean over time of the age of the image that a robot acts on, seconds, from the first action to the last.

    Args:
        acted: time of each action and the age of its image then, ascending; the result is NaN for fewer than two.
    """
    spans = [(until - since, age) for (since, age), (until, _) in pairwise(acted)]
    whole = sum(span for span, _ in spans)
    return sum(span * (age + span / 2) for span, age in spans) / whole if whole else float("nan")


def may_begin(pace: Pace, answers: Answers, in_flight: int, newest: tuple[int, int, bool]) -> bool:
    """True if the newest frame should start now, while `in_flight` requests of its robot are in flight, at least one.

    Args:
        newest: of the newest request, the number of others at its prompt's start, the number of forwards that have
            verified its answer, and whether it is still prefilling.
    """
    others, done, prefilling = newest
    if prefilling or in_flight >= pace.in_flight:
        return False
    most = pace.max_forwards_left
    return math.isinf(most) or answers.left(done, others=others, drafted=pace.drafts) <= most


def waits_for_thought(thought: int, answer: int, drafts: bool, seconds: Callable[[Kind], float | None]) -> bool:
    """True if the next frame should wait for an answer with its own text (decode.think_every_s).

    One frame at a time has latency S and age 1.5 S. The text's answer disturbs this: waiting for it takes W once, and
    its action is W old; beside it, the next frames start after its prompt, and each takes longer until it is complete.
    The way with the smaller excess over the steady age wins. With l_i the latency of the i-th action from then on, and
    d_i the time since the action before it,

        excess = sum_i d_i (l_(i-1) + d_i / 2 - 1.5 S),    l_0 = S.

    Args:
        thought, answer: verifying forwards of an answer with its own text, and of one with a given text; at least 1.
        seconds: mean time of a kind of tick; the next frame does not wait if one is unknown.
    """
    kinds = (Kind(True, 1, 0, drafts), Kind(False, 0, 1, drafts), Kind(True, 1, 1, drafts), Kind(False, 0, 2, drafts))
    times = [seconds(kind) for kind in kinds]
    if None in times:
        return False
    first, other, first_beside, other_beside = (each or 0.0 for each in times)
    steady_s, own_s = (first + (forwards - 1) * other for forwards in (answer, thought))

    def excess(actions: Sequence[tuple[float, float]]) -> float:
        ages = [steady_s, *(latency for _, latency in actions)]
        intervals = [*(since for since, _ in actions), steady_s]
        return sum(d * (age + d / 2 - 1.5 * steady_s) for d, age in zip(intervals, ages, strict=True))

    beside, waited = list[tuple[float, float]](), first
    for left in range(thought - 1, 0, -answer):
        shared = min(left, answer)
        latency = first_beside + (shared - 1) * other_beside + (answer - shared) * other
        beside.append((waited + latency, latency))
        waited = 0.0
    return excess([(own_s, own_s)]) < excess(beside)


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
        self.mean_s = MEMORY * self.mean_s + (1 - MEMORY) * seconds if self.mean_s else seconds

    def last(self, actions: int, age_s: float, *, newer_s: float = 0.0) -> bool:
        """True if the published actions last until a newer image's; `newer_s`: time since that image was started."""
        return self.mean_s > 0 and actions * self._step_s >= age_s + max(0.0, self.mean_s - newer_s)
