# SPDX-License-Identifier: Apache-2.0
"""The output head of action rows alone: the plain head's tokens wherever that chose an action, and less to read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import bins_of, load_openvla
from support.draft_heads import write_random_head
from support.nightly import examples
from support.random_checkpoint import write_random_checkpoint

from specvla_kernels.greedy_choice import greedy_choice
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.models.settings import ModelSettings
from specvla_ros.policy_parameters import PolicyParameters
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

DRAFT = adjusted(DraftSettings(nodes=10, top_k=4, depth=4), temporal=True)
MODES = [
    EngineSettings("ar"),
    EngineSettings("spec", draft=DRAFT),
    EngineSettings("spec", draft=adjusted(DraftSettings(nodes=6), self_tokens=2)),
    EngineSettings("specpipe", prefill_chunks=2, draft=DRAFT),
]
RELAXED = AcceptanceSettings("bin_distance", bins=(4,))
WINDOW = DraftSettings(nodes=10, top_k=4, depth=4, children="window_mass")


def in_float64(policy: OpenVLATarget) -> OpenVLATarget:
    policy.model.to(torch.float64)
    return policy


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[OpenVLATarget, OpenVLATarget]]:
    """The plain head and the action head, of several checkpoints."""
    pairs = []
    for shape in (dict(seed=3, hidden_size=96, layers=3), dict(seed=9, hidden_size=64, layers=1)):
        directory = tmp_path_factory.mktemp("checkpoint")
        write_random_checkpoint(directory, **shape)
        write_random_head(directory / "draft", load_openvla(directory, device="cpu").decoder)
        plain, actions = (in_float64(load_openvla(directory, device="cpu", action_head=on)) for on in (False, True))
        pairs.append((plain, actions))
    return pairs


def frame(seed: int) -> Observation:
    image = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", 1)


def decoded(policy: OpenVLATarget, chosen: EngineSettings, seed: int) -> Action:
    action = Engine(policy, chosen).act(frame(seed))
    assert isinstance(action, Action), action
    return action


@settings(max_examples=examples(24), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(which=st.integers(0, 1), chosen=st.sampled_from(MODES), seed=st.integers(0, 50))
def test_the_tokens_are_those_of_the_plain_head(
    policies: list[tuple[OpenVLATarget, OpenVLATarget]], which: int, chosen: EngineSettings, seed: int
) -> None:
    plain, actions = policies[which]
    assert decoded(actions, chosen, seed).tokens == decoded(plain, EngineSettings("ar"), seed).tokens


@pytest.mark.parametrize("children", [DRAFT, WINDOW], ids=lambda each: each.children)
def test_relaxed_acceptance_keeps_its_bounds(
    policies: list[tuple[OpenVLATarget, OpenVLATarget]], children: DraftSettings
) -> None:
    relaxed = EngineSettings("spec", draft=children, acceptance=RELAXED)
    for _, policy in policies:
        for seed in range(4):
            action = decoded(policy, relaxed, seed)
            assert max(action.record.bins_off) <= 4
            assert all(bins_of(policy).tokenizer.is_action(token) for token in action.tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_logits_of_actions_are_the_plain_heads_and_others_are_none(tmp_path: Path, dtype: str) -> None:
    write_random_checkpoint(tmp_path, seed=4, hidden_size=64, layers=1, text=1.0)
    plain, actions = (load_openvla(tmp_path, device="cpu", dtype=dtype, action_head=on) for on in (False, True))
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).to(plain.decoder.dtype)
    whole, known = plain.decoder.logits(hidden), actions.decoder.logits(hidden)
    ids = slice(bins_of(plain).tokenizer.first_id, bins_of(plain).tokenizer.vocab_size)
    assert known.shape == whole.shape
    assert known.dtype == whole.dtype == torch.float32
    torch.testing.assert_close(known[:, ids], whole[:, ids])
    known[:, ids] = -torch.inf
    assert (known == -torch.inf).all()
    chosen, own = greedy_choice(whole), greedy_choice(actions.decoder.logits(hidden))
    is_action = (ids.start <= chosen) & (chosen < ids.stop)
    assert 0 < is_action.sum() < len(chosen), "text and actions must both be chosen for this to mean anything"
    assert torch.equal(own[is_action], chosen[is_action])
    assert ((ids.start <= own) & (own < ids.stop)).all()


@pytest.mark.parametrize("mode", ["ar", "spec"])
def test_a_nan_gives_no_action(policies: list[tuple[OpenVLATarget, OpenVLATarget]], mode: str) -> None:
    _, policy = policies[0]
    weight = policy.decoder.norm.weight
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        outcome = Engine(policy, EngineSettings(mode, draft=DRAFT)).act(frame(1))
    finally:
        weight.copy_(kept)
    assert isinstance(outcome, Drop)
    assert outcome.reason is DropReason.NOT_FINITE


def test_a_policy_that_writes_text_is_refused(policies: list[tuple[OpenVLATarget, OpenVLATarget]]) -> None:
    plain, actions = policies[0]
    text = EngineSettings("ar", max_reasoning_tokens=5)
    Engine(plain, text)
    engine = Engine(actions, EngineSettings("ar"))
    for refused in (
        lambda: Engine(actions, text),
        lambda: engine.switch(text),
        PolicyParameters(checkpoint="x", model=ModelSettings(action_head=True), engine=text).check,
    ):
        with pytest.raises(UserError, match=r"decode\.max_reasoning_tokens is 5: set it to 0, or model\.action_head"):
            refused()
    PolicyParameters(checkpoint="x", model=ModelSettings(action_head=True)).check()


def test_the_description_names_it(policies: list[tuple[OpenVLATarget, OpenVLATarget]]) -> None:
    assert [policy.describe()["action_head"] for policy in policies[0]] == ["false", "true"]
