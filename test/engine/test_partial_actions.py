# SPDX-License-Identifier: Apache-2.0
"""The first actions of an answer, handed out while the rest is decoded: they are those of the whole answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import nightly_but

from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.pace import FirstActions, Length
from specvla_ros.engine.settings import MODES, engine_settings_from
from specvla_ros.engine.thread import SharedEngine
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.evaluation.simulate import make_robot, tasks_of
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.target import Target

NAMED = ActionStatistics("", np.linspace(-0.05, -0.02, 7), np.linspace(0.01, 0.05, 7), np.array([True] * 6 + [False]))
CODEC = DigitsCodec(tuple(range(20, 30)), 30, frozenset({40}), NAMED, 3, bins=1000, limit=999)


@cache
def policy(name: str = "digits") -> Target:
    return load_target(bundled_policy(name), device="cpu")


@cache
def seen(seed: int) -> Observation:
    robot = make_robot("table")
    robot.reset(tasks_of("table", ())[0], seed)
    return Observation(robot.look(), robot.instruction, 1)


def frame(stamp_ns: int, *, stream: str = "", epoch: int = 0) -> Observation:
    return replace(seen(stamp_ns), stamp_ns=stamp_ns, stream=stream, epoch=epoch)


def engine_of(target: Target, **settings: Any) -> Engine:
    engine = Engine(target, engine_settings_from(draft_chunk_shift=True, **{"mode": "ar"} | settings))
    engine.takes_partial = True
    return engine


def outcomes_of(engine: Engine, frames: Sequence[Observation], every: int = 9) -> Iterator[Outcome]:
    """An image every few ticks, then what is in flight."""
    for each in frames:
        yield from engine.submit(each)
        for _ in range(every):
            yield from engine.tick()
    while engine.busy:
        yield from engine.tick()


@dataclass(frozen=True)
class BrokenDigits(DigitsCodec):
    """Its answers are found to stand for no action at their end."""

    def problem(self, tokens: Sequence[int]) -> str:
        return "12 numbers instead of 56"


def with_codec(target: Target, codec: type[DigitsCodec], **values: Any) -> Target:
    own = target.codec
    assert isinstance(target, OpenVLATarget) and isinstance(own, DigitsCodec)
    return replace(target, codec=codec(**{field.name: getattr(own, field.name) for field in fields(own)} | values))


@pytest.mark.parametrize("mode", nightly_but(lambda mode: mode in ("ar", "specpipe"), MODES))
def test_first_actions_are_those_of_the_whole_answer(mode: str) -> None:
    plain = Engine(policy(), EngineSettings("ar", streams=2))
    frames = [frame(n, stream=stream) for n in range(1, 3) for stream in ("", "other")]
    begun: dict[tuple[str, int], list[Action]] = {}
    answers = 0
    for outcome in outcomes_of(engine_of(policy(), mode=mode, streams=2), frames):
        of = outcome.observation
        earlier = begun.setdefault((of.stream, of.stamp_ns), [])
        if isinstance(outcome, Action) and outcome.partial:
            assert len(outcome.actions) > (len(earlier[-1].actions) if earlier else 0)
            earlier.append(outcome)
            newest = max(stamp for stream, stamp in begun if stream == of.stream and begun[stream, stamp])
            assert of.stamp_ns == newest, "an older image's actions went out after a newer one's"
        elif isinstance(outcome, Action):
            answers += 1
            whole = plain.act(of)
            assert isinstance(whole, Action) and outcome.tokens == whole.tokens
            np.testing.assert_array_equal(outcome.actions, whole.actions)
            assert earlier and len(earlier[-1].actions) < len(outcome.actions)
            for each in earlier:
                np.testing.assert_array_equal(each.actions, outcome.actions[: len(each.actions)])
                assert each.tokens == outcome.tokens[: len(each.tokens)]
                assert each.record.forwards < outcome.record.forwards
    assert answers > 1


@pytest.mark.parametrize(
    "name, settings, takes",
    [("digits", {"partial_actions": False}, True), ("digits", {"ensemble": 2}, True), ("digits", {}, False)]
    + [(name, {}, True) for name in ("nano", "fast")],
)
def test_nothing_is_handed_out_early_where_it_is_not_asked_for_or_not_exact(name: str, settings, takes: bool) -> None:
    engine = engine_of(policy(name), **settings)
    engine.takes_partial = takes
    found = [*outcomes_of(engine, [replace(policy(name).blank_observation(), stamp_ns=1)])]
    assert len(found) == 1 and not (isinstance(found[0], Action) and found[0].partial)


def test_an_answer_that_breaks_its_grammar_after_its_first_actions_is_dropped_as_such() -> None:
    engine = engine_of(with_codec(policy(), BrokenDigits))
    *begun, last = outcomes_of(engine, [frame(1)])
    assert begun and all(isinstance(each, Action) and each.partial for each in begun)
    assert isinstance(last, Drop) and (last.reason, last.detail) == (DropReason.BROKEN_OFF, "12 numbers instead of 56")
    engine.takes_partial = False
    (only,) = outcomes_of(engine, [frame(2)])
    assert isinstance(only, Drop) and only.reason is DropReason.NOT_AN_ACTION


def test_a_policy_that_breaks_off_at_a_black_image_is_warmed_up() -> None:
    """It knows nothing of such images."""
    engine = engine_of(with_codec(policy(), BrokenDigits))
    engine.warm_up()
    assert engine.warm_up_s > 0


@pytest.mark.parametrize("commit", ["none", "executed"])
def test_of_answers_that_never_end_each_is_told_and_the_next_image_gets_its_turn(commit: str) -> None:
    endless = with_codec(policy(), DigitsCodec, end_ids=frozenset(), limit=64)
    engine = engine_of(endless, mode="auto", commit=commit)
    outcomes = [*outcomes_of(engine, [frame(n) for n in range(1, 4)], every=30)]
    ended = [each for each in outcomes if not (isinstance(each, Action) and each.partial)]
    assert sorted(each.observation.stamp_ns for each in ended) == [1, 2, 3]
    assert {(each.reason, each.detail) for each in ended if isinstance(each, Drop)} == {
        (DropReason.BROKEN_OFF, "the answer has no end token after 64 tokens")
    }
    assert len(outcomes) > len(ended) and not engine.scheduler.requests
    assert engine.cache.free_slots == engine.cache.slots


def test_a_flush_ends_an_answer_whose_first_actions_are_out() -> None:
    engine = engine_of(policy())
    engine.submit(frame(1))
    while not any(isinstance(each, Action) and each.partial for each in engine.tick()):
        pass
    (dropped,) = engine.flush()
    assert dropped.reason is DropReason.EPOCH_CHANGED
    found = [*outcomes_of(engine, [frame(2, epoch=1)])]
    assert {each.observation.stamp_ns for each in found} == {2}


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_the_rest_of_an_answer_is_not_decoded_where_its_actions_last_until_a_newer_images(delay_s: float) -> None:
    plain, engine = Engine(policy(), EngineSettings("ar")), engine_of(policy(), mode="spec", tail="needed")
    engine.tick_time = lambda work, seconds: 0.03  # an action is for 0.2 s
    begun: dict[int, int] = {}  # actions that were handed out, by image
    ticks: dict[int, int] = {}
    first_ticks: list[int] = []
    ended: list[Action] = []
    for stamp in range(1, 200):
        image = replace(frame(stamp), receive_s=delay_s)
        found = [*(engine.submit(image) if engine.has_room else ()), *engine.tick()]
        for request in engine.scheduler.requests:
            ticks[request.observation.stamp_ns] = ticks.get(request.observation.stamp_ns, 0) + 1
        for outcome in found:
            assert isinstance(outcome, Action)
            of = outcome.observation.stamp_ns
            if outcome.partial:
                if of not in begun:
                    first_ticks.append(ticks[of])
                begun[of] = len(outcome.actions)
            else:
                ended.append(outcome)
    assert len(ended) > 10
    for answer in ended:
        whole, rows = plain.act(answer.observation), len(answer.actions)
        assert isinstance(whole, Action)
        np.testing.assert_array_equal(answer.actions, whole.actions[:rows])
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
    early = [each for each in ended if len(each.actions) < 8]
    assert len(early) > 8
    for answer in early[-3:]:
        stamp, rows = answer.observation.stamp_ns, len(answer.actions)
        assert begun[stamp] == rows, "what was handed out is the answer"
        assert rows * 0.2 >= delay_s + 0.03 * (ticks[stamp] + min(first_ticks)), "counted from the stamp"


@pytest.mark.parametrize("tail", ["whole", "needed"])
def test_auto_learns_how_long_first_actions_and_answers_take_with_and_without_drafts(tail: str) -> None:
    plain, engine = Engine(policy(), EngineSettings("ar")), engine_of(policy(), mode="auto", tail=tail)
    engine.tick_time = lambda work, seconds: 0.03
    chooser, codec = engine.scheduler.chooser, policy().codec
    assert chooser is not None and isinstance(codec, DigitsCodec)
    first: dict[int, int] = {}  # forwards until the first actions, by image
    learned = 0
    for stamp in range(1, 60):
        found = [*(engine.submit(frame(stamp)) if engine.has_room else ()), *engine.tick()]
        for outcome in found:
            assert isinstance(outcome, Action)
            if outcome.partial:
                first.setdefault(outcome.observation.stamp_ns, outcome.record.forwards)
                continue
            learned += 1
            whole, rows = plain.act(outcome.observation), len(outcome.actions)
            assert isinstance(whole, Action)
            numbers = [len(codec.completed_numbers(whole.tokens[:count])) for count in range(len(whole.tokens))]
            taken = Length(first[outcome.observation.stamp_ns], outcome.record.forwards)
            needed = 1 if taken.first == taken.whole else rows  # actions, without drafts
            ends = numbers.index(7 * needed) if rows < 8 else len(whole.tokens) + 1  # and the end token
            assert chooser.answers._drafted[0][-1] == taken
            assert chooser.answers._plain[-1] == Length(numbers.index(7), ends)
    assert learned > 1


def test_answers_are_whole_where_no_newer_image_waits_or_nobody_asked() -> None:
    for settings, every in (({"tail": "needed"}, 60), ({}, 1)):
        engine = engine_of(policy(), mode="spec", **settings)
        engine.tick_time = lambda work, seconds: 0.001
        answers = [
            each for each in outcomes_of(engine, [frame(n) for n in (1, 2, 3)], every) if isinstance(each, Action)
        ]
        assert answers and all(len(each.actions) == 8 for each in answers if not each.partial)


def test_actions_last_until_a_newer_images_first_one() -> None:
    first = FirstActions(0.1)
    assert not first.last(8, 0.0), "nothing is known of a first action yet"
    first.add(0.25)
    assert [first.last(count, 0.3) for count in (5, 6)] == [False, True]  # 0.3 + 0.25 s
    assert first.last(5, 0.3, newer_s=0.1) and not first.last(2, 0.3, newer_s=9.0)
    for _ in range(50):
        first.add(0.45)
    assert not first.last(7, 0.3) and first.last(8, 0.3)
    unknown = FirstActions(0.0)
    unknown.add(0.01)
    assert not unknown.last(1000, 0.0), "what an action takes is not known"


@given(st.data())
def test_numbers_that_are_begun_are_those_of_every_answer_that_may_follow(data: st.DataObject) -> None:
    words = st.one_of(st.integers(0, 1000).map(str), st.sampled_from(["007", "1001", "", "99999"]))
    text = " ".join(data.draw(st.lists(words, min_size=1, max_size=25)))
    tokens = [30 if each == " " else 20 + int(each) for each in text]
    if data.draw(st.booleans()):
        tokens.insert(data.draw(st.integers(0, len(tokens))), data.draw(st.sampled_from([7, 40])))
    begun = CODEC.completed_numbers(tokens)
    before = next((i for i, token in enumerate(tokens) if token not in range(20, 31)), len(tokens))
    read = "".join(" " if token == 30 else str(token - 20) for token in tokens[:before]).split(" ")[:-1]
    right = [bool(word) and word == str(int(word)) and int(word) <= 1000 for word in read]
    count = min([*right, False].index(False), 21)
    assert len(begun) == count
    rest = [n for word in [*read[:count], *["500"] * (21 - count)] for n in (*(20 + int(c) for c in word), 30)][:-1]
    assert not CODEC.problem([*rest, 40])
    np.testing.assert_array_equal(CODEC.decode(rest).ravel()[:count], begun)


@pytest.mark.parametrize("tail", ["whole", "needed"])
def test_of_callers_that_share_an_engine_only_those_that_ask_get_first_actions(tail: str) -> None:
    engine = engine_of(policy(), mode="spec", streams=2, tail=tail)
    shared, first = SharedEngine(engine), list[Action]()
    try:
        asking = shared.decode(frame(1, stream="asks"), on_partial=first.append)
        other = shared.decode(frame(1, stream="another"))
        outcomes = [future.result(60).outcome for future in (asking, other)]
    finally:
        shared.stop()
    assert all(isinstance(each, Action) and not each.partial and len(each.actions) == 8 for each in outcomes)
    assert bool(first) == (tail == "whole")
    assert all(each.partial and each.observation.stream == "asks" for each in first)
    assert [len(each.actions) for each in first] == sorted({len(each.actions) for each in first})
