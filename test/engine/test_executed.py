# SPDX-License-Identifier: Apache-2.0
"""Continuing the motion: an answer is given exactly the actions of the one before that the robot executes meanwhile."""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.nightly import examples

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.evaluation.simulate import make_robot, tasks_of
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.target import Target

DIMS, HORIZON, DT_S = 7, 8, 0.2
MODES = ("spec", "pipeline", "specpipe", "auto")


@cache
def policy(name: str = "digits") -> Target:
    return load_target(bundled_policy(name), device="cpu")


def other_codec(codec: type[DigitsCodec] = DigitsCodec, **values: Any) -> Target:
    target = policy()
    own = target.codec
    assert isinstance(target, OpenVLATarget) and isinstance(own, DigitsCodec)
    return replace(target, codec=codec(**{each.name: getattr(own, each.name) for each in fields(own)} | values))


@cache
def seen(picture: int) -> Observation:
    robot = make_robot("table")
    robot.reset(tasks_of("table", ())[0], picture)
    return Observation(robot.look(), robot.instruction, 1)


def frame(stamp_s: float, picture: int = 0, *, epoch: int = 0) -> Observation:
    return replace(seen(picture), stamp_ns=1 + round(stamp_s * 1e9), epoch=epoch)


def engine_of(target: Target, *, tick_s: float = 0.03, **settings: Any) -> Engine:
    engine = Engine(
        target, engine_settings_from(draft_chunk_shift=True, commit="executed", **{"mode": "spec"} | settings)
    )
    engine.takes_partial, engine.tick_time = True, lambda work, seconds: tick_s
    return engine


@cache
def plain(picture: int, start: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens of strict decoding after a given start."""
    engine = Engine(policy(), engine_settings_from(mode="spec", draft_chunk_shift=True))
    action = engine.act(replace(frame(0.0, picture), answer_ids=start))
    assert isinstance(action, Action)
    return action.tokens


def rows_of(tokens: tuple[int, ...], *, whole: bool) -> list[tuple[int, ...]]:
    """The tokens of each complete action, with the space after each number; `whole`: the last number is complete."""
    codec = policy().codec
    assert isinstance(codec, DigitsCodec)
    numbers, number = [], list[int]()
    for token in (*tokens, codec.space_id) if whole else tokens:
        number.append(token)
        if token == codec.space_id:
            numbers.append(tuple(number))
            number = []
    return [sum(numbers[at : at + DIMS], ()) for at in range(0, len(numbers) - DIMS + 1, DIMS)]


class Model:
    """What each answer must start with, by the answers that came before it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.published: tuple[Observation, list[tuple[int, ...]]] | None = None
        self.starts: dict[int, tuple[int, ...]] = {}  # by stamp

    def tick(self) -> list[Outcome]:
        """A tick, before which the start of an answer that begins in it is worked out."""
        scheduler = self.engine.scheduler
        executed = int(scheduler.age_at_first_actions_s(frame(0.0)) / DT_S + 1e-9)
        before = [(each.observation, rows_of(tuple(each.tokens), whole=False)) for each in scheduler.requests]
        outcomes = self.engine.tick()
        answered = [each.observation for each in outcomes if isinstance(each, Action)]  # some within this one tick
        for seen in [*(request.observation for request in scheduler.requests), *answered]:
            if seen.stamp_ns not in self.starts:
                self.starts[seen.stamp_ns] = self.expected(seen, before, executed)
        for outcome in outcomes:
            if isinstance(outcome, Action):
                self.published = outcome.observation, rows_of(outcome.tokens, whole=not outcome.partial)
        return outcomes

    def expected(
        self, seen: Observation, before: list[tuple[Observation, list[tuple[int, ...]]]], executed: int
    ) -> tuple[int, ...]:
        of_epoch = [each for each in before if each[0].epoch == seen.epoch]
        last = of_epoch[-1] if of_epoch else self.published
        if last is None or last[0].epoch != seen.epoch:
            return ()
        passed = round((seen.stamp_ns - last[0].stamp_ns) * 1e-9 / DT_S)
        return sum(last[1][passed : passed + min(executed, HORIZON - 1)], ())


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mode=st.sampled_from(MODES),
    tick_s=st.sampled_from([0.03, 0.07, 0.2]),
    pictures=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    steps=st.lists(st.sampled_from([0.05, 0.2, 0.45]), min_size=6, max_size=6),
    gaps=st.lists(st.integers(1, 14), min_size=6, max_size=6),
    second_epoch=st.sampled_from([4, 6]),
)
def test_an_answer_starts_with_the_actions_that_are_executed_and_goes_on_as_strict_decoding(
    mode: str, tick_s: float, pictures: list[int], steps: list[float], gaps: list[int], second_epoch: int
) -> None:
    engine = engine_of(policy(), mode=mode, tick_s=tick_s, prefill_chunks=2 if "pipe" in mode else 1)
    model, outcomes, stamp_s = Model(engine), list[Outcome](), 0.0
    picture_of: dict[int, int] = {}
    for number, (picture, step, gap) in enumerate(zip(pictures, steps, gaps, strict=True)):
        stamp_s += step
        seen = frame(stamp_s, picture, epoch=int(number >= second_epoch))
        picture_of[seen.stamp_ns] = picture
        outcomes += engine.submit(seen)
        for _ in range(gap):
            outcomes += model.tick()
    while engine.busy:
        outcomes += model.tick()
    for outcome in [each for each in outcomes if isinstance(each, Action)]:
        start = model.starts[outcome.observation.stamp_ns]
        assert outcome.given == len(rows_of(start, whole=False)) < len(outcome.actions)
        whole = plain(picture_of[outcome.observation.stamp_ns], start)
        assert outcome.tokens == whole[: len(outcome.tokens)]
        assert len(outcome.tokens) <= len(whole) if outcome.partial else outcome.tokens == whole
        if not outcome.partial:
            assert sum(outcome.record.tokens_per_forward) == len(whole) + 1 - len(start)
    assert engine.cache.free_slots == engine.cache.slots


