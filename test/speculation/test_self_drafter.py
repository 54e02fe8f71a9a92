# SPDX-License-Identifier: Apache-2.0
"""The target as its own drafter, held against greedy decoding of the pruned prompt without a cache."""

import functools
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

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
from specvla_ros.models.target import PromptLayout
from specvla_ros.speculation.drafters import chains
from specvla_ros.speculation.drafters.registry import DraftInput, NewRows
from specvla_ros.speculation.drafters.self_drafter import (
    KEEPS,
    KEPT_ROWS,
    SelfDrafter,
    evenly_spaced_rows,
    most_similar_rows,
)
from specvla_ros.speculation.tree import Tree

CONFIG = DecoderShape(32, 64, 2, 4, 2, 8, vocab_size=50, max_position_embeddings=128)
DECODER = random_decoder(CONFIG, seed=0, dtype=torch.float64)
IMAGE, ANSWER, SLOT_ROWS = 12, 20, 48
SHARES = (0.1, 0.5, 1.0)
KEPT = {0.1: 1, 0.5: 6, 1.0: 12}
EVENLY = {0.1: [0], 0.5: [0, 2, 4, 6, 8, 11], 1.0: list(range(12))}


@dataclass(frozen=True)
class Script:
    """A prompt and an answer that has nothing to do with what the target would say."""

    prompt_ids: tuple[int, ...]
    answer: tuple[int, ...]
    embeddings: Tensor
    hidden: Tensor

    @property
    def prompt_rows(self) -> int:
        return IMAGE + len(self.prompt_ids)


@functools.cache
def script(seed: int) -> Script:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (2 + seed % 6 + ANSWER,), generator=generator)
    words = DECODER.embed_tokens(ids)
    image = torch.randn(IMAGE, 32, generator=generator, dtype=torch.float64)
    embeddings = torch.cat((words[:1], image, words[1:]))
    prompt_ids, answer = ids[:-ANSWER].tolist(), ids[-ANSWER:].tolist()
    return Script(tuple(prompt_ids), tuple(answer), embeddings, hidden_of(embeddings))


def hidden_of(embeddings: Tensor) -> Tensor:
    cache = new_cache(DECODER, slots=1, slot_rows=len(embeddings))
    return packed_forward(DECODER, [Segment(0, 0, embeddings)], cache).hidden


def request(seed: int, slot: int, told: int, levels: int, *, since: int = -1) -> DraftInput:
    """With answer tokens 0 to `told` committed, those up to `since` told before; -1: nothing was."""
    made = script(seed)
    prefix = made.prompt_rows + told
    first = made.prompt_rows + since if since >= 0 else 0
    return DraftInput(
        slot,
        prefix,
        NewRows(made.hidden[first:prefix], made.embeddings[first + 1 : prefix + 1]),
        torch.tensor(made.answer[told]),
        levels,
        position=0,
        layout=PromptLayout(made.prompt_ids, made.prompt_rows, (range(1, 1 + IMAGE),)),
    )


def chunked(whole: DraftInput, ends: list[int]) -> list[DraftInput]:
    """The same request as its rows come in chunks of the prompt that end before these rows."""
    bounds = [0, *sorted({end for end in ends if 0 < end < len(whole.new)}), len(whole.new)]
    return [
        replace(
            whole,
            prefix_len=stop,
            new=NewRows(whole.new.hidden[start:stop], whole.new.following[start:stop]),
            mid_prompt=stop < len(whole.new),
        )
        for start, stop in pairwise(bounds)
    ]


def drafter(share: float, tokens: int = 5, *, keep: str = "uniform") -> SelfDrafter:
    sizes = dict(image_tokens=IMAGE, tokens=tokens, slots=4, slot_rows=SLOT_ROWS)
    made = SelfDrafter(DECODER, image_share=share, keep=keep, **sizes)
    made.chains.keys.fill_(float("nan"))
    made.chains.values.fill_(float("nan"))
    return made


def kept_rows(made: Script, share: float, keep: str) -> list[int]:
    """Image rows, counted from the prompt's first row: as written above, or by a loop over all pairs."""
    if keep == "uniform":
        return [1 + row for row in EVENLY[share]]
    cosine = functools.partial(torch.nn.functional.cosine_similarity, dim=0)
    text = range(1 + IMAGE, made.prompt_rows)
    means = {i: sum(float(cosine(made.hidden[i], made.hidden[j])) for j in text) for i in range(1, 1 + IMAGE)}
    return sorted(sorted(means, key=lambda i: means[i], reverse=True)[: KEPT[share]])


