# SPDX-License-Identifier: Apache-2.0
"""Strict speculation gives the plain decoder's answers: every kind of policy, with every drafter, in every mode.

What does not go together is refused, and stands here: a pair that is neither decoded nor listed fails.
"""

import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.checkpoints import load_openvla, with_sensors
from support.draft_heads import policy_with_random_head, write_random_head
from support.draft_models import FOLDER, with_model, write_draft_model
from support.nightly import nightly_but
from support.paths import ORACLES
from support.plain_decoding import answer_of
from support.random_checkpoint import write_random_checkpoint
from support.random_chunks import any_chunks
from support.random_qwen_vl import FAST_IDS, SHAPES, add_nora, add_vla0, write_qwen_vl

from benchmarks.papers.text_target import TextCodec
from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.batch import TickWork
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.pace import Pace
from specvla_ros.lab.evaluation.frame_sources import collect_answers
from specvla_ros.lab.training.artifacts import save_answers
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.families.pi0_fast.target import Pi0FastTarget
from specvla_ros.models.families.qwen_vl.target import QwenVLTarget
from specvla_ros.models.target import Target
from specvla_ros.speculation.drafters.chunk_shift import ANSWERS_FILE
from specvla_ros.speculation.settings import DraftSettings, adjusted

FRAMES = 4
NODES = 12


@dataclass(frozen=True)
class Kind:
    """A kind of policy, and how it is decoded."""

    make: Callable[[Path], Target]
    settings: EngineSettings = field(default_factory=lambda: EngineSettings("ar"))


def _bins(directory: Path) -> Target:
    return policy_with_random_head(directory, seed=3, hidden_size=64, layers=2)


def _text(directory: Path) -> Target:
    return policy_with_random_head(directory, seed=1, hidden_size=64, layers=2, text=1.2)


def _sensors(directory: Path) -> Target:
    write_random_checkpoint(directory, seed=5, hidden_size=64, layers=2)
    return load_openvla(with_sensors(directory), device="cpu")


def _chunks(codec: str) -> Callable[[Path], Target]:
    def make(directory: Path) -> Target:
        return any_chunks(directory, codec)

    return make


def _qwen(directory: Path) -> Target:
    """Whatever its answers stand for."""
    target = load_target(directory, device="cpu")
    assert isinstance(target, QwenVLTarget)
    codec = TextCodec(target.codec.end_ids, target.decoder.config.vocab_size)  # type: ignore[attr-defined]
    return replace(target, policy=replace(target.policy, codec=codec))


def _nora(directory: Path) -> Target:
    return _qwen(add_nora(write_qwen_vl(directory, SHAPES[0], seed=0, actions=FAST_IDS)))


def _vla0(directory: Path) -> Target:
    return _qwen(add_vla0(write_qwen_vl(directory, SHAPES[1], seed=8, penalty=5.0)))


def _oracle(directory: Path, name: str) -> Path:
    """A copy of one that is shared, to write into."""
    if not (ORACLES / name).exists():
        pytest.skip(f"{ORACLES / name} is not here")
    shutil.copytree(ORACLES / name, directory / name, copy_function=shutil.copyfile)
    for path in (directory / name).rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory / name / "checkpoint"


def _pi0_fast(directory: Path) -> Target:
    """Whatever its answers stand for: they break its grammar."""
    target = load_target(_oracle(directory, "pi0fast_tiny_a"), device="cpu")
    assert isinstance(target, Pi0FastTarget)
    return replace(target, codec=TextCodec(frozenset({1}), target.decoder.config.vocab_size))


def _minivla(directory: Path) -> Target:
    return load_target(_oracle(directory, "minivla_tiny_a"), device="cpu")