def answers_in_turn(engine: Engine, tick_s: float, count: int) -> Iterator[tuple[Action, float]]:
    """The first publications of answers to the newest image, each with the age of its image then."""
    now_s = 0.0
    for _ in range(count):
        begun_s = now_s
        engine.submit(frame(begun_s))
        first = True
        while engine.busy:
            now_s += tick_s
            for outcome in engine.tick():
                assert isinstance(outcome, Action)
                if first:
                    yield outcome, now_s - begun_s
                first = False


def test_the_given_actions_are_those_that_the_driver_has_executed_when_the_first_own_one_is_out() -> None:
    tick_s = 0.052
    found = [*answers_in_turn(engine_of(policy(), tick_s=tick_s), tick_s, 5)]
    for number, (action, age_s) in enumerate(found):
        due_s = (np.arange(len(action.actions)) + 1) * DT_S  # as ActionFollower passes over what is due
        executed = int((due_s <= age_s).sum())
        assert executed and action.given == (executed if number else 0)
        assert len(action.actions) == action.given + 1, "it goes out with its first own action"


def test_an_answer_that_is_not_an_action_is_not_continued() -> None:
    class Broken(DigitsCodec):
        def problem(self, tokens: Any) -> str:
            return "12 numbers instead of 56"

    engine = engine_of(other_codec(Broken), tick_s=0.1)
    for stamp_s in (0.0, 0.2):
        *begun, last = list(outcomes_of(engine, frame(stamp_s)))
        assert begun and isinstance(last, Drop) and last.reason is DropReason.BROKEN_OFF
        assert all(isinstance(each, Action) and not each.given for each in begun)


def outcomes_of(engine: Engine, observation: Observation) -> Iterator[Outcome]:
    yield from engine.submit(observation)
    while engine.busy:
        yield from engine.tick()


def test_each_of_several_robots_goes_on_with_its_own_actions() -> None:
    engine = engine_of(policy(), tick_s=0.1, streams=2)
    before: dict[str, tuple[int, ...]] = {}
    for stamp_s in (0.0, 0.2):
        for picture, name in enumerate(("left", "right")):
            action = engine.act(replace(frame(stamp_s, picture), stream=name))
            assert isinstance(action, Action)
            if name in before:
                start = sum(rows_of(before[name], whole=True)[1 : 1 + action.given], ())
                assert action.given and action.tokens[: len(start)] == start
            before[name] = action.tokens
    assert before["left"] != before["right"]


@pytest.mark.parametrize("change", ["nothing", "epoch", "instruction", "reset", "close", "switch", "own start"])
def test_another_task_is_not_begun_with_the_actions_of_the_last(change: str) -> None:
    engine = engine_of(policy(), tick_s=0.1)
    engine.act(frame(0.0))
    second = frame(0.2)
    if change == "epoch":
        second = replace(second, epoch=2)
    elif change == "instruction":
        second = replace(second, instruction="lift the green cube")
    elif change == "reset":
        engine.reset()
    elif change == "close":
        engine.close("")
    elif change == "switch":
        engine.switch(replace(engine.settings, mode="ar"))
    elif change == "own start":
        second = replace(second, answer_ids=plain(0, ())[:5])
    action = engine.act(second)
    assert isinstance(action, Action) and bool(action.given) == (change == "nothing")


