# SPDX-License-Identifier: Apache-2.0
"""The draft model, held against its own greedy decoding without a cache."""

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples
from support.no_read_back import no_read_back
from torch import Tensor

from benchmarks.random_policy import random_decoder
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.observation import ONLY_CAMERA, Observation
from specvla_ros.models.target import PromptLayout
from specvla_ros.speculation.drafters.model_drafter import ModelDrafter
from specvla_ros.speculation.drafters.registry import DraftInput, DraftWork, NewRows
from specvla_ros.speculation.tree import Tree

CONFIG = DecoderShape(32, 64, 2, 4, 2, 8, vocab_size=50, max_position_embeddings=128)
DECODER = random_decoder(CONFIG, seed=0, dtype=torch.float64)
IMAGE, TOKENS, SLOT_ROWS = 4, 6, 48
LOOKUPS = (0, 1, 10)
TARGET_ROWS = 9  # of the target's prompt, whose hidden states and embeddings the draft model never reads


def prompt_layout(ids: tuple[int, ...]) -> PromptLayout:
    return PromptLayout(ids, IMAGE + len(ids), (range(1, 1 + IMAGE),))


class Model:
    """What a drafter asks of a target; its image rows are made of the image's first pixels."""

    def __init__(self, decoder: PackedDecoder = DECODER) -> None:
        self.decoder = decoder

    def prompt_layout(self, observation: Observation) -> PromptLayout:
        assert observation.prompt_ids is not None
        return prompt_layout(observation.prompt_ids)

    def prompt_embeddings(self, observation: Observation, prompt_ids: tuple[int, ...]) -> Tensor:
        words = self.decoder.embed_tokens(torch.tensor(prompt_ids))
        pixels = observation.cameras[ONLY_CAMERA].reshape(-1)[: IMAGE * 32]
        image = torch.from_numpy(pixels.reshape(IMAGE, 32) / 128.0 - 1.0)
        return torch.cat((words[:1], image, words[1:]))


@dataclass(frozen=True)
class Script:
    """An observation, its prompt, and an answer that has nothing to do with what the model would say."""

    observation: Observation
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@functools.cache
def script(seed: int) -> Script:
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    prompt, answer = (tuple(rng.integers(0, 50, n).tolist()) for n in (2 + seed % 5, 20))
    return Script(Observation(image, "", 1), prompt, answer)


def asked(seed: int, slot: int, answer: tuple[int, ...], depth: int, *, begins: bool) -> DraftInput:
    made = script(seed)
    rows = TARGET_ROWS + len(answer) - 1
    hidden = torch.empty(rows if begins else 1, 0)
    return DraftInput(
        slot,
        rows,
        NewRows(hidden, hidden),
        torch.tensor(answer[-1]),
        depth,
        position=0,
        layout=prompt_layout(made.prompt),
        answer=answer,
        observation=made.observation,
    )


def drafter(tokens: int = TOKENS, *, lookup: int = 0, decoder: PackedDecoder = DECODER) -> ModelDrafter:
    model: Any = Model(decoder)
    made = ModelDrafter(model, tokens=tokens, slots=4, slot_rows=SLOT_ROWS, lookup=lookup)
    made.chains.keys.fill_(float("nan"))
    made.chains.values.fill_(float("nan"))
    return made


def drafted(made: ModelDrafter, *requests: DraftInput, nodes: int = 64) -> list[Tree]:
    return made.draft(requests, [nodes] * len(requests), last=True)


