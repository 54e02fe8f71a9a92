"""Where the trees of some requests begin."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.send import send
from specvla_ros.drafting.draft_input import DraftInput


@dataclass(frozen=True)
class DraftStart:
    """What the growth of trees is told of their requests; on the device, so that a captured growth can read it.

    Args:
        numbers: int64 [6, requests], what the host knows, see the properties.
        roots: int64 [requests], the last committed tokens.
        spans: slot and prefix_len of each request once more, on the host; empty where nothing may depend on them.
    """

    numbers: Tensor
    roots: Tensor
    spans: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(inputs: Sequence[DraftInput], nodes: Sequence[int]) -> "DraftStart":
        """Sends them to where the roots are.

        Args:
            inputs: one per request.
            nodes: of each tree at most, the root included.
        """
        roots = torch.stack([each.root for each in inputs])
        numbers = send(numbers_of(inputs, nodes), roots.device)
        return DraftStart(numbers, roots, tuple((each.slot, each.prefix_len) for each in inputs))

    @property
    def slots(self) -> Tensor:
        """Int64 [requests], of the head's keys and values."""
        return self.numbers[0]

    @property
    def prefix_lens(self) -> Tensor:
        """Int64 [requests], committed rows of the slots."""
        return self.numbers[1]

    @property
    def rows(self) -> Tensor:
        """Int64 [requests], how many of these are new."""
        return self.numbers[2]

    @property
    def levels(self) -> Tensor:
        """Int64 [requests], of drafted tokens."""
        return self.numbers[3]

    @property
    def nodes(self) -> Tensor:
        """Int64 [requests], of the trees at most."""
        return self.numbers[4]

    @property
    def places(self) -> Tensor:
        """Int64 [requests], the action dimension of the first drafted tokens."""
        return self.numbers[5]


def numbers_of(inputs: Sequence[DraftInput], nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """Six rows with a number per request; arguments as in `DraftStart.of`."""
    columns = [
        (each.slot, each.prefix_len, len(each.hidden), each.levels, most, each.place)
        for each, most in zip(inputs, nodes, strict=True)
    ]
    return [*zip(*columns, strict=True)]
