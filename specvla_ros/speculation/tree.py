# SPDX-License-Identifier: Apache-2.0
"""The draft tree: drafted tokens and their ancestry on the device, and nodes that the host knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from specvla_kernels.layout import Ancestry


@dataclass(frozen=True)
class Tree:
    """Drafted tokens below a root; the root is node 0, the last committed token."""

    tokens: Tensor  # int64 [n]
    ancestry: Ancestry  # of the n nodes; only the root's parent is -1
    # float32 [n], the draft's log-probability of the path to the node: 0 at the root, -inf if unknown.
    log_probs: Tensor
    valid: Tensor  # bool [n]; False marks padding, which is never accepted. The root is valid
    relaxable: Tensor  # bool [n]; False: accepted only if it is the target's own choice, regardless of the rule
    depth: int  # upper bound of the nodes' depths, known to the host
    uploaded_below: Ancestry | None = None  # `below`, if the host knew all nodes

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def below(self) -> Ancestry:
        """The ancestry of the nodes after the root, for a forward in which the root ends another segment."""
        return self.uploaded_below or self.ancestry.without_root()

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """All columns, in the order of the kernels' `Nodes`."""
        return self.tokens, *self.ancestry.columns, self.log_probs, self.valid, self.relaxable

    @staticmethod
    def from_root(root: Tensor) -> Tree:
        """The one-node tree of a plain decode step, from a token, int64 [] or [1]."""
        return replace(_single(root.device), tokens=root.reshape(1))

    def joined_with(self, other: Tree) -> Tree:
        """Merges both trees' drafted nodes below their common root, without reading their values.

        A token in both trees occurs twice in the result, but is accepted only once.
        """
        import torch

        from specvla_kernels.layout import Ancestry

        if len(other) == 1:
            return self
        if len(self) == 1:
            return other
        # The other's root becomes this one's; its other nodes follow all of this one's.
        mine, above, n = self.ancestry, other.ancestry.parents[1:], len(self)
        return Tree(
            tokens=torch.cat((self.tokens, other.tokens[1:])),
            ancestry=Ancestry(
                parents=torch.cat((mine.parents, torch.where(above == 0, 0, above + n - 1))),
                depths=torch.cat((mine.depths, other.ancestry.depths[1:])),
                ancestors=torch.cat((mine.ancestors, other.ancestry.ancestors[1:] >> 1 << n | 1)),
            ),
            log_probs=torch.cat((self.log_probs, other.log_probs[1:])),
            valid=torch.cat((self.valid, other.valid[1:])),
            relaxable=torch.cat((self.relaxable, other.relaxable[1:])),
            depth=max(self.depth, other.depth),
        )


@cache  # only its token varies, so making a one-node tree launches nothing
def _single(device: torch.device) -> Tree:
    import torch

    from specvla_kernels.layout import Ancestry

    none = torch.zeros(1, dtype=torch.int64, device=device)
    yes = torch.ones(1, dtype=torch.bool, device=device)
    ancestry = Ancestry(torch.full_like(none, -1), none, torch.ones_like(none))
    return Tree(none, ancestry, torch.zeros(1, device=device), valid=yes, relaxable=yes, depth=0)


_NUMBERS = 7  # int64 columns: tokens, ancestry, and the ancestry of the nodes after the root


