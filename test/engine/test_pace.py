# SPDX-License-Identifier: Apache-2.0
"""Mode auto: the age that a pace is expected to have, the choice of a pace, and tokens that no pace changes."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.draft_heads import policy_with_random_head
from support.nightly import examples, nightly_but
from support.pipelines import PACES

from specvla_ros.engine.batch import TickWork
from specvla_ros.engine.chooser import Chooser, TickTimes
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.pace import (
    Answers,
    Kind,
    Length,
    Pace,
    expected_age,
    expected_left,
    mean_age,
    simulated_age,
    waits_for_thought,
)
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.drafters.registry import DraftWork
from specvla_ros.speculation.settings import DraftSettings, adjusted


@dataclass(frozen=True)
class Costs:
    """What ticks take, in milliseconds."""

    reading: float  # of every forward
    vision: float
    prompt: float  # of all its rows; the forward's reading overlaps with it
    tree: float

    def seconds(self, kind: Kind) -> float:
        rows = self.prompt / kind.spread if kind.spread else 0.0
        forward, vision = max(self.reading, rows + self.tree * kind.trees), kind.begins * self.vision
        return 1e-3 * (vision + forward if kind.spread else max(vision, forward))


SHARED_FOR_NOTHING = Costs(reading=10, vision=1, prompt=6, tree=0.5)
SHARED_AT_FULL_PRICE = Costs(reading=1, vision=5, prompt=40, tree=5)
COSTS = [SHARED_FOR_NOTHING, SHARED_AT_FULL_PRICE, Costs(8, 4, 20, 1), Costs(10, 0, 10, 2)]


def whole(forwards: int) -> Length:
    """Of an answer whose actions are out at its end."""
    return Length(forwards, forwards)


def always(taken: Length) -> Answers:
    answers = Answers()
    for _ in range(20):
        for others in range(3):
            answers.add(taken, Length(4 * taken.first, 4 * taken.whole), others=others, drafted=True)
    return answers


def test_one_frame_at_a_time_has_an_age_of_one_and_a_half_latencies() -> None:
    latency_s = SHARED_AT_FULL_PRICE.seconds(Kind(True, 1, 0, True)) + 4 * SHARED_AT_FULL_PRICE.seconds(
        Kind(False, 0, 1, True)
    )
    assert expected_age(Pace(), always(whole(5)), SHARED_AT_FULL_PRICE.seconds) == pytest.approx(1.5 * latency_s)


def test_two_frames_have_an_age_of_a_latency_and_half_a_period() -> None:
    """Each begins when the one before has two forwards left, the first of which carries the prompt as well."""
    cost = Costs(10, 0, 10, 0)  # every tick takes 10 ms
    latency_s, period_s = 0.05, 0.03
    assert expected_age(Pace(2, 2.0), always(whole(5)), cost.seconds) == pytest.approx(latency_s + period_s / 2)


@pytest.mark.parametrize("pace", [Pace(), Pace(2, 2.0)])
def test_an_image_is_acted_on_from_its_first_actions_on(pace: Pace) -> None:
    """The latency ends with them, and the period with the answer, or with the start of the next frame."""
    cost = Costs(10, 0, 10, 0)
    period_s = 0.05 if pace.in_flight == 1 else 0.03
    assert expected_age(pace, always(Length(2, 5)), cost.seconds) == pytest.approx(0.02 + period_s / 2)


def age_while_thinking(costs: Costs, thought: int, answer: int, *, beside: bool) -> float:
    """One frame at a time, every seventieth with its own text; a tick advances everything that is in flight."""
    now_s, acted = 0.0, list[tuple[float, float]]()
    left = 0  # forwards of the text's answer while another frame's is computed beside it
    for number in range(280):
        begun_s, forwards = now_s, thought if number % 70 == 35 else answer
        if beside and forwards == thought:
            now_s += costs.seconds(Kind(True, 1, 0, True))
            left = thought - 1
            continue
        for tick in range(forwards):
            now_s += costs.seconds(Kind(True, 1, left > 0, True) if not tick else Kind(False, 0, 1 + (left > 0), True))
            left = max(0, left - 1)
        acted.append((now_s, now_s - begun_s))
    return mean_age(acted)


def test_frames_start_beside_a_long_text_and_wait_for_a_short_one() -> None:
    seconds = Costs(reading=8, vision=9, prompt=20, tree=1).seconds
    assert not waits_for_thought(40, 7, True, seconds)
    assert waits_for_thought(4, 2, True, seconds)
    assert not waits_for_thought(4, 2, True, lambda kind: None if kind.begins and kind.trees else seconds(kind))


def searched(costs: Costs, taken: Length, most: int, ticks: int, *, ahead: bool) -> float:
    """The least age of any schedule that repeats itself after at most so many ticks, whole prompts: every one is tried.

    A schedule says of each tick whether a frame is begun in it, and of all, whether their images are `ahead`.
    """
    least = math.inf
    for length in range(1, ticks + 1):
        for begins in itertools.product((False, True), repeat=length):
            if begins[0]:  # elsewhere it is the same schedule, later
                least = min(least, repeated(costs, taken, most, begins, ahead=ahead))
    return least


def repeated(costs: Costs, taken: Length, most: int, begins: tuple[bool, ...], *, ahead: bool) -> float:
    """The age of a schedule in its second half of many repetitions; infinite where too many frames are in flight.

    A frame that begins alone has its images and its prompt in one tick.
    """
    now_s, flights, out = 0.0, list[tuple[float, int]](), list[tuple[float, float]]()  # when begun, forwards done
    for begin in begins * (6 * taken.whole // len(begins) + 6):
        looked = [each for each in flights if not each[1]]  # their prompt is next
        trees = len(flights) - len(looked)
        if len(flights) + begin > most or (begin and looked):
            return math.inf
        if not flights and not begin:
            return math.inf
        looks = begin and ahead and trees > 0
        flights += [(now_s, -1 if looks else 0)] * begin
        now_s += costs.seconds(Kind(begin, int(bool(looked) or (begin and not looks)), trees, True))
        flights = [(begun_s, done + 1) for begun_s, done in flights]
        out += [(now_s, begun_s) for begun_s, done in flights if done == taken.first]
        flights = [each for each in flights if each[1] < taken.whole]
    out = out[len(out) // 2 :]
    spans = [(t, after, b) for (t, b), (after, _) in itertools.pairwise(out)]
    return sum((after - t) * ((t + after) / 2 - b) for t, after, b in spans) / (out[-1][0] - out[0][0])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("taken", "excess"), [(Length(2, 2), 0.02), (Length(5, 5), 0.02), (Length(2, 5), 0.025)])
def test_the_best_pace_is_as_young_as_the_best_of_all_schedules(
    costs: Costs, taken: Length, excess: float, ahead: bool
) -> None:
    """Nearly: where sharing costs nothing and actions come early, a schedule that no pace has is 2.4 % younger."""
    chooser = Chooser(3, (1,), drafts=True, ahead=ahead)
    chooser.answers = always(taken)
    paces = [each for each in chooser.candidates() if each.drafts]
    best = min(expected_age(pace, chooser.answers, costs.seconds) for pace in paces)
    least = min(searched(costs, taken, most=3, ticks=7, ahead=each) for each in {False, ahead})
    assert best <= (1 + excess) * least


def chosen_after(answers: int, costs: Callable[[Kind], float], *, forwards: int, tokens: int) -> Pace:
    """A chooser's pace after so many answers."""
    return chosen(measured(costs), answers, costs, forwards=forwards, tokens=tokens)[-1]


