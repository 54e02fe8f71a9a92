# SPDX-License-Identifier: Apache-2.0
"""The draft head's work that CUDA graphs can capture, on static memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.finish_tree import GrownTrees
from specvla_kernels.gather_rows import gather_rows
from specvla_kernels.graph_capture import Capture
from specvla_ros.speculation.drafters.eagle.tree_growth import DraftStart, TreeGrower
from specvla_ros.speculation.drafters.registry import DraftInput, NewRows

MAX_ROWS = 8  # per request in a captured draft, as many as an OpenVLA action commits; earlier rows go to StaticKeep


@dataclass(frozen=True)
class KeptRows:
    """Committed rows whose keys and values the head keeps.

    Args:
        following, hidden: [n, hidden] each, as in `EagleHead.fuse`.
        places: positions of the rows, and their rows among all slots'.
        static: captured work for so many rows; None: it runs eagerly.
    """

    following: Tensor
    hidden: Tensor
    places: tuple[list[int], list[int]]
    static: StaticKeep | None = None


class StaticNumbers:
    """The host's numbers for a captured draft and a captured keep, contiguous so that one copy uploads both.

    A draft's numbers end where a keep's begin, whatever their sizes: at most `draft` and `keep`.
    """

    def __init__(self, draft: int, keep: int, device: torch.device) -> None:
        self._middle = draft + draft % 2  # 16-byte alignment: Triton recompiles a kernel for less aligned pointers
        self._memory = torch.zeros(self._middle + keep, dtype=torch.int64, device=device)

    def of_draft(self, size: int) -> Tensor:
        return self._memory[self._middle - size : self._middle]

    def of_keep(self, size: int) -> Tensor:
        return self._memory[self._middle : self._middle + size]

    def upload(self, draft: Sequence[int], keep: Sequence[int]) -> None:
        """Copies the numbers of both, or of one; nothing is read back."""
        numbers = torch.tensor([*draft, *keep], dtype=torch.int64, pin_memory=self._memory.is_cuda)
        self._memory[self._middle - len(draft) : self._middle + len(keep)].copy_(numbers, non_blocking=True)


class StaticDraft:
    """A CUDA graph that feeds the newest committed rows of some requests to the head, and grows their trees."""

    def __init__(
        self, grower: TreeGrower, numbers: StaticNumbers, *, requests: int, depth: int, capture: Capture
    ) -> None:
        self._grower, self._numbers, self._depth = grower, numbers, depth
        self._rows = MAX_ROWS + len(grower.masks(depth))
        device, rows = grower.keys.device, requests * self._rows
        # Initialised to one committed row per request in a valid slot, since the capture also runs the work.
        memory = numbers.of_draft(self.size(grower, requests, depth)).fill_(1)
        memory[:requests] = 0
        columns, self._nodes, tokens = memory.split((DraftStart.COLUMNS * requests, rows, rows))
        self._start = grower.start(columns.view(-1, requests))
        self._tokens = tokens.view(requests, self._rows)
        self._hidden = torch.zeros(requests, self._rows, grower.hidden_size, dtype=grower.keys.dtype, device=device)
        # Not from the graphs' pool: one graph's results may share memory with the intermediates of an earlier one, the
        # next forward's, and the trees are read after that forward.
        self._trees = grower.memory(requests, depth)
        self._replay = capture(self._run)

    @staticmethod
    def size(grower: TreeGrower, requests: int, depth: int) -> int:
        """Number of numbers that a draft reads."""
        return requests * (DraftStart.COLUMNS + 2 * (MAX_ROWS + len(grower.masks(depth))))

    def __call__(self, inputs: Sequence[DraftInput], nodes: Sequence[int], kept: KeptRows | None = None) -> GrownTrees:
        """`TreeGrower.grow`, up to rounding; nothing is read back, and the next call overwrites the result.

        Each input has 1 to `MAX_ROWS` rows written by nodes. `nodes`: max nodes of each tree including the root.
        `kept`: rows whose captured work runs before, with inputs that come in the same copy and launch.
        """
        new = [request.new for request in inputs]
        states, rows = _of_one_forward(new)
        columns = DraftStart.columns(inputs, nodes, roots=[each.tokens[-1] for each in new])
        tokens = [each.tokens for each in new]
        numbers = [*sum(columns, ()), *_padded(rows, self._rows), *_padded(tokens, self._rows)]
        hidden = self._hidden.flatten(0, 1)
        if kept is None or kept.static is None:
            self._numbers.upload(numbers, ())
            gather_rows(states, self._nodes, hidden, (states[:0],) * 2, (hidden,) * 2)
        else:
            self._numbers.upload(numbers, kept.static.numbers(kept))
            gather_rows(states, self._nodes, hidden, (kept.following, kept.hidden), kept.static.rows)
            kept.static.replay()
        return self._replay()

    def again(self) -> GrownTrees:
        """Repeats the last draft eagerly, in separate memory."""
        return self._grow(None)

    def _run(self) -> GrownTrees:
        return self._grow(self._trees)

    def _grow(self, out: GrownTrees | None) -> GrownTrees:
        following = self._grower.decoder.embed_tokens(self._tokens)
        predicted = self._grower.predict(self._start, following, self._hidden, self._depth)
        return self._grower.grow(self._start, predicted, self._depth, out)


def _of_one_forward(several: Sequence[NewRows]) -> tuple[Tensor, list[list[int]]]:
    """The states [n, hidden] of several requests' forwards, and the nodes' rows in them, per request."""
    forwards = list({id(each.states): each.states for each in several}.values())
    starts: dict[int, int] = {}
    start = 0
    for states in forwards:
        starts[id(states)] = start
        start += len(states)
    rows = [[starts[id(each.states)] + node for node in each.nodes] for each in several]
    return forwards[0] if len(forwards) == 1 else torch.cat(forwards), rows


def _padded(rows: Sequence[Sequence[int]], width: int) -> list[int]:
    """Pads to `width` numbers per request; the padding is computed but not read."""
    return [number for mine in rows for number in (*mine, *[0] * (width - len(mine)))]


class StaticKeep:
    """Captured writing of keys and values of up to `rows` committed rows.

    Attributes:
        rows: memory for the rows' `following` and `hidden`, see KeptRows.
        replay: runs the work on what the memory holds.
    """

    def __init__(self, grower: TreeGrower, numbers: StaticNumbers, rows: int, capture: Capture) -> None:
        self._grower, self._numbers = grower, numbers
        self._spare = (0, grower.spare_row)
        self._places = numbers.of_keep(2 * rows).view(2, rows)
        for column, spare in zip(self._places, self._spare, strict=True):
            column.fill_(spare)
        following = torch.zeros(rows, grower.hidden_size, dtype=grower.keys.dtype, device=grower.keys.device)
        self.rows = following, torch.zeros_like(following)
        self.replay = capture(self._run)

    def __call__(self, kept: KeptRows) -> None:
        """`TreeGrower.keep`; nothing is read back."""
        self._numbers.upload((), self.numbers(kept))
        whole = kept.following, kept.hidden
        gather_rows(kept.hidden, self._places[0, :0], kept.hidden[:0], whole, self.rows)
        self.replay()

    def numbers(self, kept: KeptRows) -> list[int]:
        """The rows' places; padding goes to the spare row, which is never read."""
        padding = self._places.shape[1] - len(kept.hidden)
        columns = zip(kept.places, self._spare, strict=True)
        return [number for column, spare in columns for number in (*column, *[spare] * padding)]

    def _run(self) -> Tensor:
        self._grower.keep(*self.rows, self._places)
        return self.rows[1]