@dataclass(frozen=True)
class Branches:
    """Nodes that the host knows: chains that start at the root, with common prefixes merged."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # index of each node's parent among these nodes; -1: the root
    relaxable: bool = True  # False: nodes are accepted only if they are the target's own choice

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def from_chains(
        chains: Sequence[Sequence[int]], *, max_depth: int, max_nodes: int, relaxable: bool = True
    ) -> Branches:
        """Merges chains, each cut to `max_depth` tokens; tokens beyond `max_nodes` in total are left out."""
        whole = [max_depth] * len(chains)
        sizes = dict(max_depth=max_depth, max_nodes=max_nodes)
        return Branches.level_by_level(chains, **sizes, paces=whole, relaxable=relaxable)

    @staticmethod
    def level_by_level(
        chains: Sequence[Sequence[int]],
        *,
        max_depth: int,
        max_nodes: int,
        paces: Sequence[int] = (),
        relaxable: bool = True,
    ) -> Branches:
        """Merges chains grown in turn, so that all end within one level of each other when nodes run out.

        `paces` is the number of tokens that each chain grows by per turn, i.e. its share of the nodes; 1 by default.
        """
        nodes: dict[tuple[int, int], int] = {}
        ends, grown, growing = [-1] * len(chains), [0] * len(chains), True
        while growing and len(nodes) < max_nodes:
            growing = False
            for i, chain in enumerate(chains):
                for token in chain[grown[i] : min(grown[i] + (paces[i] if paces else 1), max_depth)]:
                    node = (ends[i], token)
                    if node not in nodes and len(nodes) >= max_nodes:
                        break
                    ends[i] = nodes.setdefault(node, len(nodes))
                    grown[i] += 1
                    growing = True
        tokens, parents = tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes)
        return Branches(tokens, parents, relaxable)


NO_BRANCHES = Branches((), ())


def with_branches(
    roots: Sequence[int], grown: Sequence[Tree | None], branches: Sequence[Sequence[Branches]], device: torch.device
) -> list[Tree]:
    """Makes trees of the nodes that the host knows, below those grown on the device.

    All trees together take one copy to the device, and one launch if there are grown nodes. The probability of the
    host's nodes is unknown: their log_probs are -inf, which loses ties. A token that occurs in both parts is accepted
    only once.

    Args:
        roots: the roots' tokens.
        grown: each root's tree on the device; None: the root alone.
        branches: each root's nodes to add.
    """
    import torch

    from specvla_kernels.device import copy_together

    firsts = [1 if tree is None else len(tree) for tree in grown]
    sizes = [first + sum(map(len, more)) for first, more in zip(firsts, branches, strict=True)]
    words = [_sections(n)[-1].stop for n in sizes]
    # New memory each time: the copy may still be running at the next draft.
    memory = torch.zeros(sum(words), dtype=torch.int64, pin_memory=device.type == "cuda")
    host = memory.numpy()
    starts = accumulate(words, initial=0)
    depths = [_write(host[next(starts) :], *each) for each in zip(sizes, roots, firsts, branches, strict=True)]
    trees = []
    places: list[Tensor] = []
    values: list[Tensor] = []
    there = memory.to(device, non_blocking=True).split(words)
    for part, n, tree, depth in zip(there, sizes, grown, depths, strict=True):
        made = _in_memory(part, n, depth, below=tree is None)
        if tree is not None:
            made = replace(made, depth=max(depth, tree.depth))
            places += [column[: len(tree)] for column in made.columns]
            values += tree.columns
        trees.append(made)
    copy_together(places, values)
    return trees


@cache
def _sections(n: int) -> tuple[slice, slice, slice, slice]:
    """Sections of the memory of n nodes, in words of 8 bytes: numbers, log_probs, valid and relaxable."""

    def even(words: int) -> int:  # 16-byte alignment: Triton recompiles a kernel for less aligned pointers
        return words + words % 2

    flags = even(-(-n // 8))
    a, b, c, d = accumulate((_NUMBERS * even(n), even(-(-n // 2)), flags, flags))
    return slice(0, a), slice(a, b), slice(b, c), slice(c, d)


def _in_memory(memory: Tensor, n: int, depth: int, *, below: bool) -> Tree:
    """A tree of n nodes whose columns are in one contiguous memory, int64 [words].

    `below`: the memory holds the ancestry of the nodes after the root, too.
    """
    import torch

    from specvla_kernels.layout import Ancestry

    numbers, log_probs, valid, relaxable = (memory[section] for section in _sections(n))
    tokens, *above = numbers.view(_NUMBERS, -1)[:, :n].unbind()
    return Tree(
        tokens,
        Ancestry(*above[:3]),
        log_probs.view(torch.float32)[:n],
        valid.view(torch.bool)[:n],
        relaxable.view(torch.bool)[:n],
        depth,
        uploaded_below=Ancestry(*(column[: n - 1] for column in above[3:])) if below else None,
    )


def _write(memory: NDArray[np.int64], n: int, root: int, first: int, branches: Sequence[Branches]) -> int:
    """Writes the root and, from node `first` on, the host's nodes, as `_in_memory` lays them out; returns their depth.

    The nodes between are overwritten on the device.
    """
    from specvla_kernels.layout import ancestry_columns

    tokens, parents, relaxable = [root, *[0] * (first - 1)], [-1, *[0] * (first - 1)], [True] * first
    for each in branches:
        start = len(tokens)
        tokens += each.tokens
        parents += [start + parent if parent >= 0 else 0 for parent in each.parents]
        relaxable += [each.relaxable] * len(each)
    whole = ancestry_columns(parents)
    below = ancestry_columns([parent - 1 for parent in parents[1:]])
    numbers, log_probs, valid, may_relax = (memory[section] for section in _sections(n))
    numbers = numbers.reshape(_NUMBERS, -1)
    numbers[:4, :n] = tokens, *whole
    numbers[4:, : n - 1] = below
    log_probs.view(np.float32)[first:n] = -np.inf
    valid.view(np.bool_)[:n] = True
    may_relax.view(np.bool_)[:n] = relaxable
    return max(whole[1])