def measured(costs: Callable[[Kind], float], *, ahead: bool = False) -> Chooser:
    """A chooser after configure, where every kind of tick took as long as these costs say."""
    chooser = Chooser(3, (1, 2, 4), drafts=True, ahead=ahead)
    kinds = itertools.product((True, False), (0, 1, 2, 4), range(4), (True, False))
    for kind in itertools.starmap(Kind, kinds):
        chooser.times.add(kind, costs(kind))
    chooser.settle()
    return chooser


def chosen(chooser: Chooser, answers: int, costs: Callable[[Kind], float], *, forwards: int, tokens: int) -> list[Pace]:
    """A chooser's paces after each answer, begun as the pace says, with ticks that take as long as these costs say."""
    paces = []
    for _ in range(answers):
        pace = chooser.pace
        taken, flights = forwards if pace.drafts else tokens, pace.in_flight
        spread = pace.spread if flights > 1 else 1
        ahead = pace.ahead and flights > 1
        kinds = [Kind(not each and not ahead, spread, flights - 1, pace.drafts) for each in range(spread)]
        kinds += [Kind(True, 0, flights - 1, pace.drafts)] * ahead
        for kind in kinds + [Kind(False, 0, flights, pace.drafts)] * (taken - 1):
            chooser.times.add(kind, costs(kind))
            chooser.evaluate_next_candidate()
        chooser.answered(whole(taken), whole(tokens), others=flights - 1, drafted=pace.drafts)
        paces.append(chooser.pace)
    return paces


