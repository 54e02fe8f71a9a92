# SPDX-License-Identifier: Apache-2.0
"""Trees behind a forward, made by hand or by hypothesis."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from specvla_kernels.compare_drafts import Trees
from specvla_kernels.greedy_choice import greedy_choice
from specvla_kernels.layout import Ancestry
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.speculation.accept import Verification
from specvla_ros.speculation.tree import Tree

VOCAB = 24
ACTIONS = ActionIds(first=12, stop=20, bins=7)  # ids 20 to 23 pad the vocabulary; 12 and 13 decode alike


@dataclass(frozen=True)
class TreeCase:
    """One request's tree after its forward: what the loops of `reference_rules` read.

    Args:
        tree: n nodes.
        choices: int64 [n], the target's.
        logits: float32 [n, vocab].
        hidden: [n, hidden].
        actions: ids of action tokens.
        position: action tokens committed so far.
        visual: [image_tokens, hidden].
    """

    tree: Tree
    choices: Tensor
    logits: Tensor
    hidden: Tensor
    actions: ActionIds
    position: int
    visual: Tensor | None = None

    def verification(self) -> Verification:
        """The same, as the rules see it."""
        tree, ancestry = self.tree, self.tree.ancestry
        columns = (tree.tokens, ancestry.parents, ancestry.depths, ancestry.ancestors)
        flags = (tree.log_probs, tree.valid, tree.relaxable, self.choices)
        position = torch.tensor(self.position, device=tree.tokens.device)
        trees = Trees(*(column[None] for column in (*columns, *flags, position)))
        visual = None if self.visual is None else self.visual[None]
        return Verification(trees, self.actions, tree.depth, self.logits, None, self.hidden[None], visual)


def make_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    *,
    log_probs: Sequence[float] | None = None,
    valid: Sequence[bool] | None = None,
    relaxable: Sequence[bool] | None = None,
) -> Tree:
    ancestry = Ancestry.from_parents(parents)
    return Tree(
        tokens=torch.tensor(tokens),
        ancestry=ancestry,
        log_probs=torch.tensor(log_probs if log_probs is not None else [0.0] * len(tokens)),
        valid=torch.tensor(valid if valid is not None else [True] * len(tokens)),
        relaxable=torch.tensor(relaxable if relaxable is not None else [True] * len(tokens)),
        depth=int(ancestry.depths.max()),
    )


def verify_tree(
    tree: Tree,
    logits: torch.Tensor,
    *,
    actions: ActionIds = ACTIONS,
    position: int = 1,
    hidden: torch.Tensor | None = None,
    visual: torch.Tensor | None = None,
) -> TreeCase:
    states = hidden if hidden is not None else torch.zeros(len(tree), 4)
    return TreeCase(tree, greedy_choice(logits), logits, states, actions, position, visual)


def one_hot(choices: Sequence[int], vocab: int) -> torch.Tensor:
    """Logits whose argmax is given, all others alike."""
    return torch.nn.functional.one_hot(torch.tensor(choices), vocab).float() * 20


@st.composite
def verifications(draw: st.DrawFn, *, chain: bool = False) -> TreeCase:
    """Any tree with text, digits, actions and padding; the target often agrees, or nearly so, and is often unsure."""
    n = draw(st.integers(1, 16))
    parents = [-1, *(node - 1 if chain else draw(st.integers(0, node - 1)) for node in range(1, n))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sharpness = draw(st.sampled_from([0.3, 2.0, 12.0]))
    logits = torch.randn(n, VOCAB, generator=generator) * sharpness
    if draw(st.booleans()):
        logits[:, 8:12] -= 30  # mostly actions
        logits[:, 20:] -= 30
    if draw(st.integers(0, 5)) == 0:
        logits[draw(st.integers(0, n - 1)), 0] = float("nan")
    choices = greedy_choice(logits).tolist()
    tokens = [draw(st.integers(0, VOCAB - 1))]
    for node in range(1, n):
        wanted = choices[parents[node]]
        nearby = [max(0, min(VOCAB - 1, wanted + step)) for step in (-2, -1, 1, 2)]
        tokens.append(draw(st.sampled_from([max(wanted, 0)] * 6 + nearby + [draw(st.integers(0, VOCAB - 1))])))
    tree = make_tree(
        tokens,
        parents,
        log_probs=[
            0.0,
            *draw(st.lists(st.sampled_from([-3.0, -1.0, -0.5, float("-inf")]), min_size=n - 1, max_size=n - 1)),
        ],
        valid=[True, *draw(st.lists(st.sampled_from([True] * 7 + [False]), min_size=n - 1, max_size=n - 1))],
    )
    return verify_tree(
        tree,
        logits,
        position=draw(st.integers(1, 6)),
        hidden=torch.randn(n, 6, generator=generator),
        visual=torch.randn(5, 6, generator=generator),
    )
