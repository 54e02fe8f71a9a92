# SPDX-License-Identifier: Apache-2.0
"""The target as its own drafter, in the engine: what it costs, and what it must get right."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import load_openvla
from support.draft_heads import write_random_head
from support.random_checkpoint import write_random_checkpoint

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.drafters.self_drafter import KEEPS, SelfDrafter
from specvla_ros.speculation.settings import DraftSettings, adjusted

LONGEST_TEXT = 24
FRAMES = 8
ACTS = dict(seed=3, hidden_size=96, layers=4)
WRITES = dict(seed=4, hidden_size=64, layers=2, text=1.4)


def load(directory: Path, shape: dict) -> OpenVLATarget:
    write_random_checkpoint(directory, **shape)
    loaded = load_openvla(directory, device="cpu")
    loaded.model.to(torch.float64)
    loaded.decoder.lm_head.to(torch.float64)
    return loaded


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return load(tmp_path_factory.mktemp("actor"), ACTS)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return load(tmp_path_factory.mktemp("writer"), WRITES)


def engine_of(
    policy: OpenVLATarget, tokens: int, share: float, *, keep: str = "uniform", text: int = 0, chunks: int = 1
) -> Engine:
    """A poisoned engine whose only source is the target."""
    draft = adjusted(DraftSettings(), self_tokens=tokens, self_image_share=share, self_keep=keep)
    chosen = EngineSettings("spec", draft=draft, max_reasoning_tokens=text)
    if chunks > 1:
        chosen = replace(chosen, mode="specpipe", max_in_flight=1, prefill_chunks=chunks)
    engine = Engine(policy, chosen)
    (drafter,) = engine.drafter.by_name.values()
    assert engine.drafter.sources == ("self",) and isinstance(drafter, SelfDrafter)
    for cache in (engine.cache.keys, engine.cache.values, drafter.chains.keys, drafter.chains.values):
        cache.fill_(float("nan"))
    return engine


def frame(stamp_ns: int) -> Observation:
    image = np.random.default_rng(stamp_ns).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", stamp_ns)


@pytest.mark.parametrize(("tokens", "committed"), [(1, (1, 2, 2, 2)), (2, (1, 3, 3)), (6, (1, 6)), (63, (1, 6))])
def test_with_the_whole_image_every_drafted_action_token_is_right(
    actor: OpenVLATarget, tokens: int, committed: tuple[int, ...]
) -> None:
    plain, spec = Engine(actor, EngineSettings("ar")), engine_of(actor, tokens, 1.0)
    for stamp in range(1, 4):
        ours, theirs = spec.act(frame(stamp)), plain.act(frame(stamp))
        assert isinstance(ours, Action) and isinstance(theirs, Action)
        assert ours.tokens == theirs.tokens
        assert ours.record.tokens_per_forward == committed


@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_with_the_whole_image_every_drafted_word_is_right(writer: OpenVLATarget, tokens: int) -> None:
    plain = Engine(writer, EngineSettings("ar", max_reasoning_tokens=LONGEST_TEXT))
    spec = engine_of(writer, tokens, 1.0, text=LONGEST_TEXT)
    seen = 0
    for stamp in range(1, FRAMES + 1):
        ours, theirs = spec.act(frame(stamp)), plain.act(frame(stamp))
        if not isinstance(theirs, Action):
            continue
        assert isinstance(ours, Action) and ours.tokens == theirs.tokens
        record = ours.record
        assert sum(record.tokens_per_forward) == theirs.record.forwards
        *whole, _ = record.accept_lengths  # the last is cut at the answer's end
        assert whole == [nodes - 1 for nodes in record.tree_nodes[:-1]]
        seen += whole.count(tokens)
    assert seen, "the random policy writes too little: choose another seed"


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("keep", KEEPS)
def test_a_tenth_of_the_image_loses_nothing(actor: OpenVLATarget, keep: str, chunks: int) -> None:
    plain, spec = Engine(actor, EngineSettings("ar")), engine_of(actor, 3, 0.1, keep=keep, chunks=chunks)
    accepted = 0
    for stamp in range(1, FRAMES + 1):
        ours, theirs = spec.act(frame(stamp)), plain.act(frame(stamp))
        assert isinstance(ours, Action) and isinstance(theirs, Action)
        assert ours.tokens == theirs.tokens
        accepted += sum(ours.record.accept_lengths)
    assert accepted < 3 * FRAMES, "a random policy needs its image: had it been left in?"


def test_a_tick_counts_the_targets_forwards_and_rows(actor: OpenVLATarget) -> None:
    engine = engine_of(actor, 3, 0.1)
    engine.submit(frame(1))
    work = []
    while engine.busy:
        engine.tick()
        work.append(engine.last_work)
    prompt = round(0.1 * actor.image_tokens) + len(actor.prompt.ids("put carrot on plate"))
    assert (work[0].drafting.self_forwards, work[0].drafting.self_rows) == (3, prompt + 1)
    assert all(each.drafting.self_rows <= 4 and each.drafting.self_forwards <= 3 for each in work[1:])
    assert (work[-1].drafting.self_forwards, work[-1].drafting.self_rows) == (0, 0)


@pytest.mark.parametrize(("with_head", "nodes", "found"), [(False, 4, 4), (False, 20, 6), (True, 4, 4), (True, 20, 20)])
def test_the_chain_and_the_heads_tree_share_the_nodes(
    actor: OpenVLATarget, tmp_path: Path, *, with_head: bool, nodes: int, found: int
) -> None:
    head = str(write_random_head(tmp_path, actor.decoder)) if with_head else ""
    draft = adjusted(DraftSettings(head=head, nodes=nodes), self_tokens=9, self_image_share=1.0)
    action = Engine(actor, EngineSettings("spec", draft=draft)).act(frame(1))
    assert isinstance(action, Action)
    assert action.record.tree_nodes[0] == found
    assert action.record.accept_lengths[0] == min(5, nodes - 1), "the chain is there whole"