def test_frames_overlap_where_sharing_costs_nothing_and_do_not_where_it_costs_all() -> None:
    assert chosen_after(110, SHARED_FOR_NOTHING.seconds, forwards=6, tokens=7).in_flight > 1
    assert chosen_after(110, SHARED_AT_FULL_PRICE.seconds, forwards=6, tokens=7) == Pace()


@pytest.mark.parametrize("able", [False, True])
def test_images_are_processed_beside_a_forward_where_that_hides_their_time(able: bool) -> None:
    """Where the device can. Else the next frame would wait: its prompt pays its rows wherever it is."""
    costs = Costs(reading=20, vision=18, prompt=40, tree=0)
    pace = chosen(measured(costs.seconds, ahead=able), 400, costs.seconds, forwards=6, tokens=30)[-1]
    assert (pace.ahead, "images beside the forward before" in str(pace)) == (able, able)


def test_images_are_not_processed_beside_a_forward_that_they_make_longer() -> None:
    def seconds(kind: Kind) -> float:
        return SHARED_AT_FULL_PRICE.seconds(kind) + 0.03 * (kind.begins and not kind.spread)

    assert chosen(measured(seconds, ahead=True), 400, seconds, forwards=6, tokens=30)[-1] == Pace()


@pytest.mark.parametrize(("drafting", "drafts"), [(3.0, False), (1.1, True)])
def test_nothing_is_drafted_where_drafting_costs_more_than_it_saves(drafting: float, drafts: bool) -> None:
    def seconds(kind: Kind) -> float:
        return SHARED_AT_FULL_PRICE.seconds(kind) * (drafting if kind.drafts and not kind.spread else 1.0)

    paces = [pace.drafts for pace in chosen(measured(seconds), 110, seconds, forwards=4, tokens=7)]
    assert paces[40:] == [drafts] * 70, "after eight answers, a trial of plain decoding, and drafting once more"
    assert False in paces[:10] or drafts


def test_what_is_not_drafted_is_tried_again() -> None:
    def seconds(kind: Kind) -> float:
        return 0.001 * (5 if kind.drafts else 1)

    drafted = [pace.drafts for pace in chosen(measured(seconds), 2000, seconds, forwards=4, tokens=7)]
    assert sum(drafted[:40]) < 25 and sum(drafted[40:]) == 2 * 12, "two trials"
    first = drafted.index(True, 40)
    again = drafted.index(True, first + 12)
    assert 400 <= first < 440 and 800 <= again - first < 840