@functools.cache
def plain(seed: int, answer: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """What the model says after an answer, every token from the whole sequence."""
    made = script(seed)
    sequence = torch.cat((Model().prompt_embeddings(made.observation, made.prompt), words(answer)))
    said: list[int] = []
    for _ in range(tokens):
        cache = new_cache(DECODER, slots=1, slot_rows=len(sequence))
        said.append(int(packed_forward(DECODER, [Segment(0, 0, sequence)], cache).logits[0].argmax()))
        sequence = torch.cat((sequence, words(said[-1:])))
    return tuple(said)


def words(ids: Any) -> Tensor:
    return DECODER.embed_tokens(torch.tensor(ids, dtype=torch.int64))


def is_chain(tree: Tree, root: int, said: tuple[int, ...]) -> None:
    assert tree.tokens.tolist() == [root, *said]
    assert tree.ancestry.parents.tolist() == list(range(-1, len(said)))
    assert tree.depth == len(said) and tree.valid.all() and tree.relaxable.all()
    assert tree.log_probs[0] == 0 and (tree.log_probs.diff() <= 0).all()


@pytest.mark.parametrize("lookup", LOOKUPS)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), seed=st.integers(0, 9), depths=st.lists(st.integers(0, 8), min_size=1, max_size=5))
def test_after_every_verification_it_goes_on_from_what_was_committed(
    lookup: int, data: st.DataObject, seed: int, depths: list[int]
) -> None:
    """Any share of a chain is accepted, then comes another token, or several that another drafter had."""
    made, slot = drafter(lookup=lookup), 2
    answer = script(seed).answer[:1]
    for i, depth in enumerate(depths):
        (tree,) = drafted(made, asked(seed, slot, answer, depth, begins=i == 0))
        is_chain(tree, answer[-1], plain(seed, answer, min(depth, TOKENS)))
        accepted = tree.tokens.tolist()[1 : 1 + data.draw(st.integers(0, tree.depth))]
        others = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=3))
        answer = (*answer, *accepted, *others)


