# SPDX-License-Identifier: Apache-2.0
"""The repetition penalty: kernel, reference and transformers' own processor agree at every node of several trees."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE
from support.nightly import examples
from transformers import RepetitionPenaltyLogitsProcessor

from specvla_kernels.layout import Ancestry
from specvla_kernels.repetition_penalty import (
    EarlierIds,
    penalised_choice,
    penalised_choice_reference,
    penalised_choice_triton,
)

pytest.importorskip("triton")

VOCAB = 12
Request = tuple[
    list[int], list[tuple[int, float]]
]  # earlier ids; tokens, and where among the nodes before the parent is
REQUESTS = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=600),
    st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(0, 0.99)), min_size=1, max_size=9),
)


def parents_of(nodes: list[tuple[int, float]]) -> list[int]:
    return [int(where * node) if node else -1 for node, (_, where) in enumerate(nodes)]


def expected(logits: torch.Tensor, penalty: float, requests: list[Request]) -> torch.Tensor:
    """One node at a time, by transformers."""
    processor, rows = RepetitionPenaltyLogitsProcessor(penalty), iter(logits.split(1))
    found = []
    for earlier, nodes in requests:
        paths: list[list[int]] = []
        for (token, _), parent in zip(nodes, parents_of(nodes), strict=True):
            paths.append([*paths[parent], token] if parent >= 0 else [])
            found.append(processor(torch.tensor([[*earlier, *paths[-1]]]), next(rows).clone()))
    return torch.cat(found)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(REQUESTS, min_size=1, max_size=3),
    st.sampled_from([0.5, 1.05, 2.0]),
    st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1),
    st.integers(0, 9),
)
def test_every_node_is_penalised_as_its_own_path_would_be(
    requests: list[Request], penalty: float, left_out: set[int], seed: int
) -> None:
    sizes = [len(nodes) for _, nodes in requests]
    logits = torch.randn(sum(sizes), VOCAB, generator=torch.Generator().manual_seed(seed))
    excluded = torch.tensor([token in left_out for token in range(VOCAB)])
    right = expected(logits, penalty, requests).masked_fill(excluded, -torch.inf)
    tokens = torch.tensor([token for _, nodes in requests for token, _ in nodes])
    ancestors = torch.cat([Ancestry.from_parents(parents_of(nodes)).ancestors for _, nodes in requests])
    ids, of_nodes = map(torch.tensor, EarlierIds.numbers([earlier for earlier, _ in requests], sizes))
    for run in (penalised_choice_reference, penalised_choice_triton, penalised_choice):
        changed = logits.to(DEVICE)
        changed = changed.clone() if changed is logits else changed
        earlier = EarlierIds(ids.to(DEVICE), of_nodes.view(3, -1).to(DEVICE))
        where = tokens.to(DEVICE), ancestors.to(DEVICE), earlier, excluded.to(DEVICE) if left_out else None
        choices = run(changed, penalty, *where)
        torch.testing.assert_close(changed.cpu(), right, rtol=1e-6, atol=0)
        assert choices.tolist() == changed.argmax(dim=1).tolist()


def test_a_token_outside_the_vocabulary_counts_as_its_nearest_end() -> None:
    """Padding may hold any number, and a read outside of the logits is an error on a GPU."""
    logits = torch.full((2, VOCAB), 4.0)
    ids, of_nodes = torch.tensor([3]), torch.tensor([[0, 0], [0, 0], [1, 1]])
    tokens, ancestors = torch.tensor([0, 99], device=DEVICE), torch.tensor([1, 3], device=DEVICE)
    earlier = EarlierIds(ids.to(DEVICE), of_nodes.to(DEVICE))
    for run in (penalised_choice_reference, penalised_choice_triton):
        found = logits.clone().to(DEVICE)
        run(found, 2.0, tokens, ancestors, earlier)
        assert found[1].nonzero().flatten().tolist() == list(range(VOCAB))
        assert (found == 2.0).nonzero().tolist() == [[0, 3], [1, 3], [1, VOCAB - 1]]
