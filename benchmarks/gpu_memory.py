"""The most memory that one contestant holds on a GPU, where others keep theirs beside it."""

import gc

import torch
from torch import Tensor, nn


class GpuMemory:
    """Peaks of one contestant: its weights, which are everybody's, and what it allocates itself.

    Args:
        model: whose weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = weight_bytes(model)
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


def weight_bytes(model: nn.Module) -> int:
    """Bytes that parameters and buffers take, wherever they are; those without memory take none."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(_stored_bytes(each) for each in tensors if not each.is_meta)


def _stored_bytes(tensor: Tensor) -> int:
    """A quantised tensor says it has its original's dtype, and flattens to what it keeps."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)
