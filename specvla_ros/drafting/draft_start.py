"""Where the trees of some requests begin."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specvla_kernels.send import send
from specvla_ros.drafting.draft_input import DraftInput


@dataclass(frozen=True)
class DraftStart:
    """What the growth of trees is told of their requests; on the device, so that a captured growth can read it.

    Args:
        slots: int64 [requests], of the head's keys and values.
        prefix_lens: int64 [requests], committed rows of the slots.
        rows: int64 [requests], how many of these are new.
        levels: int64 [requests], of drafted tokens.
        nodes: int64 [requests], of the trees at most, the root included.
        places: int64 [requests], the action dimension of the first drafted tokens.
        roots: int64 [requests], the last committed tokens.
        spans: slot and prefix_len of each request once more, on the host; empty where nothing may depend on them.
    """

    slots: Tensor
    prefix_lens: Tensor
    rows: Tensor
    levels: Tensor
    nodes: Tensor
    places: Tensor
    roots: Tensor
    spans: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(inputs: Sequence[DraftInput], nodes: Sequence[int]) -> "DraftStart":
        """Sends them to where the roots are.

        Args:
            inputs: one per request.
            nodes: of each tree at most.
        """
        roots = torch.stack([each.root for each in inputs])
        start = DraftStart.on_device(send(numbers_of(inputs, nodes), roots.device), roots)
        return replace(start, spans=tuple((each.slot, each.prefix_len) for each in inputs))

    @staticmethod
    def on_device(numbers: Tensor, roots: Tensor) -> "DraftStart":
        """From int64 [6, requests], what `numbers_of` says, and the roots."""
        slots, prefix_lens, rows, levels, nodes, places = numbers.unbind()
        return DraftStart(slots, prefix_lens, rows, levels, nodes, places, roots)


def numbers_of(inputs: Sequence[DraftInput], nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """What the host knows, in the order of DraftStart: six rows with a number per request."""
    columns = [
        (each.slot, each.prefix_len, len(each.hidden), each.levels, most, each.place)
        for each, most in zip(inputs, nodes, strict=True)
    ]
    return [*zip(*columns, strict=True)]