@st.composite
def learnt(draw: st.DrawFn) -> Answers:
    answers = Answers()
    for forwards in draw(st.lists(st.integers(1, 30), min_size=8, max_size=60)):
        others, more = draw(st.integers(0, 2)), draw(st.integers(0, 9))
        first = draw(st.integers(1, forwards))
        taken, plain = Length(first, forwards), Length(first + more * first // forwards, forwards + more)
        answers.add(taken, plain, others=others, drafted=True)
        answers.add(taken, taken, others=0, drafted=True)
    return answers


TIMES = st.builds(Costs, st.floats(0.1, 50), st.floats(0, 50), st.floats(0.1, 200), st.floats(0, 20))


@settings(max_examples=examples(200), deadline=None)
@given(costs=TIMES, thought=st.integers(2, 60), answer=st.integers(1, 8))
def test_a_frame_waits_for_a_thought_where_that_makes_the_image_younger(
    costs: Costs, thought: int, answer: int
) -> None:
    assume(thought > answer)
    waiting, beside = (age_while_thinking(costs, thought, answer, beside=each) for each in (False, True))
    waits = waits_for_thought(thought, answer, True, costs.seconds)
    chosen = waiting if waits else beside
    assert chosen <= 1.001 * min(waiting, beside)


@settings(max_examples=examples(100), deadline=None)
@given(answers=learnt(), costs=TIMES, drafts=st.booleans())
def test_the_age_of_one_frame_at_a_time_is_that_of_its_simulation(answers: Answers, costs: Costs, drafts: bool) -> None:
    pace = Pace(drafts=drafts)
    age_s = expected_age(pace, answers, costs.seconds)
    assert age_s == pytest.approx(simulated_age(pace, answers, costs.seconds), rel=1e-9)


@settings(max_examples=examples(50), deadline=None)
@given(answers=learnt(), costs=TIMES, pace=PACES)
def test_ticks_of_one_kind_are_simulated_together(answers: Answers, costs: Costs, pace: Pace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specvla_ros.engine.pace._alike", lambda *_: 1)
        one_by_one_s = simulated_age(pace, answers, costs.seconds)
    assert simulated_age(pace, answers, costs.seconds) == pytest.approx(one_by_one_s, rel=1e-9)


def test_one_frame_at_a_time_is_timed_by_the_ticks_that_it_needs() -> None:
    first, other = Kind(True, 1, 0, False), Kind(False, 0, 1, False)
    for forwards, known, age_s in [(1, {first: 1.0}, 1.5), (2, {first: 1.0}, math.inf), (1, {other: 1.0}, math.inf)]:
        answers = Answers()
        answers.add(whole(1), whole(forwards), others=0, drafted=False)
        assert expected_age(Pace(drafts=False), answers, known.get) == age_s


@settings(max_examples=examples(20), deadline=None)
@given(costs=TIMES, forwards=st.integers(2, 12), slower=st.floats(0.3, 3))
def test_a_device_whose_ticks_all_become_slower_is_used_as_before(costs: Costs, forwards: int, slower: float) -> None:
    chooser = measured(costs.seconds)
    before = chosen(chooser, 600, costs.seconds, forwards=forwards, tokens=2 * forwards)[-1]
    kinds = [Kind(True, 1, trees, True) for trees in range(3)] + [Kind(False, 0, trees, True) for trees in range(1, 4)]
    paces = chosen(chooser, 600, lambda kind: slower * costs.seconds(kind), forwards=forwards, tokens=2 * forwards)
    assert paces[-1] == before
    assert [chooser.times.seconds(kind) for kind in kinds] == pytest.approx(
        [slower * costs.seconds(kind) for kind in kinds], rel=0.01
    )


def test_a_pace_that_does_not_keep_its_promise_is_left_and_tried_ever_more_rarely() -> None:
    def seconds(kind: Kind) -> float:
        return SHARED_FOR_NOTHING.seconds(kind) * (3 if kind.trees + kind.begins > 1 else 1)

    chooser = measured(SHARED_FOR_NOTHING.seconds)
    paces = chosen(chooser, 4000, seconds, forwards=6, tokens=7)
    tried = [number for number, pace in enumerate(paces) if pace.in_flight > 1]
    starts = [number for number in tried if number - 1 not in tried]
    gaps = [after - number for number, after in itertools.pairwise(starts)]
    assert len(starts) > 3 and len(tried) == 11 * len(starts)
    assert all(after > gap for gap, after in itertools.pairwise(gaps[:-1])) and gaps[-1] > 1000


def test_frames_that_overlap_by_mistake_do_so_for_a_thousand_answers_at_most() -> None:
    """Overlapping costs more than in configure, so that no prediction tells that one frame at a time is better."""

    def seconds(kind: Kind) -> float:
        return SHARED_FOR_NOTHING.seconds(kind) * (3 if kind.trees + kind.begins > 1 else 1)

    chooser = measured(SHARED_FOR_NOTHING.seconds)
    chosen(chooser, 40, seconds, forwards=6, tokens=7)
    chooser.pace, chooser.times = Pace(3), chooser.times.of_next_pace()
    overlapped = [pace.in_flight > 1 for pace in chosen(chooser, 1400, seconds, forwards=6, tokens=7)]
    assert all(overlapped[:980]) and sum(overlapped[1030:]) <= 5 * 11, (
        "then it is tried, and the others ever more rarely"
    )


@pytest.mark.parametrize("seed", range(4))
def test_noise_and_a_changing_load_make_the_image_hardly_older(seed: int) -> None:
    """Ticks that start a frame take longer than in configure, as beside a camera; the mean age is over 500 answers."""
    rng, costs, load = random.Random(seed), Costs(1.3, 3, 4, 0.4), 1.0

    def true(kind: Kind) -> float:
        return costs.seconds(kind) * (1.6 if kind.begins else 1.0)

    def seconds(kind: Kind) -> float:
        nonlocal load
        if rng.random() < 0.003:
            load = rng.choice([1.0, 1.5, 3.0])
        return load * true(kind) * rng.lognormvariate(0, 0.2)

    paces = chosen(measured(costs.seconds), 600, seconds, forwards=7, tokens=8)[100:]
    answers = Answers()
    for _ in range(20):
        answers.add(whole(7), whole(8), others=0, drafted=True)
    ages_s = {pace: expected_age(pace, answers, true) for pace in {*paces, Pace(), Pace(drafts=False)}}
    assert fmean(ages_s[pace] for pace in paces) <= 1.02 * min(ages_s[Pace()], ages_s[Pace(drafts=False)])


def test_a_tick_that_waited_for_another_program_counts_for_twice_its_mean() -> None:
    times, kind = TickTimes(), Kind(False, 0, 1, True)
    for _ in range(20):
        times.add(kind, 0.01)
    times.add(kind, 5.0)
    assert times.seconds(kind) == pytest.approx(0.011)


def test_a_kind_of_tick_that_never_was_takes_no_longer_than_one_with_more_trees() -> None:
    times = TickTimes()
    times.add(Kind(False, 0, 3, True), 0.03)
    assert times.seconds(Kind(False, 0, 2, True)) == 0.03
    assert times.seconds(Kind(False, 0, 4, True)) is None
    assert times.seconds(Kind(True, 0, 2, True)) is None
    times.add(Kind(False, 0, 2, True), 0.02)
    assert times.seconds(Kind(False, 0, 2, True)) == 0.02


@pytest.mark.parametrize(("begun_s", "drafted_s", "plain_s"), [(0.012, 0.03, 0.012), (0.02, 0.011, 0.011)])
def test_neither_larger_trees_nor_a_camera_make_plain_ticks_slower(begun_s: float, drafted_s: float, plain_s: float):
    """Trees of real images are larger than in configure, and ticks that start a frame compete with the camera."""
    times = TickTimes()
    drafted, plain = (Kind(False, 0, 1, drafts) for drafts in (True, False))
    begun, plainly_begun = (Kind(True, 1, 0, drafts) for drafts in (True, False))
    for kind in (drafted, plain, begun, plainly_begun):
        times.add(kind, 0.01)
    times.keep_first()
    for _ in range(50):
        times.add(begun, begun_s)
        times.add(drafted, drafted_s)
    assert times.seconds(drafted) == pytest.approx(drafted_s, rel=0.05)
    assert times.seconds(plainly_begun) == pytest.approx(begun_s, rel=0.05)
    assert times.seconds(plain) == pytest.approx(plain_s, rel=0.05)


def test_a_device_whose_ticks_have_become_slower_is_named_and_chosen_by_as_it_is() -> None:
    chooser = Chooser(3, (1,), drafts=True)
    kind, rare = Kind(False, 0, 1, True), Kind(True, 1, 0, True)
    for each in (kind, rare):
        chooser.times.add(each, 0.02)
    chooser.settle()
    assert str(chooser) == "one frame at a time, drafting"
    chooser.times.add(rare, 9.0)
    for _ in range(29):
        chooser.times.add(kind, 0.04)
    assert str(chooser) == "one frame at a time, drafting", "a few ticks are no sign"
    chooser.times.add(kind, 0.04)
    assert str(chooser).endswith("; ticks take 2 times as long as in configure; the choice uses current times")
    seconds = chooser.times.seconds(kind)
    assert seconds is not None and abs(seconds - 0.04) < 0.002, "it is learnt anew from ticks"
    for _ in range(100):
        chooser.times.add(kind, 0.01)
    assert "0.5 times as long" in str(chooser)


def test_a_kind_of_tick_that_never_was_is_in_no_pace() -> None:
    chooser = Chooser(3, (1,), drafts=False)
    for kind in (Kind(True, 1, 0, False), Kind(False, 0, 1, False)):
        chooser.times.add(kind, 0.01)
    for _ in range(60):
        chooser.answered(whole(7), whole(7), others=0, drafted=False)
        chooser.evaluate_next_candidate()
    assert chooser.pace == Pace(drafts=False)
    assert expected_age(Pace(2, drafts=False), chooser.answers, chooser.times.seconds) == math.inf


def test_a_device_that_grows_hot_is_noticed() -> None:
    times, kind = TickTimes(), Kind(False, 0, 1, True)
    for _ in range(100):
        times.add(kind, 0.01)
    for _ in range(30):
        times.add(kind, 0.02)
    assert times.seconds(kind) == pytest.approx(0.02, rel=0.03)


def test_what_is_left_is_the_mean_of_answers_that_took_more() -> None:
    assert [expected_left([2, 4, 6], done) for done in (0, 2, 5, 9)] == [4.0, 3.0, 1.0, 1.0]


# The engine

DRAFTS = adjusted(DraftSettings(nodes=4, top_k=2, depth=1), temporal=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=5, hidden_size=64, layers=2)


def frame(number: int) -> Observation:
    image = np.random.default_rng(number % 3).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", number)


def sharing_for_nothing(work: TickWork, _: float) -> float:
    return 0.01 + 0.001 * work.images


def at_full_price(work: TickWork, _: float) -> float:
    return 0.001 * (40 * work.prompts + 5 * work.images + 10 * work.trees)


def drafting_is_dear(work: TickWork, _: float) -> float:
    return 0.01 + 0.05 * (work.drafting != DraftWork())


def decoded(engine: Engine, frames: int) -> list[Action]:
    found: list[Action] = []
    number = 0
    while number < frames or engine.busy:
        if number < frames and engine.has_room:
            number += 1
            engine.submit(frame(number))
        found += [each for each in engine.tick() if isinstance(each, Action)]
    return found


@pytest.mark.parametrize(
    ("tick_time", "wanted"),
    nightly_but(
        lambda case: case[0] is not at_full_price,
        [(sharing_for_nothing, "up to "), (at_full_price, "one frame at a time"), (drafting_is_dear, "plain")],
        of_several=True,
    ),
)
def test_whatever_pace_is_chosen_the_tokens_are_the_plain_decoders(
    policy: OpenVLATarget, tick_time: Callable[[TickWork, float], float], wanted: str
) -> None:
    plain = Engine(policy, EngineSettings("ar"))
    expected = {number % 3: action.tokens for number, action in enumerate(decoded(plain, 3), start=1)}
    engine = Engine(policy, EngineSettings("auto", max_in_flight=2, draft=DRAFTS))
    engine.tick_time = tick_time
    engine.warm_up()
    actions = decoded(engine, 75)
    assert len(actions) > 50
    assert all(each.tokens == expected[each.observation.stamp_ns % 3] for each in actions)
    assert max(each.record.in_flight for each in actions) > 1 or tick_time is not sharing_for_nothing
    pace = engine.describe()["decode.pace"]
    assert wanted in pace, pace


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(paces=st.lists(PACES, min_size=2, max_size=4))
def test_a_pace_that_changes_under_way_changes_no_token(policy: OpenVLATarget, paces: list[Pace]) -> None:
    expected = {
        number: action.tokens for number, action in enumerate(decoded(Engine(policy, EngineSettings("ar")), 3), 1)
    }
    engine = Engine(policy, EngineSettings("auto", draft=DRAFTS))
    chooser = engine.scheduler.chooser
    assert chooser is not None
    number = 0
    for pace in itertools.islice(itertools.cycle(paces), 6):
        with chooser.pinned(pace):
            for _ in range(5):
                if engine.has_room:
                    number += 1
                    engine.submit(frame(number))
                for each in engine.tick():
                    if isinstance(each, Action):
                        assert each.tokens == expected[(each.observation.stamp_ns - 1) % 3 + 1]


def test_an_engine_in_use_is_measured_again_and_a_live_switch_says_that_it_was_not(policy: OpenVLATarget) -> None:
    engine = Engine(policy, EngineSettings("ar"))
    engine.warm_up()
    decoded(engine, 2)
    engine.switch(EngineSettings("auto", draft=DRAFTS))
    assert decoded(engine, 2) == [], "older stamps than the last one's"
    assert "measured at the next configure" in engine.describe()["decode.pace"]
    engine.measure_ticks()
    chooser = engine.scheduler.chooser
    assert chooser is not None and chooser.times.seconds(Kind(True, 1, 1, True))
    assert engine.describe()["decode.pace"] == "one frame at a time, drafting"
    assert len(decoded(engine, 2)) == 2


def test_measuring_again_forgets_the_times_of_another_clock(policy: OpenVLATarget) -> None:
    engine = Engine(policy, EngineSettings("auto", draft=DRAFTS))
    chooser = engine.scheduler.chooser
    assert chooser is not None
    for seconds in (1.0, 0.25):
        engine.tick_time = lambda _work, _measured, seconds=seconds: seconds  # type: ignore[misc]
        engine.measure_ticks()
        assert {chooser.times.seconds(Kind(True, 1, trees, True)) for trees in (0, 1)} == {seconds}


def test_a_device_too_slow_to_be_measured_decodes_one_frame_at_a_time(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specvla_ros.engine.engine._MEASURING_S", 0.0)
    engine = Engine(policy, EngineSettings("auto", draft=DRAFTS))
    engine.tick_time = sharing_for_nothing
    engine.warm_up()
    actions = decoded(engine, 40)
    assert {each.record.in_flight for each in actions} == {1}
    assert engine.describe()["decode.pace"] == "one frame at a time, drafting"


def test_with_nothing_to_draft_it_decodes_plainly(tmp_path: Path) -> None:
    policy = policy_with_random_head(tmp_path, seed=5, hidden_size=64, layers=2)
    nothing = replace(DRAFTS, head="none")
    engine = Engine(policy, EngineSettings("auto", draft=adjusted(nothing, temporal=False)))
    assert decoded(engine, 3) and engine.describe()["decode.pace"].startswith("one frame at a time, plain")
    assert engine.describe()["drafts"] == ""


def test_several_robots_share_forwards_one_frame_each(policy: OpenVLATarget) -> None:
    assert EngineSettings("auto", streams=5).slots == 5
    assert EngineSettings("auto").slots == 3
    assert EngineSettings("auto", max_in_flight=2).slots == 2