def test_an_answer_that_is_over_is_not_continued() -> None:
    engine = engine_of(policy(), tick_s=0.1)
    engine.act(frame(0.0))
    late, later = engine.act(frame(7 * DT_S)), engine.act(frame(7 * DT_S + HORIZON * DT_S))
    assert isinstance(late, Action) and late.given == 1, "only what the answer before has"
    assert isinstance(later, Action) and later.given == 0


def test_the_age_of_the_image_counts_where_the_clock_of_its_stamp_is_known() -> None:
    engine = Engine(policy(), engine_settings_from(mode="spec", draft_chunk_shift=True, commit="executed"), lambda: now)
    engine.tick_time = lambda work, seconds: 0.0
    now = frame(0.0).stamp_ns
    engine.act(frame(0.0))
    now = frame(0.2 + 3.5 * DT_S).stamp_ns  # taken 3.5 actions after the second image
    second = engine.act(frame(0.2))
    assert isinstance(second, Action) and second.given == 3


def test_first_actions_that_are_too_old_go_out_no_more_than_whole_answers_and_are_not_continued() -> None:
    now_ns = frame(0.0).stamp_ns
    settings = engine_settings_from(mode="spec", draft_chunk_shift=True, commit="executed", max_image_age_s=1.0)
    engine = Engine(policy(), settings, lambda: now_ns)
    engine.takes_partial, engine.tick_time = True, lambda work, seconds: 0.1
    engine.submit(frame(0.0))
    engine.tick()
    now_ns = frame(3.0).stamp_ns  # the process was suspended, say
    late: list[Outcome] = []
    while engine.busy:
        late += engine.tick()
    assert [each.reason for each in late if isinstance(each, Drop)] == [DropReason.TOO_OLD] and len(late) == 1
    now_ns = frame(0.9).stamp_ns  # or its clock was set for a moment
    second = engine.act(frame(0.2))
    assert isinstance(second, Action) and second.given == 0


@pytest.mark.parametrize("mode", ["spec", "auto"])
def test_what_an_answer_of_the_warm_up_took_is_not_expected_of_the_first_real_ones(mode: str) -> None:
    """The first ticks on a device take seconds; as many actions would be given to each of the first answers."""

    class Warmed(OpenVLATarget):
        def blank_observation(self) -> Observation:
            return seen(1)  # as a policy that answers a black image with a whole chunk

    own = policy()
    target = Warmed(**{each.name: getattr(own, each.name) for each in fields(own)})  # type: ignore[arg-type]
    engine = engine_of(target, mode=mode, tick_s=5.0)
    engine.warm_up()
    assert engine.scheduler.age_at_first_actions_s(frame(0.0)) == 0.0
    engine.tick_time = lambda work, seconds: 0.0
    answers = [engine.act(frame(stamp_s)) for stamp_s in (0.0, 0.2, 0.4)]
    assert [isinstance(each, Action) and each.given for each in answers] == [0, 0, 0]


@pytest.mark.parametrize(
    "target, values, message",
    [
        ("nano", {}, "decode.commit is for answers of several actions, and this policy's have one"),
        ("fast", {}, "each token of this policy stands for all actions of a chunk: leave decode.commit at none"),
        ("digits", {"ensemble": 2}, "decode.ensemble averages actions"),
        ("no step", {}, "needs the duration of an action, which the checkpoint does not give: set decode.chunk_step_s"),
        ("prefix", {}, "attends bidirectionally, so the start of an answer cannot be given: leave decode.commit"),
    ],
)
def test_a_policy_that_cannot_be_continued_is_refused(target: str, values: dict[str, Any], message: str) -> None:
    class Prefix(OpenVLATarget):
        causal_prompt = False

    if target == "no step":
        wanted = other_codec(dt_s=None)
    elif target == "prefix":
        own = policy()
        assert isinstance(own, OpenVLATarget)
        wanted = Prefix(**{each.name: getattr(own, each.name) for each in fields(own)})
    else:
        wanted = policy(target)
    with pytest.raises(UserError, match=message):
        Engine(wanted, EngineSettings("ar", commit="executed", **values))
