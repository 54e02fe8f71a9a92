# SPDX-License-Identifier: Apache-2.0
"""Questions that are answered beside the actions: the plain decoder's answer, and not one action another or later."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.captures import capture_with
from support.checkpoints import edit_json
from support.draft_heads import policy_with_random_head
from support.pipelines import failing_tick
from support.random_qwen_vl import SHAPES, add_vla0, write_qwen_vl
from support.text_models import write_text_model

from specvla_ros.engine import runner as forwards
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Outcome, Question
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.text import TextCodec
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.families.qwen_vl.target import QwenVLTarget
from specvla_ros.models.generation import read_end_ids
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

LONGEST = 12
QUESTION = "is the carrot lifted?"
TREE = adjusted(DraftSettings(nodes=6, top_k=2, depth=3), temporal=True)
LOOKUP = adjusted(DraftSettings(nodes=6), temporal=True, prompt_lookup_tokens=4)
MODES = {
    "ar": EngineSettings(),
    "spec": EngineSettings("spec"),
    "pipeline": EngineSettings("pipeline", max_in_flight=4, prefill_chunks=2),
    "specpipe": EngineSettings("specpipe", prefill_chunks=2),
}


def openvla(directory: Path) -> OpenVLATarget:
    made = policy_with_random_head(directory, seed=5, hidden_size=64, layers=2)
    edit_json(directory / "config.json", lambda raw: raw.update(eos_token_id=2))
    return made


def openvla_that_writes(directory: Path) -> OpenVLATarget:
    made = policy_with_random_head(directory, seed=1, hidden_size=64, layers=2, text=1.2)
    edit_json(directory / "config.json", lambda raw: raw.update(eos_token_id=2))
    return made


def vla0(directory: Path) -> QwenVLTarget:
    target = load_target(add_vla0(write_qwen_vl(directory, SHAPES[1], seed=3, penalty=1.3)), device="cpu")
    assert isinstance(target, QwenVLTarget)
    return target


TARGETS: dict[str, tuple[Callable[[Path], Target], dict[str, object]]] = {
    "openvla": (openvla, {"draft": TREE}),
    "openvla that writes": (openvla_that_writes, {"draft": TREE, "max_reasoning_tokens": 24}),
    "vla0": (vla0, {"draft": LOOKUP, "max_text_tokens": 400}),
}


@pytest.fixture(scope="module", params=TARGETS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, dict[str, object]]:
    make, chosen = TARGETS[request.param]
    return make(tmp_path_factory.mktemp("policy")), chosen


def frame(target: Target, stamp_ns: int) -> Observation:
    generator = np.random.default_rng(stamp_ns)
    images = {name: generator.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in target.cameras}
    return Observation(images, "put carrot on plate", stamp_ns)


def plain_answer(target: Target, observation: Observation, chosen: dict[str, object]) -> list[int]:
    """What plain decoding makes of the question's prompt, computed as a whole."""
    codec = TextCodec(read_end_ids(target.directory), vocab_size=1 << 20)
    if isinstance(target, OpenVLATarget):
        asked: Target = replace(target, codec=codec, prompt=replace(target.prompt, trailing_id=None))
        ids = target.prompt.question_ids(QUESTION)
    else:
        assert isinstance(target, QwenVLTarget)
        free = replace(target.policy.generation, allowed_ids=())
        asked = replace(target, policy=replace(target.policy, codec=codec, generation=free))
        ids = target.prompt_ids(QUESTION)
    rows = {name: value for name, value in chosen.items() if name == "max_text_tokens"}
    engine = Engine(asked, EngineSettings(max_reasoning_tokens=LONGEST, **rows))  # type: ignore[arg-type]
    action = engine.act(replace(observation, prompt_ids=ids))
    assert isinstance(action, Action)
    return list(codec.text_tokens(action.tokens))


def drive(engine: Engine, *, frames: int, ask_at: int = 0) -> tuple[list[Outcome], Question, int]:
    """A frame every other tick, a question before one of them, and ticks until nothing is left; their number too."""
    ended: list[Outcome] = []
    question = Question(QUESTION)
    for n in range(1, frames + 1):
        if n == ask_at:
            engine.ask(question)
        ended += engine.submit(frame(engine.target, n))
        ended += engine.tick() + engine.tick()
    until_acted = 2 * frames
    while engine.busy:
        until_acted += engine.in_flight > 0 or engine.mailbox.waiting
        ended += engine.tick()
    return ended, question, until_acted


