# SPDX-License-Identifier: Apache-2.0
"""The draft head behind its drafter: any mix of requests, any split of the rows, and nothing from stale rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.draft_heads import random_head
from support.nightly import examples
from support.no_read_back import no_read_back
from support.static_forwards import recorded, use_table

from benchmarks.random_policy import random_decoder
from specvla_kernels import packed_attention
from specvla_kernels.graph_capture import Captures, paddings
from specvla_kernels.layout import Span, pack_layout
from specvla_ros.models.codecs.bins import ActionTokenizer, BinsCodec
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.config import DecoderShape
from specvla_ros.speculation.drafters.eagle import answer_ids
from specvla_ros.speculation.drafters.eagle.drafter import EagleDrafter
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.drafters.eagle.tree_growth import WindowMass
from specvla_ros.speculation.drafters.registry import DraftInput, NewRows
from specvla_ros.speculation.settings import DraftSettings
from specvla_ros.speculation.tree import Tree

CONFIG = DecoderShape(32, 64, 2, 4, 2, 8, vocab_size=50, max_position_embeddings=128)
DECODER = random_decoder(CONFIG, seed=0, dtype=torch.float64)
HEADS = {"levels": random_head(DECODER, seed=1), "parallel": random_head(DECODER, seed=1, parallel_depth=5)}
SETTINGS = DraftSettings(top_k=3, depth=4, nodes=12)
WINDOW = WindowMass.from_actions(3, ActionIds(30, 46, 15), 7, torch.device("cpu"), text=True)
WINDOW.tolerate((2,) * 7)


@pytest.fixture(scope="module", params=[*HEADS.values()], ids=[*HEADS])
def head(request: pytest.FixtureRequest) -> EagleHead:
    """One that grows trees level by level, and one that drafts all levels in one forward."""
    made: EagleHead = request.param
    return made


def drafter(head: EagleHead, **arguments: Any) -> EagleDrafter:
    made = EagleDrafter(head, DECODER, SETTINGS, slots=4, slot_rows=40, captured_depth=9, **arguments)
    made._grower.keys.fill_(float("nan"))
    made._grower.values.fill_(float("nan"))
    return made


def said(seed: int) -> torch.Tensor:
    """The tokens after each of 40 rows."""
    return torch.randint(50, (40,), generator=torch.Generator().manual_seed(seed))


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States at 40 rows, and embeddings of what comes after each."""
    hidden = torch.randn(40, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return hidden, DECODER.embed_tokens(said(seed))


def request(seed: int, slot: int, prefix: int, first: int, levels: int) -> DraftInput:
    """Rows `first` to `prefix` of the sequence that `seed` makes; some of the first ones are a prompt's."""
    hidden, following = rows(seed)
    tokens = said(seed)
    known = first if first else (prefix - 1) // 2
    new = NewRows(
        hidden[first:known],
        following[first:known],
        hidden,
        nodes=tuple(range(known, prefix)),
        tokens=tuple(tokens[known:prefix].tolist()),
        embed=DECODER.embed_tokens,
    )
    return DraftInput(slot, prefix, new, tokens[prefix - 1], levels, position=1)


def same(one: Tree, other: Tree) -> None:
    assert one.tokens.equal(other.tokens)
    assert one.ancestry.parents.equal(other.ancestry.parents)
    torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-9, rtol=1e-9)
    assert one.depth == other.depth


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=4))
def test_several_requests_at_once_get_what_each_gets_alone(head: EagleHead, wanted: list[tuple[int, int, int]]) -> None:
    requests = [request(seed, slot, prefix, 0, levels) for slot, (seed, prefix, levels) in enumerate(wanted)]
    together = drafter(head).draft(requests)
    for each, tree in zip(requests, together, strict=True):
        same(tree, drafter(head).draft([each])[0])
        assert len(tree) <= SETTINGS.nodes and tree.depth == min(each.max_depth, SETTINGS.depth)
        assert tree.tokens[0] == each.root


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 99), st.lists(st.integers(1, 30), min_size=1, max_size=4, unique=True), st.integers(0, 4))
def test_rows_fed_in_any_split_give_the_same_tree(head: EagleHead, seed: int, ends: list[int], levels: int) -> None:
    ends.sort()
    stepwise, first = drafter(head), 0
    for end in ends:
        # In between a tree is grown too: its scratch rows are written over.
        (tree,) = stepwise.draft([request(seed, 2, end, first, levels)])
        first = end
    same(tree, drafter(head).draft([request(seed, 2, ends[-1], 0, levels)])[0])


def test_a_trees_scratch_rows_are_never_read_again(head: EagleHead) -> None:
    made = drafter(head)
    made.draft([request(5, 2, 9, 0, 4), request(6, 0, 30, 0, 4)])
    for slot, prefix in ((2, 9), (0, 30)):
        made._grower.keys[slot, prefix:] = made._grower.values[slot, prefix:] = float("nan")
    trees = made.draft([request(5, 2, 12, 9, 4), request(6, 0, 31, 30, 4)])
    same(trees[0], drafter(head).draft([request(5, 2, 12, 0, 4)])[0])
    same(trees[1], drafter(head).draft([request(6, 0, 31, 0, 4)])[0])


