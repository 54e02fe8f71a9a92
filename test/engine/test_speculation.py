# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: strict loses nothing, relaxed stays in its bounds, the cache holds what a recompute gives."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import bins_of
from support.draft_heads import policy_with_random_head
from support.draft_models import FOLDER, drafting_model, write_draft_model
from support.nightly import examples, nightly_but
from support.random_checkpoint import write_random_checkpoint
from support.scripted_drafts import Scripted

from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.registry import make_rule
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

STRICT = EngineSettings("spec", draft=adjusted(DraftSettings(), temporal=True))
SHAPES = [dict(seed=3, hidden_size=96, layers=4), dict(seed=8, hidden_size=64, layers=1)]


@pytest.fixture(scope="module", params=nightly_but(lambda shape: shape is SHAPES[0], SHAPES), ids=str)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    made = policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), **request.param)
    write_draft_model(made, noise=0.1)
    return made


def frame(stamp_ns: int, *, seed: int | None = None, epoch: int = 0) -> Observation:
    rng = np.random.default_rng(stamp_ns if seed is None else seed)
    return Observation(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8), "put carrot on plate", stamp_ns, epoch=epoch)


def decoded(engine: Engine, observation: Observation) -> Action:
    action = engine.act(observation)
    assert isinstance(action, Action), action
    return action


def scripted_engine(
    policy: OpenVLATarget, data: st.DataObject, answer: Sequence[int], chosen: EngineSettings
) -> Engine:
    engine = Engine(policy, chosen)
    first = bins_of(policy).tokenizer.first_id
    engine.drafter = Scripted(data, answer, low=first, high=bins_of(policy).tokenizer.vocab_size - 1)  # type: ignore[assignment]
    engine.cache.keys.fill_(float("nan"))
    engine.cache.values.fill_(float("nan"))
    return engine


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), seed=st.integers(0, 5))
def test_strict_yields_the_plain_decoders_tokens_whatever_is_drafted(
    policy: OpenVLATarget, data: st.DataObject, seed: int
) -> None:
    plain = decoded(Engine(policy, EngineSettings("ar")), frame(1, seed=seed))
    engine = scripted_engine(policy, data, plain.tokens, STRICT)
    action = decoded(engine, frame(1, seed=seed))
    assert action.tokens == plain.tokens
    assert sum(action.record.tokens_per_forward) == len(plain.tokens)
    assert set(action.record.bins_off) == {0}


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), seed=st.integers(0, 5), bins=st.lists(st.integers(0, 9), min_size=7, max_size=7))
def test_relaxed_stays_within_its_bounds_given_its_own_prefix(
    policy: OpenVLATarget, data: st.DataObject, seed: int, bins: list[int]
) -> None:
    plain = decoded(Engine(policy, EngineSettings("ar")), frame(1, seed=seed))
    relaxed = replace(STRICT, acceptance=AcceptanceSettings("bin_distance", bins=tuple(bins)))
    action = decoded(scripted_engine(policy, data, plain.tokens, relaxed), frame(1, seed=seed))
    for place, (token, off) in enumerate(zip(action.tokens, action.record.bins_off, strict=True)):
        own = plain_choice(policy, frame(1, seed=seed), action.tokens[:place])
        ids = [bins_of(policy).tokenizer.vocab_size - 1 - each for each in (token, own)]
        apart = abs(min(ids[0], 254) - min(ids[1], 254))
        assert off == apart <= bins[place]


def plain_choice(policy: OpenVLATarget, observation: Observation, tokens: Sequence[int]) -> int:
    """The target's own token behind a prefix, without a cache."""
    prompt = policy.prompt_embeddings(observation, policy.prompt.ids(observation.instruction))
    sequence = torch.cat((prompt, policy.decoder.embed_tokens(torch.tensor(tokens, dtype=torch.int64))))
    cache = new_cache(policy.decoder, slots=1, slot_rows=len(sequence))
    return int(packed_forward(policy.decoder, [Segment(0, 0, sequence)], cache).logits[0].argmax())


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_committed_keys_and_values_equal_a_recompute(policy: OpenVLATarget, data: st.DataObject) -> None:
    observation = frame(1, seed=2)
    plain = decoded(Engine(policy, EngineSettings("ar")), observation)
    relaxed = replace(STRICT, acceptance=AcceptanceSettings("bin_distance", bins=(5,) * 7))
    engine = scripted_engine(policy, data, plain.tokens, relaxed)
    engine.submit(observation)
    engine.tick()
    while engine.scheduler.requests:
        (request,) = engine.scheduler.requests
        committed = torch.tensor(request.tokens[:-1], dtype=torch.int64)
        sequence = torch.cat((request.prompt, policy.decoder.embed_tokens(committed)))
        assert len(sequence) == request.prefix_len
        cache = new_cache(policy.decoder, slots=1, slot_rows=len(sequence))
        packed_forward(policy.decoder, [Segment(0, 0, sequence)], cache)
        for ours, fresh in ((engine.cache.keys, cache.keys), (engine.cache.values, cache.values)):
            torch.testing.assert_close(ours[:, request.slot, : len(sequence)], fresh[:, 0], atol=1e-9, rtol=1e-9)
        engine.tick()