def essence(outcome: Outcome) -> tuple[int, object, object]:
    if isinstance(outcome, Action):
        return outcome.observation.stamp_ns, outcome.tokens, outcome.record.tokens_per_forward
    return outcome.observation.stamp_ns, outcome.reason, outcome.detail


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ask_at", [1, 4])
def test_the_answer_is_the_plain_decoders_and_no_action_is_another_or_later(
    made: tuple[Target, dict[str, object]], mode: str, ask_at: int
) -> None:
    target, chosen = made
    without = Engine(target, replace(MODES[mode], **chosen))  # type: ignore[arg-type]
    expected, _, ticks = drive(without, frames=7)
    engine = Engine(target, replace(MODES[mode], ask_tokens=LONGEST, **chosen))  # type: ignore[arg-type]
    for store in (engine.cache.keys, engine.cache.values):
        store.fill_(torch.nan)
    ended, question, with_question = drive(engine, frames=7, ask_at=ask_at)
    assert [essence(each) for each in ended] == [essence(each) for each in expected]
    assert with_question == ticks
    assert question.done and not question.problem and question.observation is not None
    assert question.tokens == plain_answer(target, question.observation, chosen)
    engine.reset()
    _, second, _ = drive(engine, frames=3, ask_at=2)
    assert second.observation is not None
    assert second.tokens == plain_answer(target, second.observation, chosen)


def test_a_question_never_has_more_rows_of_a_forward_than_a_tree(made: tuple[Target, dict[str, object]]) -> None:
    target, chosen = made
    engine = Engine(target, replace(MODES["spec"], ask_tokens=LONGEST, **chosen))  # type: ignore[arg-type]
    rows: list[int] = []
    run = engine.runner.forwards

    def counting(segments):  # type: ignore[no-untyped-def]
        rows.extend(len(each) for each in segments if each.slot == engine.settings.slots)
        return run(segments)

    engine.runner.forwards = counting  # type: ignore[assignment]
    drive(engine, frames=4, ask_at=1)
    assert rows and max(rows) <= TREE.nodes


def test_captured_forwards_have_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = openvla(tmp_path)
    chosen = replace(MODES["specpipe"], ask_tokens=LONGEST, draft=TREE)
    expected, question, _ = drive(Engine(target, chosen), frames=6, ask_at=2)
    capture_with(monkeypatch)
    engine = Engine(target, chosen)
    engine.warm_up()

    def fail(*_: object) -> None:
        raise AssertionError("not captured")

    monkeypatch.setattr(forwards, "packed_forward", fail)
    ended, captured, _ = drive(engine, frames=6, ask_at=2)
    assert [essence(each) for each in ended] == [essence(each) for each in expected]
    assert captured.tokens == question.tokens and not captured.problem


def test_relaxed_actions_beside_a_question(tmp_path: Path) -> None:
    target = openvla(tmp_path)
    relaxed = AcceptanceSettings("bin_distance", bins=(40,))
    chosen = replace(MODES["specpipe"], draft=TREE, acceptance=relaxed)
    expected, _, _ = drive(Engine(target, chosen), frames=6)
    ended, question, _ = drive(Engine(target, replace(chosen, ask_tokens=LONGEST)), frames=6, ask_at=2)
    assert [essence(each) for each in ended] == [essence(each) for each in expected]
    assert question.observation is not None
    assert question.tokens == plain_answer(target, question.observation, {}), "an answer is never relaxed"


def test_what_ends_a_question_without_an_answer(tmp_path: Path) -> None:
    target = openvla(tmp_path)
    engine = Engine(target, EngineSettings(ask_tokens=LONGEST))
    for ends, why in (
        (lambda asked: setattr(asked, "cancelled", True), "cancelled"),
        (lambda _: failing_tick(engine), "fell off the bus"),
        (lambda _: engine.switch(replace(engine.settings, mode="spec", draft=TREE)), "decoding was changed"),
    ):
        engine.reset()
        question = Question(QUESTION)
        engine.ask(question)
        with pytest.raises(UserError, match="another question"):
            engine.ask(Question("what else?"))
        assert not engine.busy, "it waits for a frame"
        engine.submit(frame(target, 1))
        engine.tick()
        ends(question)
        engine.tick()
        assert question.done and why in question.problem
        while engine.busy:
            engine.tick()
    engine.ask(Question(QUESTION))


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    target = openvla(tmp_path / "openvla")
    with pytest.raises(UserError, match=r"set decode\.ask_tokens"):
        Engine(target, EngineSettings()).ask(Question(QUESTION))
    engine = Engine(target, EngineSettings(ask_tokens=4, max_text_tokens=20))
    for text, why in (("  ", "empty"), ("</s> what?", "special"), ("why " * 9, "shorten it")):
        with pytest.raises(UserError, match=why):
            engine.ask(Question(text))
    text_model = load_target(write_text_model(tmp_path / "text"), device="cpu")
    with pytest.raises(UserError, match="answers no questions about images"):
        Engine(text_model, EngineSettings(ask_tokens=4, max_reasoning_tokens=4))
    edit_json(tmp_path / "openvla" / "config.json", lambda raw: raw.update(eos_token_id=None))
    with pytest.raises(UserError, match="does not say which token ends an answer"):
        Engine(target, EngineSettings(ask_tokens=4))