_WRITES = EngineSettings("ar", max_reasoning_tokens=24)
_QWEN = EngineSettings("ar", max_reasoning_tokens=24, max_text_tokens=400)
KINDS = {
    "bins": Kind(_bins),
    "text, then bins": Kind(_text, _WRITES),
    "three cameras and a state": Kind(_sensors),
    "chunks in FAST tokens": Kind(_chunks("fast")),
    "chunks in digits": Kind(_chunks("digits")),
    "nora": Kind(_nora, _QWEN),
    "vla-0": Kind(_vla0, _QWEN),
    "pi0-fast": Kind(_pi0_fast, _WRITES),
    "minivla": Kind(_minivla),
}
NONE = DraftSettings(nodes=NODES, head="none")
PARALLEL = "parallel-draft"  # a head that drafts all levels at once, in the target's directory
DRAFTS = {
    "head": DraftSettings(nodes=NODES, top_k=3, depth=4),
    "head, window mass": DraftSettings(nodes=NODES, top_k=3, depth=4, children="window_mass"),
    "parallel head": DraftSettings(nodes=NODES, top_k=3, depth=4, head=PARALLEL),
    "temporal": adjusted(NONE, temporal=True),
    "prompt lookup": adjusted(NONE, prompt_lookup_tokens=4),
    "self": adjusted(NONE, self_tokens=3, self_image_share=0.3),
    "model": adjusted(NONE, model=FOLDER, model_tokens=4),
    "chunk shift": adjusted(NONE, chunk_shift=True),
    "several": adjusted(NONE, temporal=True, prompt_lookup_tokens=4, self_tokens=3),
}
# What is refused, and with which words.
_BINS = ("bins", "text, then bins", "three cameras and a state")
_SINGLE = ("bins", "text, then bins", "three cameras and a state", "nora", "vla-0", "pi0-fast")
REFUSED = {(kind, "chunk shift"): "this one gives a single action: set draft.temporal" for kind in _SINGLE}
REFUSED |= {(kind, "head, window mass"): "needs a policy that writes bins" for kind in KINDS if kind not in _BINS}
REFUSED |= {("pi0-fast", draft): "draft.self_tokens omits image rows" for draft in ("self", "several")}
SPEC: dict[str, dict[str, Any]] = {
    "spec": {"mode": "spec"},
    "spec, two chunks": {"mode": "spec", "prefill_chunks": 2},
}
SPECPIPE: dict[str, dict[str, Any]] = {
    "specpipe": {"mode": "specpipe"},
    "specpipe, two chunks": {"mode": "specpipe", "prefill_chunks": 2},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """The policies so far, by the name of their kind."""
    return {}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, made: dict[str, Target], tmp_path_factory: pytest.TempPathFactory) -> str:
    name: str = request.param
    if name not in made:
        target = made[name] = KINDS[name].make(tmp_path_factory.mktemp("target"))
        decoder = cast("PackedDecoder", target.decoder)
        write_random_head(target.directory / "draft", decoder)
        write_random_head(target.directory / PARALLEL, decoder, parallel_depth=4)
        if target.codec.horizon > 1:  # what chunk shift looks up: half of what is asked
            answers = collect_answers(target, [seen(target, seed) for seed in range(0, FRAMES, 2)]).answers
            save_answers(target.directory / ANSWERS_FILE, [*answers])
        if (target.directory / "model.safetensors").exists():
            write_draft_model(target, noise=0.05)
    return name


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[Any, ...]]]:
    """What plain decoding gives, by the name of the kind."""
    return {}


