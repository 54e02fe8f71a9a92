"""EAGLE-2's dynamic trees: expansion by cumulative probability, then one ranking of all that was considered."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.layout import Ancestry
from specvla_ros.drafting.tree import Tree


@dataclass(frozen=True)
class GrownTrees:
    """Finished trees side by side; what a tree does not fill comes last.

    Args:
        numbers: int64 [4, trees, n]: tokens, and the parents, depths and ancestors of Ancestry. Node 0 is the root.
        log_probs: [trees, n].
    """

    numbers: Tensor
    log_probs: Tensor

    def clone(self) -> "GrownTrees":
        """In memory of their own."""
        return GrownTrees(self.numbers.clone(), self.log_probs.clone())

    def split(self, sizes: list[tuple[int, int]]) -> list[Tree]:
        """One by one.

        Args:
            sizes: nodes and levels of each.
        """
        valid, relaxable = self.log_probs > -torch.inf, torch.ones_like(self.log_probs, dtype=torch.bool)
        trees = []
        for i, (n, levels) in enumerate(sizes):
            tokens, *ancestry = self.numbers[:, i, :n].unbind()
            log_probs = self.log_probs[i, :n]
            trees.append(Tree(tokens, Ancestry(*ancestry), log_probs, valid[i, :n], relaxable[i, :n], levels))
        return trees


class TreeGrowth:
    """Some trees while they grow, level by level, on the device; the host knows all shapes.

    Args:
        roots: int64 [trees], the last committed tokens.
        levels: int64 [trees], of drafted tokens; a tree that has them all grows no further.

    Attributes:
        beam_tokens: int64 [trees, beam], the best of the newest level, whose children are considered next.
        beam_parents: int64 [trees, beam], each one's place in the beam before it.
    """

    def __init__(self, roots: Tensor, levels: Tensor) -> None:
        self._roots = roots[:, None]
        self._levels = levels[:, None]
        # Everything considered, in the order it was; number 0 is the root.
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._considered = 1
        self._beam_scores = torch.zeros_like(self._roots, dtype=torch.float32)
        self._beam_numbers = torch.zeros_like(self._roots)
        self.beam_tokens = self._roots
        self.beam_parents = torch.full_like(self._roots, -1)

    def expand(self, tokens: Tensor, scores: Tensor) -> None:
        """Considers the children of the beam, and makes the best of them the next beam.

        Args:
            tokens: int64 [trees, beam, k].
            scores: [trees, beam, k], log-probability of each child given its parent; NaN counts as impossible.
        """
        k = tokens.shape[-1]
        # The rounded sum of a whole window's mass can be 1 + 1e-7: its child would rank before its own parent.
        scores = torch.nan_to_num(scores, nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
        total = (self._beam_scores[:, :, None] + scores).flatten(1)
        total = torch.where(len(self._tokens) < self._levels, total, -torch.inf)
        self._parents.append(self._beam_numbers[:, :, None].expand(-1, -1, k).flatten(1))
        self._tokens.append(tokens.flatten(1))
        self._scores.append(total)
        best = total.topk(k).indices if total.shape[1] > k else torch.arange(k, device=total.device).expand_as(total)
        self.beam_tokens = self._tokens[-1].gather(1, best)
        self.beam_parents = best // k
        self._beam_scores = total.gather(1, best)
        self._beam_numbers = self._considered + best
        self._considered += total.shape[1]

    def finish(self, nodes: Tensor, most: int) -> GrownTrees:
        """The best of everything considered, level by level; a parent comes with its child.

        A child's score is never above its parent's. Where they are equal, as in low precision, the stable order keeps
        the parent first: a child without its parent, as the published code can choose it, cannot be.

        Args:
            nodes: int64 [trees], of each finished tree at most, the root included.
            most: no tree has more.
        """
        tokens, scores, parents = (torch.cat(each, dim=1) for each in (self._tokens, self._scores, self._parents))
        considered = tokens.shape[1]
        kept = min(most - 1, considered)
        places = torch.arange(considered, device=tokens.device)
        ranked = scores.sort(dim=1, descending=True, stable=True).indices[:, :kept]
        # What is over a tree's own limit goes behind all others, where it is nobody's parent.
        chosen = torch.where(places[:kept] < nodes[:, None] - 1, ranked, considered).sort(dim=1).values
        node_of = torch.zeros_like(self._roots).repeat(1, considered + 2)
        node_of.scatter_(1, chosen + 1, (places[:kept] + 1).expand_as(chosen))
        chosen = chosen.clamp(max=considered - 1)
        above = node_of.gather(1, parents.gather(1, chosen))
        of = Ancestry.on_device(torch.cat((torch.full_like(self._roots, -1), above), dim=1), len(self._tokens))
        tokens = torch.cat((self._roots, tokens.gather(1, chosen)), dim=1)
        log_probs = scores.gather(1, chosen)
        return GrownTrees(
            numbers=torch.stack((tokens, of.parents, of.depths, of.ancestors)),
            log_probs=torch.cat((torch.zeros_like(self._roots, dtype=log_probs.dtype), log_probs), dim=1),
        )


def nodes_of(levels: int, k: int, most: int) -> int:
    """Nodes of a finished tree, the root included, where each node has k children and each level's best k go on.

    Args:
        levels: of the tree, at least one.
        k: children, and nodes of a beam.
        most: nodes.
    """
    return min(most, 1 + k + (levels - 1) * k * k)
