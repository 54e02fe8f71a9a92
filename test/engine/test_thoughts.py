# SPDX-License-Identifier: Apache-2.0
"""Thinking less often than acting: newer images are given exactly the last thought, and never that of another task."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.draft_heads import policy_with_random_head
from support.nightly import examples
from support.pipelines import PICTURES, frame, poisoned
from support.plain_decoding import answer_of

from specvla_ros import Engine, EngineSettings, UserError
from specvla_ros.engine.chooser import Chooser
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.settings import DraftSettings, adjusted

LONGEST_TEXT = 24
TREE = adjusted(DraftSettings(nodes=8, top_k=3, depth=3), temporal=True)
EVERY_NS = 5  # a frame's stamp is its number in nanoseconds
BASE = EngineSettings("ar", max_reasoning_tokens=LONGEST_TEXT, think_every_s=EVERY_NS * 1e-9, draft=TREE)
MODES = ("ar", "spec", "pipeline", "specpipe", "auto")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return policy_with_random_head(tmp_path_factory.mktemp("writer"), seed=1, hidden_size=64, layers=2, text=1.2)


class Plain:
    """Plain decoding's answers by picture and given text, each computed once."""

    def __init__(self, policy: OpenVLATarget) -> None:
        self.codec = policy.codec.with_text(LONGEST_TEXT)

        @cache
        def tokens(picture: int, text: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(answer_of(policy, self.codec, replace(frame(1, picture), answer_ids=text)))

        self.tokens = tokens

    def text(self, picture: int) -> tuple[int, ...]:
        return self.codec.text_tokens(self.tokens(picture, ()))

    def thinks(self, picture: int) -> bool:
        """True if the picture's own answer is an action after a text."""
        return not self.codec.problem(self.tokens(picture, ())) and bool(self.text(picture))


@pytest.fixture(scope="module")
def plain(policy: OpenVLATarget) -> Plain:
    return Plain(policy)


def run(engine: Engine, frames: Sequence[Observation], gaps: Sequence[int]) -> list[Outcome]:
    """Each frame after as many ticks."""
    ended: list[Outcome] = []
    for observation, gap in zip(frames, gaps, strict=True):
        for _ in range(gap):
            ended += engine.tick()
        ended += engine.submit(observation)
    while engine.busy:
        ended += engine.tick()
    return ended


def check(ended: Sequence[Outcome], frames: Sequence[Observation], pictures: Sequence[int], plain: Plain) -> int:
    """Checks that every answer is plain decoding's after its given thought; returns how many were given one."""
    assert sorted(each.observation.stamp_ns for each in ended) == [each.stamp_ns for each in frames]
    actions = [each for each in ended if isinstance(each, Action)]
    stamps = [action.observation.stamp_ns for action in actions]
    assert stamps == sorted(stamps), "actions leave in the order of their frames"
    given_one = 0
    for action in actions:
        seen, picture = action.observation, pictures[action.observation.stamp_ns - 1]
        thought: tuple[int, ...] = ()
        if action.text_ns != seen.stamp_ns:
            given_one += 1
            thought, of = plain.text(pictures[action.text_ns - 1]), frames[action.text_ns - 1]
            assert (of.epoch, of.instruction) == (seen.epoch, seen.instruction)
        whole = plain.tokens(picture, thought)
        assert action.text_tokens == plain.codec.text_tokens(whole)
        assert action.tokens == plain.codec.action_tokens(whole)
        assert action.text_tokens[: len(thought)] == thought
        assert sum(action.record.tokens_per_forward) == len(whole) - len(thought)
    return given_one


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mode=st.sampled_from(MODES),
    in_order=st.booleans(),
    chunks=st.integers(1, 2),
    pictures=st.lists(st.integers(0, PICTURES - 1), min_size=12, max_size=12),
    gaps=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    epochs=st.sampled_from([(12, 12), (4, 8)]),
)
def test_answers_are_plain_decodings_after_the_given_thought(
    policy: OpenVLATarget,
    plain: Plain,
    mode: str,
    in_order: bool,
    chunks: int,
    pictures: list[int],
    gaps: list[int],
    epochs: tuple[int, int],
) -> None:
    engine = poisoned(policy, replace(BASE, mode=mode, in_order=in_order, prefill_chunks=chunks))
    frames = [frame(i + 1, picture, epoch=sum(i >= at for at in epochs)) for i, picture in enumerate(pictures)]
    check(run(engine, frames, gaps), frames, pictures, plain)
    assert engine.cache.free_slots == engine.cache.slots


