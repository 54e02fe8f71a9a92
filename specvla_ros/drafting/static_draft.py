"""A draft of fixed size on memory that stays where it is, so that it can be captured once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specvla_kernels.graph_capture import Capture
from specvla_ros.drafting.draft_input import DraftInput
from specvla_ros.drafting.draft_start import DraftStart, numbers_of
from specvla_ros.drafting.dynamic_tree import GrownTrees
from specvla_ros.drafting.tree_grower import TreeGrower

MOST_ROWS = 8  # of a request: what OpenVLA's actions commit at once; whatever is more is fed before


class StaticDraft:
    """Feeds the head the newest committed rows of some requests and grows their trees, as it was captured.

    Args:
        grower: whose head and memory.
        requests: that it drafts for.
        levels: of the highest tree.
        capture: makes it repeatable.

    Raises:
        Exception: whatever the capture raises.
    """

    def __init__(self, grower: TreeGrower, *, requests: int, levels: int, capture: Capture) -> None:
        self._grower = grower
        self._levels = levels
        device = grower.keys.device
        # One committed row each, in a slot that is there: the capture runs too.
        self._numbers = torch.ones((6, requests), dtype=torch.int64, device=device)
        self._numbers[0] = 0
        self._roots = torch.zeros(requests, dtype=torch.int64, device=device)
        shape = (requests, MOST_ROWS, grower.hidden_size)
        self._following = torch.zeros(shape, dtype=grower.keys.dtype, device=device)
        self._hidden = torch.zeros_like(self._following)
        self._none = torch.zeros_like(self._following[0])
        self._replay = capture(self.run)

    def __call__(self, inputs: Sequence[DraftInput], nodes: Sequence[int]) -> GrownTrees:
        """What `TreeGrower.grow` gives, to rounding; nothing is read back.

        Args:
            inputs: one per request, each with `MOST_ROWS` rows at most; none may be text.
            nodes: of each tree at most, the root included.
        """
        numbers = torch.tensor(numbers_of(inputs, nodes), pin_memory=self._numbers.is_cuda)
        self._numbers.copy_(numbers, non_blocking=True)
        torch.stack([each.root for each in inputs], out=self._roots)
        self._fill(self._following, [each.following for each in inputs])
        self._fill(self._hidden, [each.hidden for each in inputs])
        return self._replay().clone()  # the next draft overwrites it

    def run(self) -> GrownTrees:
        """What is captured, launch by launch: the last draft once more."""
        start = DraftStart.on_device(self._numbers, self._roots)
        foreseen = self._grower.foresee(start, self._following, self._hidden)
        return self._grower.grow(start, foreseen, self._levels)

    def _fill(self, memory: Tensor, rows: Sequence[Tensor]) -> None:
        """Each request's rows, and zeros behind them."""
        parts = [part for each in rows for part in (each, self._none[len(each) :])]
        torch.cat(parts, out=memory.flatten(0, 1))