@pytest.mark.parametrize(
    "draft",
    nightly_but(
        lambda draft: draft.nodes in (1, 7) or draft.children == "window_mass",
        [
            DraftSettings(),
            DraftSettings(top_k=3, depth=2, nodes=7),
            adjusted(DraftSettings(children="window_mass", nodes=12), temporal=True),
            DraftSettings(nodes=1),
            adjusted(DraftSettings(), temporal=True, prompt_lookup_tokens=4),
            adjusted(DraftSettings(nodes=12), self_tokens=4),
            adjusted(DraftSettings(nodes=12), self_tokens=4, self_keep="similarity"),
            adjusted(DraftSettings(), model=FOLDER),
            adjusted(DraftSettings(head="none", nodes=5), temporal=True, model=FOLDER, model_tokens=2),
        ],
    ),
    ids=str,
)
def test_strict_equals_plain_with_the_real_sources(policy: OpenVLATarget, draft: DraftSettings) -> None:
    plain, draft = Engine(policy, EngineSettings("ar")), drafting_model(policy, draft)
    bold = AcceptanceSettings("bin_distance", bins=(0,))
    for acceptance in (AcceptanceSettings(), bold):
        engine = Engine(policy, EngineSettings("spec", draft=draft, acceptance=acceptance))
        for stamp in range(1, 8):
            # The same picture again and again: what the last action was is then right.
            observation = frame(stamp, seed=stamp // 3)
            ours, theirs = decoded(engine, observation), decoded(plain, observation)
            if acceptance.rule == "strict":
                assert ours.tokens == theirs.tokens
            np.testing.assert_allclose(ours.values, theirs.values)
        plain.reset()


def test_a_picture_seen_before_is_decoded_in_its_own_prefill(policy: OpenVLATarget) -> None:
    engine = Engine(policy, STRICT)
    first, again = (decoded(engine, frame(stamp, seed=1)) for stamp in (1, 2))
    assert again.tokens == first.tokens
    assert again.record.tokens_per_forward == (7,)
    other_epoch = decoded(engine, frame(3, seed=1, epoch=1))
    assert other_epoch.record.tokens_per_forward[0] == 1, "an action of another instruction is no draft"
    engine.reset()
    assert decoded(engine, frame(4, seed=1, epoch=1)).record.tokens_per_forward[0] == 1


def test_the_acceptance_can_change_between_ticks(policy: OpenVLATarget) -> None:
    engine = Engine(policy, STRICT)
    held = decoded(engine, frame(1, seed=1))
    engine.set_acceptance(AcceptanceSettings("bin_distance", bins=(254,)))
    loose = decoded(engine, frame(2, seed=2))
    assert loose.tokens != held.tokens, "the last action is no draft to be relaxed towards"
    assert loose.record.acceptance == "bin_distance"
    assert max(loose.record.bins_off) > 0 and loose.record.bins_off[-1] == 0, "the gripper stays strict"
    for rule in ("bin_distance", "strict", "fly", "lvspec", "composite"):
        with pytest.raises(UserError, match="one bin of x"):
            make_rule(AcceptanceSettings(rule, tolerance_m=1e-6), engine.target)
        with pytest.raises(UserError, match="one bin of x"):
            engine.set_acceptance(AcceptanceSettings(rule, tolerance_m=1e-6))
    assert engine.settings.acceptance.bins == (254,), "the old rule stays"


def test_no_head_leaves_the_one_beside_the_checkpoint_alone(policy: OpenVLATarget) -> None:
    engine = Engine(policy, EngineSettings("spec", draft=adjusted(DraftSettings(head="none"), temporal=True)))
    assert engine.describe()["drafts"] == "temporal"
    first, again = (decoded(engine, frame(stamp, seed=1)) for stamp in (1, 2))
    assert (first.record.forwards, again.record.forwards) == (7, 1)


def test_a_preset_relaxes_every_token_the_grippers_too_and_is_described(policy: OpenVLATarget) -> None:
    engine = Engine(policy, engine_settings_from(mode="spec", preset="spec-vla-paper"))
    assert engine.verifier.rule == BinDistance((9,) * 7)
    assert engine.describe()["decode.preset"] == "spec-vla-paper"
    decoded(engine, frame(1))
    engine.set_acceptance(AcceptanceSettings())
    described = str(engine.describe()["decode.preset"])
    assert described.startswith("spec-vla-paper, except acceptance.rule strict, acceptance.bins (0,)")


def test_half_precision_names_the_condition_of_the_same_tokens(policy: OpenVLATarget) -> None:
    half = load_target(policy.directory, device="cpu", dtype="bfloat16")
    condition = (
        "plain decoding's except at near ties, which bfloat16 may break differently: specvla certify counts them"
    )
    relaxed = replace(STRICT, acceptance=AcceptanceSettings("bin_distance", bins=(3,)))
    several = EngineSettings("pipeline", max_in_flight=2)
    for chosen in (STRICT, several, EngineSettings("ar", streams=2)):
        assert Engine(half, chosen).describe()["tokens"] == condition
    for target, chosen in ((policy, STRICT), (half, EngineSettings("ar")), (half, relaxed)):
        assert "tokens" not in Engine(target, chosen).describe()


def test_nothing_to_draft_with_is_refused(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, hidden_size=64, layers=1)
    bare = load_target(tmp_path, device="cpu")
    with pytest.raises(UserError, match="has no drafter"):
        Engine(bare, EngineSettings("spec"))
    Engine(bare, EngineSettings("spec", draft=adjusted(DraftSettings(), temporal=True)))


def test_without_a_draft_it_decodes_plainly_only_if_that_is_allowed(policy: OpenVLATarget, tmp_path: Path) -> None:
    missing = DraftSettings(head=str(tmp_path / "none"))
    with pytest.raises(UserError, match="does not exist"):
        Engine(policy, EngineSettings("spec", draft=missing))
    engine = Engine(policy, EngineSettings("spec", draft=replace(missing, fallback_to_ar=True)))
    assert "does not exist" in str(engine.describe()["decode.fallback"])
    action = decoded(engine, frame(1))
    assert (action.record.mode, action.record.forwards) == ("ar", 7)
    assert action.tokens == decoded(Engine(policy, EngineSettings("ar")), frame(1)).tokens
