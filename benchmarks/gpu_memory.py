"""The most memory that one contestant holds on a GPU, where others keep theirs beside it."""

import gc

import torch
from torch import nn


class GpuMemory:
    """Peaks of one contestant: its weights, which are everybody's, and what it allocates itself.

    Args:
        model: whose weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = sum(each.nbytes for each in model.parameters() if each.is_cuda)
        self._kept = 0  # of its own, from turns before
        self._before = 0

    def begin(self) -> None:
        """In front of a turn: what nobody uses any more is given back."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def end(self) -> int:
        """Behind a turn: the peak in bytes."""
        mine = self._weights + self._kept - self._before
        self._kept += torch.cuda.memory_allocated() - self._before
        return torch.cuda.max_memory_allocated() + mine