def act(engine: Engine, *frames: Observation) -> list[Outcome]:
    return [engine.act(each) for each in frames]


def test_one_at_a_time_the_thought_is_renewed_when_it_is_old(policy: OpenVLATarget, plain: Plain) -> None:
    pictures = [next(i for i in range(PICTURES) if plain.thinks(i))] * 12
    ended = act(Engine(policy, BASE), *(frame(i + 1, picture) for i, picture in enumerate(pictures)))
    assert all(isinstance(each, Action) for each in ended)
    assert [each.text_ns for each in ended if isinstance(each, Action)] == [1] * 5 + [6] * 5 + [11] * 2


@pytest.mark.parametrize("change", ["epoch", "instruction", "reset", "close", "switch"])
def test_another_task_begins_with_a_thought_of_its_own(policy: OpenVLATarget, plain: Plain, change: str) -> None:
    engine, picture = Engine(policy, BASE), next(i for i in range(PICTURES) if plain.thinks(i))
    act(engine, frame(1, picture))
    seen = frame(2, picture)
    if change == "epoch":
        seen = replace(seen, epoch=2)
    elif change == "instruction":
        seen = replace(seen, instruction="lift the cup")
    elif change == "reset":
        engine.reset()
    elif change == "close":
        engine.close("")
    else:
        engine.switch(replace(BASE, mode="spec"))
    own = engine.act(seen)
    assert not isinstance(own, Action) or own.text_ns == 2


def test_a_broken_answer_voids_the_thought(policy: OpenVLATarget, plain: Plain) -> None:
    good = next(i for i in range(PICTURES) if plain.thinks(i))
    engine = Engine(policy, BASE)
    act(engine, frame(1, good))
    broken = replace(frame(2, good), answer_ids=(3,) * (LONGEST_TEXT + 1))
    assert isinstance(engine.act(broken), Drop)
    after = engine.act(frame(3, good))
    assert isinstance(after, Action) and after.text_ns == 3


@pytest.mark.parametrize("mode", ["pipeline", "specpipe", "auto"])
def test_newer_images_are_acted_on_while_the_next_thought_is_written(
    policy: OpenVLATarget, plain: Plain, mode: str
) -> None:
    lengths = {len(plain.text(i)): i for i in range(PICTURES) if plain.thinks(i)}
    picture = lengths[max(lengths)]
    engine = Engine(policy, replace(BASE, mode=mode, draft=replace(TREE, nodes=2)))
    first = engine.act(frame(1, picture))
    assert isinstance(first, Action)
    ended: list[Outcome] = []
    for stamp in range(EVERY_NS + 1, EVERY_NS + 60):
        ended += engine.submit(frame(stamp, picture))
        ended += engine.tick()
    while engine.busy:
        ended += engine.tick()
    thought = {each.observation.stamp_ns: each.text_ns for each in ended if isinstance(each, Action)}
    assert len(thought) > 10
    late = [each for each in ended if isinstance(each, Drop) and each.reason is DropReason.OVERTAKEN]
    renewed = {*thought.values()} - {1}
    assert renewed <= {each.observation.stamp_ns for each in late} | {*thought}
    assert any(stamp not in thought for stamp in renewed), "a thought came after a newer image's action"
    assert {*thought.values()} >= {1}, "meanwhile the old one was given"


def test_mode_auto_starts_no_frame_beside_a_thought_worth_waiting_for(
    policy: OpenVLATarget, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chooser, "waits_for_thought", property(lambda chooser: True))
    picture = next(i for i in range(PICTURES) if plain.thinks(i))
    engine = Engine(policy, replace(BASE, mode="auto", think_every_s=20e-9, draft=replace(TREE, nodes=2)))
    ended: list[Outcome] = []
    for stamp in range(1, 120):
        ended += engine.submit(frame(stamp, picture))
        ended += engine.tick()
        assert len(engine.scheduler.requests) <= 1
    actions = [each for each in ended if isinstance(each, Action)]
    renewed = [each for each in actions if each.text_ns == each.observation.stamp_ns]
    assert len(renewed) > 3 and len(actions) > len(renewed)
    assert not any(each.reason is DropReason.OVERTAKEN for each in ended if isinstance(each, Drop))


def test_a_policy_that_does_not_write_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    silent = policy_with_random_head(tmp_path_factory.mktemp("silent"), seed=5, hidden_size=64, layers=2)
    with pytest.raises(UserError, match=r"think_every_s is for policies that write text .*max_reasoning_tokens is 0"):
        Engine(silent, EngineSettings("ar", think_every_s=1.0))