def seen(target: Target, seed: int) -> Observation:
    """Something of every sensor that it is asked with; every other time the same as before."""
    rng = np.random.default_rng(seed // 2)
    images = {name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in target.cameras}
    state = rng.uniform(-0.5, 0.5, target.state_dims)
    return Observation(images, "put the carrot away", stamp_ns=seed + 1, state=state)


def essence(outcome: Outcome) -> tuple[Any, ...]:
    if isinstance(outcome, Action):
        return outcome.observation.stamp_ns, outcome.text_tokens, outcome.tokens
    return outcome.observation.stamp_ns, outcome.reason, outcome.detail


def decoded(engine: Engine, observations: Iterable[Observation]) -> list[Outcome]:
    """All that becomes of the frames, of which several are in flight where the mode allows it."""
    found: list[Outcome] = []
    for observation in observations:
        found += engine.submit(observation)
        while not engine.has_room:
            found += engine.tick()
        found += engine.tick()
    while engine.busy:
        found += engine.tick()
    return sorted(found, key=lambda outcome: outcome.observation.stamp_ns)


def plain(kind: str, target: Target, known: dict[str, list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    if kind not in known:
        engine = Engine(target, KINDS[kind].settings)
        known[kind] = [essence(engine.act(seen(target, seed))) for seed in range(FRAMES)]
        lengths = {len(tokens) for _, *answer in known[kind] for tokens in answer if isinstance(tokens, tuple)}
        assert max(lengths) > 2, "the random policy says nothing: choose another seed"
    return known[kind]


def continued(target: Target, codec: Codec, observation: Observation) -> tuple[Any, ...]:
    """What plain decoding writes after the given start of the answer."""
    tokens = answer_of(target, codec, observation)
    problem = codec.problem(tokens)
    if problem:
        return observation.stamp_ns, DropReason.NOT_AN_ACTION, problem
    return observation.stamp_ns, codec.text_tokens(tokens), codec.action_tokens(tokens)


def engine_of(kind: str, target: Target, draft: str, **mode: Any) -> Engine:
    drafts = DRAFTS[draft]
    if drafts.head == PARALLEL:
        drafts = replace(drafts, head=str(target.directory / PARALLEL))
    settings = replace(KINDS[kind].settings, in_order=True, draft=drafts, **mode)
    if (target.directory / FOLDER).exists() or draft != "model":
        return Engine(target, with_model(target, settings))
    # Of this kind no other one is written here: it drafts for itself.
    return Engine(target, replace(settings, draft=adjusted(settings.draft, model=str(target.directory))))


@pytest.mark.parametrize("modes", nightly_but(lambda modes: "specpipe" in modes, [SPEC, SPECPIPE]), ids=" and ".join)
@pytest.mark.parametrize("draft", nightly_but(lambda draft: draft in ("head", "several"), DRAFTS))
def test_strict_speculation_equals_plain_decoding(
    kind: str,
    draft: str,
    modes: dict[str, dict[str, Any]],
    made: dict[str, Target],
    expected: dict[str, list[tuple[Any, ...]]],
) -> None:
    target = made[kind]
    if (kind, draft) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[kind, draft]):
            engine_of(kind, target, draft, mode="spec")
        return
    chosen = {name: mode for name, mode in modes.items() if target.causal_prompt or "prefill_chunks" not in mode}
    for name, mode in chosen.items():
        engine = engine_of(kind, target, draft, **mode)
        found = decoded(engine, (seen(target, seed) for seed in range(FRAMES)))
        assert [*map(essence, found)] == plain(kind, target, expected), name


def test_pipelining_equals_plain_decoding(
    kind: str, made: dict[str, Target], expected: dict[str, list[tuple[Any, ...]]]
) -> None:
    target = made[kind]
    for chunks in (1, 2) if target.causal_prompt else (1,):
        engine = engine_of(kind, target, "head", mode="pipeline", prefill_chunks=chunks)
        found = decoded(engine, (seen(target, seed) for seed in range(FRAMES)))
        assert [*map(essence, found)] == plain(kind, target, expected), chunks


def test_the_default_mode_equals_plain_decoding(
    kind: str, made: dict[str, Target], expected: dict[str, list[tuple[Any, ...]]]
) -> None:
    target = made[kind]
    engine = engine_of(kind, target, "head", mode=EngineSettings().mode)
    engine.warm_up()
    found = decoded(engine, (seen(target, seed) for seed in range(FRAMES)))
    assert [*map(essence, found)] == plain(kind, target, expected)


@pytest.mark.parametrize("spread", [1, 2])
def test_images_processed_ahead_of_their_prompts_change_no_answer(
    kind: str, spread: int, made: dict[str, Target], expected: dict[str, list[tuple[Any, ...]]]
) -> None:
    target = made[kind]
    if spread > 1 and not target.causal_prompt:
        return
    engine = engine_of(kind, target, "head", mode="auto")
    found, ahead = decoded_ahead(engine, (seen(target, seed) for seed in range(FRAMES)), spread)
    assert [*map(essence, found)] == plain(kind, target, expected) and ahead


def decoded_ahead(
    engine: Engine, observations: Iterable[Observation], spread: int = 1
) -> tuple[list[Outcome], list[TickWork]]:
    """`decoded` with images ahead of their prompts, and the ticks that processed them."""
    ahead: list[TickWork] = []
    run = engine.tick

    def tick() -> list[Outcome]:
        outcomes = run()
        if engine.last_work.images and not engine.last_work.prompts:
            ahead.append(engine.last_work)
        return outcomes

    engine.tick = tick  # type: ignore[method-assign]
    assert engine.scheduler.chooser is not None
    with engine.scheduler.chooser.pinned(Pace(3, math.inf, spread, ahead=True)):
        return decoded(engine, observations), ahead


GIVEN: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "pipeline, two chunks": {"mode": "pipeline", "prefill_chunks": 2},
    "specpipe": {"mode": "specpipe"},
    "spec": {"mode": "spec"},
    "auto": {"mode": "auto"},
}


@pytest.mark.parametrize("mode", nightly_but(lambda mode: mode in ("ar", "pipeline, two chunks", "specpipe"), GIVEN))
def test_what_follows_a_given_start_is_the_plain_decoders(kind: str, mode: str, made: dict[str, Target]) -> None:
    target = made[kind]
    codec = target.codec.with_text(KINDS[kind].settings.max_reasoning_tokens)
    draft = "head" if (kind, "several") in REFUSED else "several"
    engine = engine_of(kind, target, draft, **GIVEN[mode] | ({} if target.causal_prompt else {"prefill_chunks": 1}))
    asked = []
    for seed in range(FRAMES):
        tokens = answer_of(target, codec, seen(target, seed))
        start = tokens[: seed * len(tokens) // FRAMES]
        other = [(start[0] + 1) % target.decoder.config.vocab_size, *start[1:]] if seed == FRAMES - 1 else start
        asked.append(replace(seen(target, seed), answer_ids=tuple(other)))
    found = decoded(engine, asked)
    if not target.causal_prompt:
        assert all(isinstance(each, Action) or "attends bidirectionally" in each.detail for each in found[1:])
        return
    assert [*map(essence, found)] == [continued(target, codec, each) for each in asked]
    for action, observation in zip(found, asked, strict=True):
        if isinstance(action, Action):
            record, given = action.record, len(observation.answer_ids)
            assert (action.text_tokens + action.tokens)[:given] == observation.answer_ids
            assert sum(record.tokens_per_forward) == len(record.why) == len(record.bins_off)


@pytest.mark.parametrize(
    ("answer_ids", "words"),
    [
        ((1,) * 40, "has 40 tokens, but a whole answer has at most"),
        ((-1,), "token -1 is outside the vocabulary"),
        ((1 << 40,), "is outside the vocabulary"),
    ],
)
def test_an_impossible_start_is_refused_and_the_next_frame_is_decoded(
    answer_ids: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    target = _text(tmp_path)
    engine = Engine(target, _WRITES)
    outcome = engine.act(replace(seen(target, 0), answer_ids=answer_ids))
    assert isinstance(outcome, Drop) and outcome.reason is DropReason.BAD_INSTRUCTION and words in outcome.detail
    assert essence(engine.act(seen(target, 1))) == essence(Engine(target, _WRITES).act(seen(target, 1)))
