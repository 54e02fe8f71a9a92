# SPDX-License-Identifier: Apache-2.0
"""What the EAGLE drafter does on memory that stays where it is, so that CUDA graphs can capture it; and its checks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specvla_kernels.device import copy_together
from specvla_kernels.finish_tree import GrownTrees
from specvla_kernels.graph_capture import Capture, check_rows
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.speculation.drafters.eagle.tree_growth import DraftStart, TreeGrower
from specvla_ros.speculation.drafters.registry import DraftInput, NewRows

MAX_ROWS = 8  # of a request in a captured draft: what OpenVLA's actions commit at once; more are kept before


class StaticDraft:
    """Feeds the head the newest committed rows of some requests and grows their trees, as it was captured.

    Args:
        requests: number of trees.
        depth: of the deepest tree.
    """

    def __init__(self, grower: TreeGrower, *, requests: int, depth: int, capture: Capture) -> None:
        self._grower = grower
        self._requests = requests
        self._depth = depth
        device, rows = grower.keys.device, requests * MAX_ROWS
        # What the host says, in one piece, so that one copy sends it. One committed row each, in a slot that is there:
        # the capture runs too.
        self._memory = torch.ones(DraftStart.COLUMNS * requests + 2 * rows, dtype=torch.int64, device=device)
        self._memory[:requests] = 0
        columns, self._nodes, tokens = self._memory.split((DraftStart.COLUMNS * requests, rows, rows))
        self._start = grower.start(columns.view(-1, requests))
        self._tokens = tokens.view(requests, MAX_ROWS)
        self._hidden = torch.zeros(requests, MAX_ROWS, grower.hidden_size, dtype=grower.keys.dtype, device=device)
        # Not of the graphs' own memory: what one graph gives may lie where an earlier one, that of the next forward,
        # keeps what is in between, and the trees are verified behind that.
        self._trees = grower.memory(requests, depth)
        self._replay = capture(self._run)

    def __call__(self, inputs: Sequence[DraftInput], nodes: Sequence[int]) -> GrownTrees:
        """`TreeGrower.grow`, to rounding; nothing is read back, and the next call overwrites it.

        Each input has one to `MAX_ROWS` rows, that nodes wrote. `nodes`: maximum of each tree, the root included.
        """
        new = [request.new for request in inputs]
        states, rows = _of_one_forward(new)
        columns = DraftStart.columns(inputs, nodes, roots=[each.tokens[-1] for each in new])
        numbers = [*sum(columns, ()), *_padded(rows), *_padded([each.tokens for each in new])]
        pinned = self._memory.is_cuda
        self._memory.copy_(torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned), non_blocking=True)
        torch.index_select(states, 0, self._nodes, out=self._hidden.view(-1, self._hidden.shape[-1]))
        return self._replay()

    def again(self) -> GrownTrees:
        """The last draft once more, launch by launch, in memory of its own."""
        return self._grow(None)

    def _run(self) -> GrownTrees:
        return self._grow(self._trees)

    def _grow(self, out: GrownTrees | None) -> GrownTrees:
        following = self._grower.embed(self._tokens)
        predicted = self._grower.predict(self._start, following, self._hidden, self._depth)
        return self._grower.grow(self._start, predicted, self._depth, out)


def _of_one_forward(several: Sequence[NewRows]) -> tuple[Tensor, list[list[int]]]:
    """The states [n, hidden] that nodes of several requests are rows of, and these rows, request by request."""
    forwards = list({id(each.states): each.states for each in several}.values())
    starts: dict[int, int] = {}
    start = 0
    for states in forwards:
        starts[id(states)] = start
        start += len(states)
    rows = [[starts[id(each.states)] + node for node in each.nodes] for each in several]
    return forwards[0] if len(forwards) == 1 else torch.cat(forwards), rows


def _padded(rows: Sequence[Sequence[int]]) -> list[int]:
    """`MAX_ROWS` numbers of each request; those beyond its own rows are computed, and not read."""
    return [number for mine in rows for number in (*mine, *[0] * (MAX_ROWS - len(mine)))]


class StaticKeep:
    """Keeps keys and values of committed rows, at most `rows`, as it was captured."""

    def __init__(self, grower: TreeGrower, rows: int, capture: Capture) -> None:
        self._grower = grower
        self._spare = (0, grower.spare_row)
        device = grower.keys.device
        self._places = torch.zeros((2, rows), dtype=torch.int64, device=device)
        self._places[1] = grower.spare_row
        self._following = torch.zeros(rows, grower.hidden_size, dtype=grower.keys.dtype, device=device)
        self._hidden = torch.zeros_like(self._following)
        self._replay = capture(self._run)

    def __call__(
        self, following: Sequence[Tensor], hidden: Sequence[Tensor], places: tuple[list[int], list[int]]
    ) -> None:
        """See `TreeGrower.keep`; nothing is read back.

        `following` and `hidden` are parts [n, hidden]; `places` as `TreeGrower.places` gives them.
        """
        sizes = [len(each) for each in hidden]
        n = sum(sizes)
        # What no request has goes where nobody looks.
        padded = [column + [spare] * (len(self._hidden) - n) for column, spare in zip(places, self._spare, strict=True)]
        self._places.copy_(torch.tensor(padded, pin_memory=self._places.is_cuda), non_blocking=True)
        ours = [memory[:n].split(sizes) for memory in (self._following, self._hidden)]
        copy_together([*ours[0], *ours[1]], [*following, *hidden])
        self._replay()

    def _run(self) -> Tensor:
        self._grower.keep(self._following, self._hidden, self._places)
        return self._hidden


_UNLIKELY = -50.0  # in place of -inf, which has no distance


def check_inputs(decoder: PackedDecoder, requests: int, depth: int, *, prefix_len: int) -> list[DraftInput]:
    """Requests in the first slots with random rows, of different numbers, each less deep than the one before."""
    generator = torch.Generator().manual_seed(requests)
    config, device = decoder.config, decoder.device
    states = torch.randn(requests * MAX_ROWS, config.hidden_size, generator=generator).to(device, decoder.dtype)
    inputs = []
    for slot in range(requests):
        rows = min(prefix_len, 1 + (slot + depth) % MAX_ROWS)
        tokens = torch.randint(config.vocab_size, (rows,), generator=generator)
        nodes = range(slot * MAX_ROWS, slot * MAX_ROWS + rows)
        inputs.append(
            DraftInput(
                slot=slot,
                prefix_len=prefix_len,
                new=NewRows(
                    states=states, nodes=tuple(nodes), tokens=tuple(tokens.tolist()), embed=decoder.embed_tokens
                ),
                root=tokens[-1].to(device),
                max_depth=max(1, depth - slot),
                position=1,
            )
        )
    return inputs


def check_trees(found: GrownTrees, expected: GrownTrees, *, what: str, dtype: torch.dtype) -> None:
    """Compares roots, and how the draft's probability is spread over a tree; which of two like nodes it holds is open.

    Raises:
        RuntimeError: they differ by more than rounding, or nothing was drafted.
    """
    if not bool((expected.log_probs[:, 1:] > -torch.inf).any(dim=1).all()):
        raise RuntimeError(f"{what} has no drafts")
    if not found.numbers[0, :, 0].equal(expected.numbers[0, :, 0]):
        raise RuntimeError(f"{what} has other roots")
    ours, others = (each.log_probs.clamp(min=_UNLIKELY).sort(dim=1).values for each in (found, expected))
    check_rows(ours, others, what=what, dtype=dtype)
