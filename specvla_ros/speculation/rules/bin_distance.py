"""Bin-distance acceptance: an action token near the target's own choice will do (Spec-VLA, section 4.2)."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specvla_ros.speculation.accept import AcceptReason, Judgement, Verification


@dataclass(frozen=True)
class BinDistance:
    """Keeps an action token at most r bins from the target's own choice for the same prefix (Spec-VLA eq. 5).

    Distances are between bins, not ids: the two lowest action ids decode alike. The published code compares raw ids of
    any token, so that with r = 9 it also takes ids that are no actions, and the -1 that pads its shorter paths.

    Args:
        bins: r per action dimension; a dimension beyond the last is strict.
    """

    bins: tuple[int, ...]
    needs_visual: bool = False

    def judge(self, verification: Verification) -> Judgement:
        """Exact tokens, and action tokens within the tolerance of their dimension."""
        exact = verification.exact
        near = verification.both_actions & (verification.bins_off <= self._tolerance(verification))
        why = torch.where(exact, int(AcceptReason.EXACT), int(AcceptReason.NEAR))
        return Judgement((exact | near).expand(len(exact), -1), why)

    def _tolerance(self, verification: Verification) -> Tensor:
        """int64 [n]: r of each node's dimension."""
        is_action = verification.actions.contain(verification.tree.tokens)
        is_action = is_action & (verification.tree.ancestry.parents >= 0)
        before = (verification.on_path & is_action).sum(dim=1) - is_action.to(torch.int64)
        dimension = verification.place + before
        # A step function of the dimension: its numbers travel with the launches, where a table would be a copy from the
        # host, which waits for the device and cannot be captured in a CUDA graph.
        tolerance = torch.zeros_like(dimension)
        for first, (last, r) in enumerate(pairwise((0, *self.bins, 0))):
            if r != last:
                tolerance = tolerance + (dimension >= first) * (r - last)
        return tolerance
