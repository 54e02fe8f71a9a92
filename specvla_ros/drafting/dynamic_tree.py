"""EAGLE-2's dynamic tree: expansion by cumulative probability, then one ranking of all that was considered."""

import torch
from torch import Tensor

from specvla_kernels.layout import Ancestry
from specvla_ros.drafting.tree import Tree


class TreeGrowth:
    """One tree while it grows; level by level, on the device, with shapes that the host knows.

    Args:
        root: int64 [], the last committed token.
        levels: of drafted tokens.
        nodes: of the finished tree, the root included.
    """

    def __init__(self, root: Tensor, *, levels: int, nodes: int) -> None:
        self._root = root.reshape(1)
        self._levels = levels
        self._nodes = nodes
        # Everything considered, in the order it was; number 0 is the root.
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._considered = 1
        self._beam_scores = torch.zeros(1, device=root.device)
        self._beam_numbers = torch.zeros(1, dtype=torch.int64, device=root.device)
        self.beam_tokens = self._root
        self.beam_parents = torch.full_like(self._root, -1)

    def expand(self, tokens: Tensor, scores: Tensor) -> None:
        """Considers the children of the beam, and makes the best of them the next beam.

        Args:
            tokens: int64 [beam, k].
            scores: [beam, k], log-probability of each child given its parent; NaN counts as impossible.
        """
        k = tokens.shape[1]
        # The rounded sum of a whole window's mass can be 1 + 1e-7: its child would rank before its own parent.
        scores = torch.nan_to_num(scores, nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
        total = (self._beam_scores[:, None] + scores).flatten()
        parents = self._beam_numbers[:, None].expand(-1, k).flatten()
        self._tokens.append(tokens.flatten())
        self._scores.append(total)
        self._parents.append(parents)
        best = total.topk(k).indices if len(total) > k else torch.arange(k, device=total.device)
        self.beam_tokens = tokens.flatten()[best]
        self.beam_parents = best // k
        self._beam_scores = total[best]
        self._beam_numbers = self._considered + best
        self._considered += len(total)

    def finish(self) -> Tree:
        """The best `nodes - 1` of everything considered, level by level; a parent comes with its child.

        A child's score is never above its parent's. Where they are equal, as in low precision, the stable order keeps
        the parent first: a child without its parent, as the published code can choose it, cannot be.
        """
        if not self._tokens or self._nodes == 1:
            return Tree.of_root(self._root)
        tokens, scores, parents = (torch.cat(each) for each in (self._tokens, self._scores, self._parents))
        kept = min(self._nodes - 1, len(tokens))
        chosen = scores.sort(descending=True, stable=True).indices[:kept].sort().values
        node_of = torch.zeros(len(tokens) + 1, dtype=torch.int64, device=tokens.device)
        node_of.scatter_(0, chosen + 1, torch.arange(1, kept + 1, device=tokens.device))
        above = node_of[parents[chosen]]
        ancestry = Ancestry.on_device(torch.cat((torch.full_like(self._root, -1), above)), self._levels)
        log_probs = torch.cat((torch.zeros_like(scores[:1]), scores[chosen]))
        return Tree(
            tokens=torch.cat((self._root, tokens[chosen])),
            ancestry=ancestry,
            log_probs=log_probs,
            valid=log_probs > -torch.inf,
            relaxable=torch.ones_like(log_probs, dtype=torch.bool),
            levels=self._levels,
        )