def test_node_limits_are_each_requests_own(head: EagleHead) -> None:
    trees = drafter(head).draft([request(1, 0, 5, 0, 4), request(2, 1, 9, 0, 4)], nodes=[4, 9])
    for tree, seed, prefix, nodes in zip(trees, (1, 2), (5, 9), (4, 9), strict=True):
        alone = EagleDrafter(head, DECODER, replace(SETTINGS, nodes=nodes), slots=1, slot_rows=40)
        same(tree, alone.draft([request(seed, 0, prefix, 0, 4)])[0])
        assert len(tree) == nodes


def test_where_text_may_come_any_token_is_drafted(head: EagleHead) -> None:
    text, action = replace(request(1, 0, 5, 0, 4), in_text=True, position=0), request(2, 1, 9, 0, 4)
    for requests in ([text, action], [text]):
        trees = drafter(head, window=WINDOW).draft(requests)
        same(trees[0], drafter(head).draft([text])[0])
        if len(trees) > 1:
            same(trees[1], drafter(head, window=WINDOW).draft([action])[0])
    first, stop = WINDOW.actions.first, WINDOW.actions.stop
    assert any(not first <= token < stop for token in trees[0].tokens[1:].tolist())


@pytest.mark.parametrize("window", [False, True])
def test_drafts_of_the_ids_that_may_come_are_those_of_a_target_that_says_no_others(
    head: EagleHead, window: bool
) -> None:
    first, stop = WINDOW.actions.first, WINDOW.actions.stop
    relative = replace(WINDOW, actions=WINDOW.actions.counted_from(first), text=False)
    few = drafter(head, window=relative if window else None, ids=range(first, stop))
    says_no_others = random_decoder(CONFIG, seed=0, dtype=torch.float64)
    says_no_others.head_ids = range(first, stop)
    chosen = replace(WINDOW, text=False) if window else None
    whole = EagleDrafter(head, says_no_others, SETTINGS, slots=4, slot_rows=40, window=chosen)
    requests = [request(1, 0, 5, 0, 4), request(2, 1, 9, 0, 3)]
    trees = few.draft(requests)
    for tree, other in zip(trees, whole.draft(requests), strict=True):
        same(tree, other)
        assert all(first <= token < stop for token in tree.tokens[1:].tolist())
    among_all = drafter(head, window=chosen).draft(requests)
    assert any(not one.log_probs.equal(other.log_probs) for one, other in zip(trees, among_all, strict=True))


def test_only_an_answer_without_text_has_few_ids() -> None:
    tokenizer = ActionTokenizer(46, bins=16)
    codec = BinsCodec(tokenizer, ActionStatistics("some", np.zeros(7), np.ones(7), np.ones(7, dtype=bool)))
    assert answer_ids(codec, 16) == range(30, 46)
    assert answer_ids(codec, 17) is None, "a node would have more children than there are ids"
    assert answer_ids(codec.with_text(9), 3) is None