def plain(seed: int, told: int, share: float, tokens: int, keep: str = "uniform") -> tuple[list[int], list[float]]:
    """What the target says over the pruned prompt, every token from the whole sequence."""
    made = script(seed)
    rows = [0, *kept_rows(made, share, keep), *range(1 + IMAGE, made.prompt_rows + told + 1)]
    sequence, said, total = made.embeddings[rows], [], [0.0]
    for _ in range(tokens):
        cache = new_cache(DECODER, slots=1, slot_rows=len(sequence))
        logits = packed_forward(DECODER, [Segment(0, 0, sequence)], cache).logits[0]
        said.append(int(logits.argmax()))
        total.append(total[-1] + float(logits.log_softmax(-1).max()))
        sequence = torch.cat((sequence, DECODER.embed_tokens(torch.tensor(said[-1:]))))
    return said, total


def is_chain(tree: Tree, root: int, said: list[int], log_probs: list[float]) -> None:
    assert tree.tokens.tolist() == [root, *said]
    assert tree.ancestry.parents.tolist() == list(range(-1, len(said)))
    assert tree.depth == len(said) and tree.valid.all() and tree.relaxable.all()
    torch.testing.assert_close(tree.log_probs, torch.tensor(log_probs), atol=1e-5, rtol=1e-5)


def same(one: Tree, other: Tree) -> None:
    assert one.tokens.equal(other.tokens) and one.ancestry.parents.equal(other.ancestry.parents)
    torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-6, rtol=1e-6)
    assert one.valid.all() and other.valid.all() and one.depth == other.depth


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("share", SHARES)
@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 20),
    told=st.integers(0, ANSWER - 1),
    levels=st.integers(0, 7),
    chunks=st.lists(st.integers(1, IMAGE + 8), max_size=3),
)
def test_a_chain_is_what_the_target_says_over_the_pruned_prompt(
    keep: str, share: float, seed: int, told: int, levels: int, chunks: list[int]
) -> None:
    made = drafter(share, keep=keep)
    assert made.kept_image_tokens == KEPT[share]
    within_prompt = [end for end in chunks if end < script(seed).prompt_rows]
    *before, last = chunked(request(seed, 3, told, levels), within_prompt)
    assert all(len(made.draft([chunk])[0]) == 1 for chunk in before) and made.chains.forwards == 0
    (tree,) = made.draft([last])
    is_chain(tree, script(seed).answer[told], *plain(seed, told, share, min(levels, 5), keep))


@settings(max_examples=examples(30), deadline=None)
@given(
    keep=st.sampled_from(KEEPS),
    share=st.sampled_from(SHARES),
    seed=st.integers(0, 20),
    ends=st.lists(st.tuples(st.integers(0, ANSWER - 1), st.integers(0, 5)), min_size=2, max_size=5),
)
def test_what_is_told_in_any_split_gives_the_same_chain(
    keep: str, share: float, seed: int, ends: list[tuple[int, int]]
) -> None:
    made, since = drafter(share, keep=keep), -1
    for told, levels in sorted(dict(ends).items()):
        # With no level left nothing is drafted, and what was told is read when a level is wanted again.
        (tree,) = made.draft([request(seed, 1, told, levels, since=since)])
        same(tree, drafter(share, keep=keep).draft([request(seed, 1, told, levels)])[0])
        since = told


@settings(max_examples=examples(30), deadline=None)
@given(
    share=st.sampled_from(SHARES),
    wanted=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(0, 9), st.integers(0, 6)), min_size=2, max_size=4
    ),
)
def test_several_requests_at_once_get_what_each_gets_alone(
    share: float, wanted: list[tuple[int, int, int, int]]
) -> None:
    together = drafter(share)
    begun = [request(seed, slot, told, 3) for slot, (seed, told, _, _) in enumerate(wanted)]
    later = [
        request(seed, slot, told + more + 1, levels, since=told)
        for slot, (seed, told, more, levels) in enumerate(wanted)
    ]
    trees = [*together.draft(begun), *together.draft(later)]
    assert together.chains.forwards == 3 + min(5, max(each.max_depth for each in later))
    for i, (first, second) in enumerate(zip(begun, later, strict=True)):
        alone = drafter(share)
        same(trees[i], alone.draft([first])[0])
        same(trees[i + len(begun)], alone.draft([second])[0])


@settings(max_examples=examples(20), deadline=None)
@given(share=st.sampled_from(SHARES), last=st.integers(0, 19), next_=st.integers(0, 20), levels=st.integers(0, 5))
def test_a_slot_that_is_given_on_shows_nothing_of_its_last_request(
    share: float, last: int, next_: int, levels: int
) -> None:
    made = drafter(share)
    made.draft([request(last, 2, 9, 5)])
    made.draft([request(last, 2, 15, levels, since=9)])
    (tree,) = made.draft([request(next_, 2, 0, 5)])
    same(tree, drafter(share).draft([request(next_, 2, 0, 5)])[0])