@pytest.mark.parametrize("lookup", LOOKUPS)
@settings(max_examples=examples(10), deadline=None)
@given(wanted=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8), st.integers(0, 8)), min_size=2, max_size=4))
def test_several_requests_at_once_get_what_each_gets_alone(lookup: int, wanted: list[tuple[int, int, int]]) -> None:
    made = drafter(lookup=lookup)
    for begins, more in ((True, 0), (False, 3)):
        requests = [
            asked(seed, slot, script(seed).answer[: told + more], depth, begins=begins)
            for slot, (seed, told, depth) in enumerate(wanted)
        ]
        for tree, request, (seed, _, depth) in zip(drafted(made, *requests), requests, wanted, strict=True):
            is_chain(tree, request.answer[-1], plain(seed, request.answer, min(depth, TOKENS)))


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_slot_that_is_given_on_shows_nothing_of_its_last_request(chunks: int) -> None:
    made = drafter()
    drafted(made, asked(1, 0, script(1).answer[:4], 6, begins=True))
    answer = script(2).answer[:1]
    for chunk in range(chunks - 1):
        rows = torch.empty(TARGET_ROWS // 3, 0)
        part = replace(asked(2, 0, answer, 0, begins=False), new=NewRows(rows, rows), mid_prompt=True, answer=())
        (tree,) = drafted(made, replace(part, prefix_len=len(rows) * (chunk + 1)))
        assert len(tree) == 1
    (tree,) = drafted(made, asked(2, 0, answer, 6, begins=chunks == 1))
    is_chain(tree, answer[-1], plain(2, answer, 6))
    assert made.work.model_images == 2


def test_accepted_rows_stay_and_rejected_ones_are_never_read_again() -> None:
    made, answer = drafter(), script(3).answer[:2]
    (tree,) = drafted(made, asked(3, 1, answer, TOKENS, begins=True))
    prompt = IMAGE + len(script(3).prompt)
    assert made.work == DraftWork(model_forwards=6, model_rows=prompt + 2 + 5, model_images=1)
    kept = prompt + len(answer) + 3
    made.chains.keys[:, 1, kept:] = made.chains.values[:, 1, kept:] = float("nan")
    answer = (*answer, *tree.tokens.tolist()[1:4], 7)
    (tree,) = drafted(made, asked(3, 1, answer, TOKENS, begins=False))
    is_chain(tree, 7, plain(3, answer, TOKENS))
    assert made.work == DraftWork(model_forwards=12, model_rows=prompt + 2 + 5 + 6, model_images=1), "the root alone"
    everything = (*answer, *tree.tokens.tolist()[1:], 8)
    (tree,) = drafted(made, asked(3, 1, everything, 1, begins=False))
    is_chain(tree, 8, plain(3, everything, 1))
    assert made.work.model_rows == prompt + 2 + 5 + 6 + 2, "the last drafted token had no row yet"


def test_limits_are_each_requests_own_and_what_is_not_wanted_costs_nothing() -> None:
    made = drafter()
    answers = [script(seed).answer[:3] for seed in (1, 2)]
    requests = [asked(seed, slot, answers[slot], 8, begins=True) for slot, seed in enumerate((1, 2))]
    trees = made.draft(requests, [1, 3], last=False)
    assert [tree.depth for tree in trees] == [0, 2]
    assert (made.work.model_forwards, made.work.model_images) == (2, 1)
    (tree,) = drafted(made, replace(requests[0], new=NewRows(torch.empty(1, 0), torch.empty(1, 0))))
    is_chain(tree, answers[0][-1], plain(1, answers[0], TOKENS))


@torch.no_grad()
def counting() -> PackedDecoder:
    """A model that says the next number after each token, whatever came before."""
    made = random_decoder(CONFIG, seed=1, dtype=torch.float64)
    for layer in made.layers:
        layer.out.weight.zero_()  # type: ignore[union-attr, operator]
        layer.down.weight.zero_()  # type: ignore[union-attr, operator]
    made.norm.weight.fill_(1.0)
    made.lm_head.weight.copy_(made.norm(made.embed_tokens.weight).roll(1, dims=0))
    return made


@pytest.mark.parametrize(("lookup", "forwards"), [(0, 25), (1, 13), (4, 5), (10, 3), (63, 1)])
def test_text_that_repeats_itself_takes_fewer_forwards_to_the_same_chain(lookup: int, forwards: int) -> None:
    model: Any = Model(counting())
    made = ModelDrafter(model, tokens=25, slots=1, slot_rows=96, lookup=lookup)
    request = replace(asked(1, 0, (3,), 25, begins=True), layout=prompt_layout(tuple(range(40))))
    (tree,) = drafted(made, request)
    is_chain(tree, 3, tuple(range(4, 29)))
    assert made.work.model_forwards == forwards


def test_lookup_that_is_never_right_costs_rows_and_no_forward() -> None:
    answer = (7, 7, 7, 7)
    plain_, looked_up = drafter(), drafter(lookup=10)
    trees = [drafted(made, asked(1, 0, answer, TOKENS, begins=True))[0] for made in (plain_, looked_up)]
    assert trees[0].tokens.equal(trees[1].tokens) and plain(1, answer, 1) != (7,)
    assert looked_up.work.model_forwards <= plain_.work.model_forwards
    assert looked_up.work.model_rows > plain_.work.model_rows


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_a_chain_ends_at_the_first_nan(lookup: int) -> None:
    made = drafter(lookup=lookup)
    nan = SimpleNamespace(
        decoder=DECODER,
        prompt_layout=lambda _: PromptLayout((1, 2, 3), 3, ()),
        prompt_embeddings=lambda *_: torch.full((3, 32), float("nan"), dtype=torch.float64),
    )
    made._model = nan  # type: ignore[assignment]
    (tree,) = drafted(made, asked(1, 0, (4,), TOKENS, begins=True))
    assert tree.valid.tolist() == [True] + [False] * TOKENS
    assert ((tree.tokens >= 0) & (tree.tokens < 50)).all()


def test_a_chain_grows_without_a_read_back() -> None:
    made = drafter()
    with no_read_back():
        (tree,) = drafted(made, asked(1, 0, script(1).answer[:2], TOKENS, begins=True))
    assert tree.depth == TOKENS


def test_a_slot_that_is_too_short_is_told() -> None:
    with pytest.raises(ValueError, match="beyond its 48 rows"):
        drafted(drafter(63), asked(1, 0, script(1).answer, 63, begins=True))


def test_without_an_observation_it_cannot_see() -> None:
    blind = replace(asked(1, 0, (3,), 4, begins=True), observation=None)
    with pytest.raises(ValueError, match="no observation for the draft model"):
        drafted(drafter(), blind)