@pytest.mark.parametrize("on_replay", [False, True])
def test_no_position_is_beyond_the_targets_last(
    head: EagleHead, on_replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that has all its levels is computed with those that have not; so are rows that no request has."""
    short = random_decoder(replace(CONFIG, max_position_embeddings=12), seed=0, dtype=torch.float64)
    made = EagleDrafter(head, short, SETTINGS, slots=2, slot_rows=12, captured_depth=9)
    expected = drafter(head).draft([request(1, 0, 10, 0, 1), request(2, 1, 5, 0, 4)])
    if on_replay:
        use_table(monkeypatch)
        made.capture(Captures(recorded))
    made.draft([request(1, 0, 9, 0, 2), request(2, 1, 4, 0, 4)])
    trees = made.draft([request(1, 0, 10, 9, 1), request(2, 1, 5, 4, 4)])
    for tree, other in zip(trees, expected, strict=True):
        same(tree, other)


def test_each_level_computes_only_its_own_nodes_on_a_cpu(head: EagleHead, monkeypatch: pytest.MonkeyPatch) -> None:
    project, seen = head.project, list[int]()

    def counted(both: torch.Tensor) -> torch.Tensor:
        seen.append(both.shape[:-1].numel())
        return project(both)

    monkeypatch.setattr(head, "project", counted)
    drafter(head).draft([request(3, 0, 7, 0, 4)])
    of_prompt, of_nodes = 3, 4
    assert seen == [of_prompt, of_nodes] + [SETTINGS.top_k] * (3 if head.parallel_depth == 1 else 0)


@pytest.mark.parametrize("chosen", [None, WINDOW], ids=["top_k", "window"])
def test_a_tree_grows_without_a_read_back(head: EagleHead, chosen: Any) -> None:
    made = drafter(head, window=chosen)
    requests = [request(3, 0, 7, 0, 4)]
    with no_read_back():
        (tree,) = made.draft(requests)
    assert len(tree) == SETTINGS.nodes


@pytest.fixture
def captured(head: EagleHead, monkeypatch: pytest.MonkeyPatch) -> EagleDrafter:
    """A drafter whose drafts are run again where a GPU would replay them."""
    use_table(monkeypatch)
    made = EagleDrafter(head, DECODER, SETTINGS, slots=4, slot_rows=40, window=WINDOW, captured_depth=9)
    captures = Captures(recorded)
    made.capture(captures)
    assert captures.count == 4 * SETTINGS.depth + len(set(paddings(1, 40))) and not captures.failed
    made._grower.keys.fill_(float("nan"))
    made._grower.values.fill_(float("nan"))
    monkeypatch.setattr(made, "_grow", None)  # nothing may run as it comes
    monkeypatch.setattr(made._grower, "keep", None)
    return made


# Drafts behind each other: by slot, rows that are new, levels, whether they may be text. A request that would be too
# long begins anew.
ROUNDS = st.lists(
    st.dictionaries(st.integers(0, 3), st.tuples(st.integers(1, 12), st.integers(0, 5), st.booleans()), min_size=1),
    min_size=1,
    max_size=5,
)


def test_an_answer_that_lacks_only_its_last_token_feeds_nothing(head: EagleHead) -> None:
    made = drafter(head)
    made.draft([request(3, 1, 5, 0, 4)])
    before = made._grower.keys.nan_to_num().clone()
    (tree,) = made.draft([request(3, 1, 7, 5, 0)])
    assert len(tree) == 1 and made._grower.keys.nan_to_num().equal(before)
    made.draft([replace(request(3, 1, 7, 5, 0), mid_prompt=True)])
    assert not made._grower.keys.nan_to_num().equal(before), "a chunk of a prompt does"


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROUNDS)
def test_a_captured_draft_gives_the_same_trees(
    head: EagleHead, captured: EagleDrafter, rounds: list[dict[int, tuple[int, int, bool]]]
) -> None:
    """Any number of requests, of rows and of levels, draft behind draft on the same memory."""
    fed: dict[int, int] = {}
    for wanted in rounds:
        requests, whole = [], []
        for slot, (new, levels, text) in wanted.items():
            first = fed.get(slot, 0) if fed.get(slot, 0) + new <= 30 else 0
            fed[slot] = first + new
            asked = request(slot, slot, first + new, first, levels)
            requests.append(replace(asked, in_text=text, mid_prompt=not levels))
            whole.append(replace(request(slot, slot, first + new, 0, levels), in_text=text))
        trees = captured.draft(requests)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_attention, "has_kernels", lambda _: False)
            expected = drafter(head, window=WINDOW).draft(whole)
        for tree, other in zip(trees, expected, strict=True):
            same(tree, other)
            assert tree.ancestry.ancestors.equal(other.ancestry.ancestors) and tree.valid.equal(other.valid)


def test_a_tree_of_its_root_alone_is_not_grown(head: EagleHead) -> None:
    made = drafter(head)
    (tree,) = made.draft([request(1, 0, 5, 0, 4)], nodes=[1])
    assert len(tree) == 1 and tree.depth == 0
    assert made.forwards == 1, "the head saw its rows"
    alone = EagleDrafter(head, DECODER, replace(SETTINGS, nodes=1), slots=1, slot_rows=40, captured_depth=5)
    alone.capture(captures := Captures(recorded))
    assert not captures.count and not captures.failed


@torch.inference_mode()
def test_a_parallel_head_drafts_all_levels_in_one_forward() -> None:
    """Against the definition: the head over the committed rows and a mask per later level, one row at a time.

    Each node's state is its level's, changed by its own token and the state after its parent.
    """
    made = drafter(HEADS["parallel"])
    (tree,) = made.draft([request(3, 1, 7, 0, 4)])
    assert made.forwards == 1
    again = HEADS["parallel"]
    hidden, following = rows(3)
    keys, values = torch.empty(2, 1, 20, 2, 8, dtype=torch.float64)
    fused = torch.cat((again.fuse(following[:7], hidden[:7]), again.mask_rows[:3]))
    states = []
    for row in range(len(fused)):
        layout = pack_layout([(Span(0, 0, 1, row, is_tree=False), None)], 20, fused.device)
        states.append(again(fused[row : row + 1], layout, DECODER.rotation(layout.positions), keys, values))
    taken, given = (each.get_parameter("weight") for each in again.branch)
    depths, parents, log_probs = tree.ancestry.depths.tolist(), tree.ancestry.parents.tolist(), tree.log_probs.tolist()
    after = [states[6][0]]
    for node in range(1, len(tree)):
        parent = parents[node]
        log_p = DECODER.logits(after[parent][None])[0].log_softmax(dim=-1)
        assert tree.tokens[node] in log_p.topk(SETTINGS.top_k).indices
        assert log_probs[node] == pytest.approx(log_probs[parent] + float(log_p[tree.tokens[node]]), abs=1e-5)
        if depths[node] < 4:
            own = torch.cat((DECODER.embed_tokens(tree.tokens[node]), after[parent]))
            after.append(states[6 + depths[node]][0] + given @ taken @ own)
    assert tree.depth == 4 and max(depths) > 1
