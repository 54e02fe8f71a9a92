# SPDX-License-Identifier: Apache-2.0
"""Sources of drafted tokens beside the head, and how a tree's children are chosen."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.growth import expand

from specvla_kernels.expand_tree import choose_children
from specvla_kernels.layout import Ancestry
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.speculation.drafters.eagle.tree_growth import (
    TreeGrowth,
    WindowMass,
    split_trees,
    tree_size,
)
from specvla_ros.speculation.drafters.prompt_lookup import look_up
from specvla_ros.speculation.drafters.registry import DraftWork, FinishedAnswer
from specvla_ros.speculation.drafters.temporal import TemporalDrafter
from specvla_ros.speculation.settings import DraftSettings, adjusted
from specvla_ros.speculation.tree import Branches, Tree, with_branches

ACTIONS = ActionIds(first=10, stop=26, bins=15)  # ids 10 and 11 decode alike
VOCAB = 30


# From log-probabilities [b, vocab] and the children's action dimensions, int64 [b], to tokens and scores, both [b, k].
Children = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def window_of(k: int, *bins: int) -> WindowMass:
    made = WindowMass.from_actions(k, ACTIONS, 7, torch.device("cpu"))
    made.tolerate(bins)
    return made


def window_mass(k: int, *bins: int) -> Children:
    window = window_of(k, *bins)

    def children(log_probs: torch.Tensor, dimensions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, scores = choose_children(window.candidates(log_probs[:, None], dimensions, normalised=True), k)
        return tokens[:, 0], scores[:, 0]

    return children


def top_k(k: int) -> Children:
    return lambda log_probs, dimensions: (log_probs.topk(k).indices, log_probs.topk(k).values)


def growth_of(levels: int, k: int) -> TreeGrowth:
    return TreeGrowth(torch.tensor([3]), torch.tensor([levels]), k=k, levels=levels)


def grow(growth: TreeGrowth, children: Children, rows: torch.Tensor, level: int, shift: int = 0) -> None:
    tokens, scores = children(rows, torch.full((len(rows),), level))
    expand(growth, tokens[None] + shift, scores[None])


def finished(growth: TreeGrowth, *, levels: int, k: int, nodes: int) -> Tree:
    return split_trees(growth.finish(torch.tensor([nodes]), nodes), [(tree_size(levels, k, nodes), levels)])[0]


def log_probs(seed: int, rows: int = 3, sharpness: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64) * sharpness).log_softmax(-1)


def test_drafting_starts_from_no_work() -> None:
    assert DraftWork() == DraftWork(0, 0, 0, 0, 0, 0)
    assert (DraftWork(model_rows=3) + DraftWork(model_rows=4, model_images=1)).since(
        DraftWork(model_rows=5)
    ) == DraftWork(model_rows=2, model_images=1)


@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(1, 5))
def test_window_mass_takes_the_likeliest_that_no_sibling_covers(seed: int, r: int, k: int) -> None:
    given_ = log_probs(seed)
    tokens, scores = window_mass(k, *[r] * 7)(given_, torch.full((3,), 3))
    for row, chosen, score in zip(given_.exp().tolist(), tokens.tolist(), scores.tolist(), strict=True):
        left = [row[ACTIONS.stop - 1 - b] for b in range(15)]
        left[14] += row[10]
        for token, found in zip(chosen, score, strict=True):
            bin_ = min(ACTIONS.stop - 1 - token, 14)
            assert left[bin_] == max(left)
            if bin_ == 14:
                assert token == (10 if row[10] >= row[11] else 11), "of two ids that decode alike, the likelier"
            window = range(max(0, bin_ - r), min(15, bin_ + r + 1))
            mass = sum(left[b] for b in window)
            assert found == pytest.approx(torch.tensor(mass, dtype=torch.float64).log().item(), abs=1e-9)
            for covered in window:
                left[covered] = 0.0


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_window_mass_without_tolerance_is_top_k_over_the_bins(seed: int, k: int) -> None:
    given_ = log_probs(seed)
    given_[:, 10] = -torch.inf  # the id that shares its bin
    restricted = torch.full_like(given_, -torch.inf)
    restricted[:, 10:26] = given_[:, 10:26]
    first = torch.zeros(3, dtype=torch.int64)
    ours, likeliest = window_mass(k)(given_, first), top_k(k)(restricted, first)
    assert ours[0].equal(likeliest[0])
    torch.testing.assert_close(ours[1], likeliest[1], atol=1e-9, rtol=1e-6)


def test_each_row_has_the_tolerance_of_its_own_dimension_and_none_beyond() -> None:
    given_ = log_probs(1, rows=1).expand(4, -1)
    mixed, _ = window_mass(4, 5, 0, 2)(given_, torch.tensor([0, 1, 2, 99]))
    for row, r in enumerate((5, 0, 2, 0)):
        assert mixed[row].equal(window_mass(4, r)(given_[:1], torch.zeros(1, dtype=torch.int64))[0][0])
    assert len({tuple(row) for row in mixed.tolist()}) == 3


def test_another_tolerance_is_taken_in_the_same_memory() -> None:
    made = window_of(4, 5, 5)
    memory = made.bins.data_ptr()
    made.tolerate((2,))
    assert made.bins.tolist() == [2] + [0] * 7 and made.bins.data_ptr() == memory


@given(st.data(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 40))
def test_a_grown_tree_is_a_tree_of_the_best(data: st.DataObject, k: int, levels: int, nodes: int) -> None:
    growth = growth_of(levels, k)
    considered = [0.0]
    for level in range(levels):
        beam = growth.beam_tokens.shape[1]
        rows = log_probs(data.draw(st.integers(0, 99)), beam, sharpness=data.draw(st.sampled_from([0.0, 1.0, 40.0])))
        rows = rows.to(torch.float32)
        if data.draw(st.integers(0, 9)) == 0:
            rows[data.draw(st.integers(0, beam - 1))] = torch.nan
        grow(growth, top_k(k), rows, level)
        considered.append(beam * k)
    tree = finished(growth, levels=levels, k=k, nodes=nodes)
    parents, tokens = tree.ancestry.parents.tolist(), tree.tokens.tolist()
    n = len(tree)
    assert n == min(nodes, 1 + int(sum(considered)))
    assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert (
        len({(p, t) for p, t, ok in zip(parents, tokens, tree.valid.tolist(), strict=True) if ok}) == tree.valid.sum()
    )
    assert tree.ancestry.depths.max() <= levels
    for node in range(1, n):
        assert tree.ancestry.depths[node] == tree.ancestry.depths[parents[node]] + 1
        assert tree.ancestry.ancestors[node] == tree.ancestry.ancestors[parents[node]] | 1 << node
        assert tree.log_probs[node] <= tree.log_probs[parents[node]]
    assert tree.valid.equal(tree.log_probs > -torch.inf)


def test_no_child_is_kept_without_its_parent_though_rounding_ranks_it_higher() -> None:
    growth = growth_of(2, 1)
    expand(growth, torch.tensor([[[20]]]), torch.tensor([[[-0.5]]]))
    expand(growth, torch.tensor([[[21]]]), torch.tensor([[[1e-6]]]))
    tree = finished(growth, levels=2, k=1, nodes=2)
    assert tree.tokens.tolist() == [3, 20]


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 6))
def test_a_tree_of_windows_keeps_every_parent(seed: int, k: int, nodes: int) -> None:
    growth = growth_of(4, k)
    for level in range(4):
        rows = log_probs(seed + level, growth.beam_tokens.shape[1], sharpness=5.0).to(torch.float32)
        rows[:, :10] = rows[:, 26:] = -torch.inf  # nearly all of the mass in one window
        # Each level's tokens are made recognisable: a node at the wrong level is seen.
        grow(growth, window_mass(k, *[15] * 7), rows.log_softmax(-1), level, shift=100 * (level + 1))
    tree = finished(growth, levels=4, k=k, nodes=nodes)
    levels = tree.tokens[1:] // 100
    assert levels.equal(tree.ancestry.depths[1:])


def test_temporal_holds_and_extrapolates_within_one_epoch() -> None:
    drafter = TemporalDrafter(ACTIONS)
    assert drafter.chains(0, 1) == []
    drafter.observe(FinishedAnswer(0, (12, 20, 25), (12, 20, 25), stamp_ns=1))
    assert drafter.chains(0, 1) == [(20, 25)]
    drafter.observe(FinishedAnswer(0, (12, 18, 25), (12, 18, 25), stamp_ns=1))
    assert drafter.chains(0, 0) == [(12, 18, 25), (12, 16, 25)]
    assert drafter.chains(0, 2) == [(25,)], "the line is the same as holding still"
    drafter.observe(FinishedAnswer(0, (12, 11, 25), (12, 11, 25), stamp_ns=1))
    assert drafter.chains(0, 1)[1] == (10, 25), "never outside the action ids"
    assert drafter.chains(1, 1) == []
    drafter.observe(FinishedAnswer(1, (13, 13, 13), (13, 13, 13), stamp_ns=1))
    assert drafter.chains(1, 0) == [(13, 13, 13)], "an action of another epoch is no slope"
    drafter.observe(FinishedAnswer(1, (11, 11, 11), (11, 11, 11), stamp_ns=1, stream="another robot"))
    assert drafter.chains(1, 0) == [(13, 13, 13)], "another robot's action is no draft of this one's"
    drafter.forget("another robot")
    assert drafter.chains(1, 0, "another robot") == [] and drafter.chains(1, 0)
    drafter.forget()
    assert drafter.chains(1, 0) == []


def test_temporal_only_holds_ids_whose_neighbours_are_not_similar() -> None:
    drafter = TemporalDrafter(ActionIds(0, 0, bins=1))
    for action in ((91, 90, 89), (90, 90, 88)):
        drafter.observe(FinishedAnswer(0, action, action, stamp_ns=1))
    assert drafter.chains(0, 0) == [(90, 90, 88)]


def test_prompt_lookup_takes_the_longest_and_most_recent_match() -> None:
    def again(*text: int, tokens: int) -> tuple[int, ...]:
        return look_up(text, text, tokens)

    assert again(1, 2, 3, 9, 1, 2, 3, 8, 2, 3, tokens=4) == (8, 2, 3)
    assert again(5, 1, 2, 7, 9, 2, 4, 1, 2, tokens=2) == (7, 9), "two tokens beat one that is nearer"
    assert again(1, 2, 3, tokens=4) == again(4, tokens=4) == again(tokens=4) == ()
    assert again(7, 7, tokens=3) == (7,)
    assert look_up((1, 2, 3, 2), (9, 2), 4) == (3, 2), "what is looked in ends in its own pattern"
    assert look_up((1, 2, 3), (9, 3), 4) == ()


def test_branches_join_what_they_share() -> None:
    branches = Branches.from_chains([(1, 2, 3), (1, 2, 4), (5,)], max_depth=3, max_nodes=9)
    assert branches.tokens == (1, 2, 3, 4, 5)
    assert branches.parents == (-1, 0, 1, 1, -1)
    assert Branches.from_chains([(1, 2, 3), (4,)], max_depth=2, max_nodes=9).tokens == (1, 2, 4)
    assert Branches.from_chains([(1, 2, 3), (4,)], max_depth=3, max_nodes=2).tokens == (1, 2)
    assert len(Branches.from_chains([], max_depth=3, max_nodes=2)) == 0


def test_chains_that_grow_together_end_together() -> None:
    chains = [(1, 2, 3, 4), (1, 5, 6, 7), (), (8,)]
    whole = Branches.level_by_level(chains, max_depth=9, max_nodes=9)
    nodes = [*zip(whole.tokens, whole.parents, strict=True)]
    assert nodes == [(1, -1), (8, -1), (2, 0), (5, 0), (3, 2), (6, 3), (4, 4), (7, 5)]
    assert Branches.level_by_level(chains, max_depth=9, max_nodes=4).tokens == (1, 8, 2, 5)
    assert Branches.level_by_level(chains, max_depth=9, max_nodes=5).tokens == (1, 8, 2, 5, 3)
    assert Branches.level_by_level(chains, max_depth=1, max_nodes=9).tokens == (1, 8)
    faster = (2, 1, 1, 1)
    assert Branches.level_by_level(chains, max_depth=9, max_nodes=5, paces=faster).tokens == (1, 2, 8, 3, 4)
    again = Branches.level_by_level(chains, max_depth=9, max_nodes=9, paces=faster)
    assert sorted(again.tokens) == sorted(whole.tokens)


CPU = torch.device("cpu")


def test_branches_hang_below_the_root_of_any_tree() -> None:
    growth = growth_of(2, 2)
    for level in range(2):
        grow(growth, top_k(2), log_probs(level, growth.beam_tokens.shape[1]), level)
    tree = finished(growth, levels=2, k=2, nodes=6)
    chains = Branches.from_chains([(1, 2, 3), (4,)], max_depth=3, max_nodes=9, relaxable=False)
    more = Branches.from_chains([(9,)], max_depth=3, max_nodes=9)
    both, alone = with_branches([0, 3], [tree, None], [[chains, more], [more, chains]], CPU)
    assert both.tokens.tolist() == [*tree.tokens.tolist(), 1, 2, 3, 4, 9]
    assert both.ancestry.parents.tolist() == [*tree.ancestry.parents.tolist(), 0, 6, 7, 0, 0]
    assert both.depth == 3 and both.ancestry.depths.tolist()[-5:] == [1, 2, 3, 1, 1]
    assert both.relaxable.tolist() == [True] * 6 + [False] * 4 + [True]
    assert both.valid.all() and (both.log_probs[-5:] == -torch.inf).all()
    assert both.log_probs[:6].equal(tree.log_probs.float())
    assert alone.tokens.tolist() == [3, 9, 1, 2, 3, 4]
    assert alone.ancestry.ancestors.tolist() == [0b1, 0b11, 0b101, 0b1101, 0b11101, 0b100001]
    assert alone.depth == 3 and alone.log_probs.tolist() == [0.0] + [-math.inf] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(top_k=0), r"draft\.top_k must be 1 to 64"),
        (dict(nodes=65), r"draft\.nodes must be 1 to 64"),
        (dict(depth=0), r"draft\.depth must be"),
        (dict(top_k=20, depth=5), "80 nodes in one forward"),
        (dict(children="best"), r"draft\.children is 'best'"),
        (dict(prompt_lookup_tokens=64), r"draft\.prompt_lookup_tokens"),
        (dict(self_tokens=64), r"draft\.self_tokens must be 0 to 63, got 64"),
        (dict(self_tokens=-1), r"draft\.self_tokens must be 0 to 63"),
        (dict(self_image_share=0.0), r"draft\.self_image_share must be 0\.001 to 1, got 0\.0"),
        (dict(self_image_share=1.5), r"draft\.self_image_share must be"),
        (dict(self_image_share=float("nan")), r"draft\.self_image_share must be"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        adjusted(DraftSettings(), **arguments)


def test_every_pair_of_sizes_that_is_allowed_fits_a_forward() -> None:
    for k, depth in itertools.product(range(1, 65), range(1, 64)):
        if k * (depth - 1) <= 64:
            assert DraftSettings(top_k=k, depth=depth).beam_nodes <= 64


def test_temporal_text_goes_on_where_this_answer_is() -> None:
    drafter = TemporalDrafter(ACTIONS)
    assert drafter.text((), 4) == drafter.text((9,), 4) == ()
    drafter.observe(FinishedAnswer(3, (1, 2, 3, 4, 2, 3, 5, 12, 20), (12, 20), stamp_ns=1))
    assert drafter.text((), 4) == (1, 2, 3, 4)
    assert drafter.text((1, 9), 2) == (3, 4), "what has changed is a token, and goes on in its place"
    assert drafter.text((1, 2, 3), 9) == (4, 2, 3, 5, 12, 20), "the nearer of two places"
    assert drafter.text((1, 2, 3, 4, 8, 9, 2, 3), 9) == (5, 12, 20), "words more, then the nearer of two places"
    assert drafter.text((9, 9, 2, 3, 4), 2) == (2, 3), "the longest match, wherever it is"
    assert drafter.text((7, 7, 7, 2), 2) == (2, 3), "a single token that comes again is no sign"
    assert drafter.text((1,) * 12, 2) == (), "longer than the answer before"
    drafter.forget()
    assert drafter.text((), 4) == ()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.data())
def test_an_answer_that_repeats_the_one_before_is_drafted_whole_from_everywhere(
    before: list[int], data: st.DataObject
) -> None:
    drafter = TemporalDrafter(ACTIONS)
    drafter.observe(FinishedAnswer(0, tuple(before), (), stamp_ns=1))
    at = data.draw(st.integers(0, len(before)))
    assert drafter.text(before[:at], 99) == tuple(before[at:])
    changed = data.draw(st.integers(0, len(before) - 1))
    other = [*before[:changed], 9]  # one token changed, and what comes again elsewhere is not looked for
    assert drafter.text(other, 99) == tuple(before[changed + 1 :])


def test_temporal_begins_as_the_answer_that_is_still_in_flight() -> None:
    """It is of the image before, and so newer than the last one that was finished."""
    drafter = TemporalDrafter(ACTIONS)
    assert drafter.text((), 4, previous=(8, 7)) == (8, 7), "no answer was finished yet"
    drafter.observe(FinishedAnswer(3, (1, 2, 3, 4, 12, 20), (12, 20), stamp_ns=1))
    assert drafter.text((), 9, previous=(1, 9, 3)) == (1, 9, 3, 4, 12, 20), "and goes on as the last one"
    assert drafter.text((1, 9), 9, previous=(1, 9, 3, 4, 13)) == (3, 4, 13, 20)
    assert drafter.text((1, 2), 2, previous=()) == (3, 4)


def random_branches(data: st.DataObject, nodes: int) -> Branches:
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(nodes)]
    return Branches(tuple(range(1, nodes + 1)), tuple(parents))


@given(st.data(), st.integers(3, 64))
def test_whatever_is_put_together_has_the_ancestry_of_its_parents(data: st.DataObject, nodes: int) -> None:
    mine = data.draw(st.integers(2, nodes - 1))
    first, second = random_branches(data, mine - 1), random_branches(data, nodes - mine)
    tree, other = with_branches([3, 3], [None, None], [[first], [second]], CPU)
    together, below_both = with_branches([3, 3], [tree, None], [[second], [first, second]], CPU)
    for column, same in zip(together.columns, below_both.columns, strict=True):
        assert column.equal(same)
    below = below_both.ancestry.without_root()
    for column, same in zip(below_both.below.columns, below.columns, strict=True):
        assert column.equal(same)
    for made in (tree, together, tree.joined_with(other)):
        expected = Ancestry.from_parents(made.ancestry.parents.tolist())
        assert made.ancestry.depths.equal(expected.depths) and made.ancestry.ancestors.equal(expected.ancestors)
    assert len(tree.joined_with(other)) == nodes