@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 20),
    first=st.integers(1, 6),
    second=st.integers(1, 6),
    told=st.integers(0, 4),
    more=st.integers(1, 3),
)
def test_rows_with_several_positions_keep_theirs_and_pictures_are_pruned_together(
    seed: int, first: int, second: int, told: int, more: int
) -> None:
    """Two pictures with text around them, M-RoPE; against the pruned rows at their own positions, without a cache."""
    decoder = random_decoder(replace(CONFIG, rope_sections=(2, 1, 1)), seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    pictures = (range(1, 1 + first), range(2 + first, 2 + first + second))
    rows = 4 + first + second
    ids = torch.randint(50, (5 + told + more,), generator=generator)  # three of the prompt, then the answer
    positions = torch.randint(0, 9, (3, rows), generator=generator)
    layout = PromptLayout(tuple(ids[:4].tolist()), rows, pictures, positions.numpy())
    behind = int(positions.max()) + 1 + torch.arange(20)
    every = torch.cat((positions, behind.expand(3, -1)), dim=1)
    embedded = torch.randn(rows, 32, generator=generator, dtype=torch.float64)
    embedded[0] = decoder.embed_tokens(ids[:1])[0]
    answer = decoder.embed_tokens(ids[4:])
    whole = torch.cat((embedded, answer))
    visual = [row for picture in pictures for row in picture]
    kept = {visual[i] for i in evenly_spaced_rows(torch.empty(len(visual), 0), torch.empty(0, 0), 2).tolist()}
    drafter_ = SelfDrafter(
        decoder,
        image_tokens=len(visual),
        image_share=2 / len(visual),
        keep="uniform",
        tokens=3,
        slots=1,
        slot_rows=SLOT_ROWS,
    )
    since = 0
    for committed in (1 + told, 1 + told + more):
        stop = rows + committed - 1  # the last committed token is the root
        asked = DraftInput(
            0,
            stop,
            NewRows(torch.zeros(stop - since, 32, dtype=torch.float64), whole[since + 1 : stop + 1]),
            ids[4 + committed - 1],
            3,
            position=0,
            layout=layout,
        )
        (tree,) = drafter_.draft([asked])
        order = [row for row in range(stop + 1) if row not in visual or row in kept]
        sequence, said = whole[order], []
        at = every[:, order]
        for _ in range(3):
            cache = new_cache(decoder, slots=1, slot_rows=len(sequence))
            segment = Segment(0, 0, sequence, positions=at.numpy())
            said.append(int(packed_forward(decoder, [segment], cache).logits[0].argmax()))
            sequence = torch.cat((sequence, decoder.embed_tokens(torch.tensor(said[-1:]))))
            at = torch.cat((at, at[:, -1:] + 1), dim=1)
        assert tree.tokens.tolist() == [int(ids[4 + committed - 1]), *said]
        since = stop


def test_the_chains_own_rows_are_never_read_again() -> None:
    made = drafter(0.5)
    first = request(4, 2, 3, 5)
    made.draft([first])
    behind_root = first.prefix_len - IMAGE + made.kept_image_tokens + 1
    made.chains.keys[:, 2, behind_root:] = made.chains.values[:, 2, behind_root:] = float("nan")
    (tree,) = made.draft([request(4, 2, 5, 5, since=3)])
    is_chain(tree, script(4).answer[5], *plain(4, 5, 0.5, 5))


def test_limits_are_each_requests_own_and_what_is_not_wanted_costs_nothing() -> None:
    made = drafter(0.5)
    requests = [request(1, 0, 2, 5), request(2, 1, 3, 5)]
    assert [tree.depth for tree in made.draft(requests, [1, 3])] == [0, 2]
    assert made.chains.forwards == 2
    assert made.fed_rows == script(2).prompt_rows - IMAGE // 2 + 4, "the prompt and four tokens, for one request"
    assert made.draft([request(1, 0, 4, 0, since=2)])[0].depth == 0 and made.chains.forwards == 2


def test_a_chain_ends_at_the_first_nan() -> None:
    made = drafter(0.5)
    asked = request(1, 0, 2, 5)
    (tree,) = made.draft(
        [replace(asked, new=NewRows(asked.new.hidden, torch.full_like(asked.new.following, float("nan"))))]
    )
    assert tree.valid.tolist() == [True] + [False] * 5
    assert ((tree.tokens >= 0) & (tree.tokens < 50)).all()


def test_a_prompt_that_is_not_whole_is_refused() -> None:
    asked = request(1, 0, 0, 5)
    half = replace(asked, prefix_len=5, new=NewRows(asked.new.hidden[:5], asked.new.following[:5]))
    with pytest.raises(ValueError, match="slot 0 starts with 5 rows, fewer than the prompt's 15"):
        drafter(0.5).draft([half])


def test_image_rows_are_ranked_without_text_too() -> None:
    states = torch.randn(IMAGE, 32, generator=torch.Generator().manual_seed(0))
    assert len(set(most_similar_rows(states, states[:0], 4).tolist())) == 4
    assert most_similar_rows(states, 3 * states[[7]], 1).tolist() == [7], "the length of a state does not count"


@given(st.integers(1, 1024).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_uniform_rows_are_as_far_apart_as_they_can_be(sizes: tuple[int, int]) -> None:
    n, kept = sizes
    rows = evenly_spaced_rows(torch.empty(n, 0), torch.empty(0, 0), kept).tolist()
    assert len(rows) == kept and rows[0] == 0 and rows[-1] == (n - 1 if kept > 1 else 0)
    gaps = {later - row for row, later in pairwise(rows)}
    assert not gaps or (min(gaps) > 0 and max(gaps) - min(gaps) <= 1)


def test_a_tenth_of_openvlas_rows_kept_uniformly() -> None:
    tenth = evenly_spaced_rows(torch.empty(256, 0), torch.empty(0, 0), 26).tolist()
    assert tenth[:6] == [0, 10, 20, 30, 40, 51] and tenth[-3:] == [234, 244, 255]


def test_every_way_that_the_settings_know_is_there() -> None:
    assert tuple(KEPT_ROWS) == KEEPS


@pytest.mark.parametrize("keep", KEEPS)
def test_without_an_image_nothing_is_left_out(keep: str) -> None:
    blind = SelfDrafter(DECODER, image_tokens=0, image_share=0.1, keep=keep, tokens=5, slots=4, slot_rows=SLOT_ROWS)
    words = DECODER.embed_tokens(torch.tensor([3, 1, 4, 1, 5]))
    hidden = hidden_of(words)
    asked = DraftInput(
        0, 4, NewRows(hidden[:4], words[1:]), torch.tensor(5), 3, position=0, layout=PromptLayout((3, 1, 4), 3, ())
    )
    (tree,) = blind.draft([asked])
    said: list[int] = []
    while len(said) < 3:
        cache = new_cache(DECODER, slots=1, slot_rows=len(words))
        said.append(int(packed_forward(DECODER, [Segment(0, 0, words)], cache).logits[0].argmax()))
        words = torch.cat((words, DECODER.embed_tokens(torch.tensor(said[-1:]))))
    assert tree.tokens.tolist() == [5, *said]


@pytest.mark.parametrize("keep", KEEPS)
def test_a_chain_grows_without_a_read_back(keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "look_up", lambda *_: pytest.fail("its own chain needs no prompt lookup"))
    made = drafter(0.5, keep=keep)
    requests: list[Any] = [request(3, 0, 2, 5), request(5, 1, 3, 2)]
    with no_read_back():
        trees = made.draft(requests)
    assert [tree.depth for tree in trees] == [5, 2]


@given(st.lists(st.integers(0, 5), min_size=0, max_size=6), st.integers(1, 6))
def test_joined_trees_keep_every_path(parents: list[int], chain: int) -> None:
    below = [min(parent, i) for i, parent in enumerate(parents)]
    tree, other = a_tree(below, first=10), a_tree(list(range(chain)), first=30)
    both = tree.joined_with(other)
    assert paths(both) == paths(tree) | paths(other)
    assert len(both) == len(tree) + chain and both.depth == max(tree.depth, chain)
    assert both.log_probs.tolist() == [*tree.log_probs.tolist(), *other.log_probs.tolist()[1:]]
    depths = [len(path) - 1 for path in (path_to(both, node) for node in range(len(both)))]
    assert both.ancestry.depths.tolist() == depths
    assert both.joined_with(Tree.from_root(torch.tensor(1))) is both


def a_tree(parents: list[int], *, first: int) -> Tree:
    root = Tree.from_root(torch.tensor(1))
    n = len(parents) + 1
    ancestry = type(root.ancestry).from_parents([-1, *parents])
    tokens = torch.tensor([1, *range(first, first + n - 1)])
    yes = torch.ones(n, dtype=torch.bool)
    return Tree(tokens, ancestry, -torch.arange(n) / first, yes, yes, depth=int(ancestry.depths.max()))


def path_to(tree: Tree, node: int) -> tuple[int, ...]:
    parent = int(tree.ancestry.parents[node])
    above = path_to(tree, parent) if parent >= 0 else ()
    return (*above, int(tree.tokens[node]))


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {path_to(tree, node) for node in range(len(tree))}
