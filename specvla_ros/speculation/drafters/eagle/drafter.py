# SPDX-License-Identifier: Apache-2.0
"""The EAGLE draft head as a drafter: keeps its own KV cache and grows a tree per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specvla_kernels.device import to_device
from specvla_kernels.finish_tree import GrownTrees
from specvla_kernels.graph_capture import (
    Captures,
    check_errors,
    check_rows,
    fits,
    padded_rows,
    paddings,
    randomize,
    row_errors,
)
from specvla_kernels.layout import Ancestry, Span, pack_layout
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.speculation.drafters.eagle.captured import MAX_ROWS, KeptRows, StaticDraft, StaticKeep, StaticNumbers
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.drafters.eagle.tree_growth import (
    TreeGrower,
    WindowMass,
    split_trees,
    tree_size,
)
from specvla_ros.speculation.drafters.registry import Drafter, DraftInput, DraftWork, NewRows
from specvla_ros.speculation.settings import DraftSettings
from specvla_ros.speculation.tree import Tree

_DRAWS = 4  # of rows to check a captured draft with
_UNLIKELY = -50.0  # instead of -inf, so that differences are finite


class EagleDrafter(Drafter):
    """Feeds committed rows to the head and grows trees after them.

    Args:
        decoder: the target, whose embeddings and output head it shares.
        slot_rows: max committed rows of a slot.
        window: chooses a node's children; None: the most likely tokens.
        ids: the ids possible in an answer, see TreeGrower.
        captured_depth: max depth of trees for `capture`.
    """

    def __init__(
        self,
        head: EagleHead,
        decoder: PackedDecoder,
        settings: DraftSettings,
        *,
        slots: int,
        slot_rows: int,
        window: WindowMass | None = None,
        ids: range | None = None,
        captured_depth: int = 0,
    ) -> None:
        self._decoder, self._settings, self._slots = decoder, settings, slots
        self._window = window
        self._captured_depth = captured_depth
        self.committed_rows = slot_rows
        self.forwards = 0
        self._slot_rows = slot_rows + max(settings.beam_nodes, MAX_ROWS + settings.depth)
        self._captured: dict[tuple[int, int], StaticDraft] = {}  # by number of growing trees and depth
        self._kept: dict[int, StaticKeep] = {}  # by number of rows
        sizes = dict(k=settings.top_k, nodes=settings.nodes, slots=slots, slot_rows=self._slot_rows)
        self._grower = TreeGrower(head, decoder, window=window, ids=ids, **sizes)
        most = StaticDraft.size(self._grower, slots, settings.depth), 2 * max(paddings(1, self.committed_rows))
        self._numbers = StaticNumbers(*most, decoder.device)

    @property
    def work(self) -> DraftWork:
        return DraftWork(head_forwards=self.forwards)

    def set_tolerance(self, bins: tuple[int, ...]) -> None:
        if self._window is not None:
            self._window.tolerate(bins)

    def draft(
        self, inputs: Sequence[DraftInput], nodes: Sequence[int] | None = None, *, last: bool = True
    ) -> list[Tree]:
        """Feeds committed rows to the head and grows the next trees; `nodes` defaults to the settings' number."""
        limits = nodes if nodes is not None else [self._settings.nodes] * len(inputs)
        sizes = {
            request.slot: (min(request.max_depth, self._settings.depth), limit)
            for request, limit in zip(inputs, limits, strict=True)
            if request.max_depth > 0 and limit > 1
        }
        growing = [request for request in inputs if request.slot in sizes]
        if not growing:
            self.forwards += any(len(request.new) for request in inputs)
            if (kept := self._rows_to_keep(inputs)) is not None:
                self._keep(kept)
            return [Tree.from_root(request.root) for request in inputs]
        max_nodes, deepest = [limit for _, limit in sizes.values()], max(depth for depth, _ in sizes.values())
        apart, fed = all(request.new.nodes for request in growing), inputs
        kept = None
        if apart:  # earlier rows only need keys and values
            earlier = [_before_newest(request, MAX_ROWS * (request.slot in sizes)) for request in inputs]
            kept = self._rows_to_keep(earlier)
            growing = fed = [replace(request, new=request.new.newest(MAX_ROWS)) for request in growing]
        static = self._captured.get((len(growing), deepest)) if apart else None
        if kept is not None and (static is None or kept.static is None):
            self._keep(kept)
            kept = None
        if static is None:
            grown = self._grow(fed, growing, max_nodes, deepest)
        else:
            self.forwards += self._forwards(deepest)
            grown = static(growing, max_nodes, kept)
        k = self._settings.top_k
        trees = iter(split_trees(grown, [(tree_size(depth, k, limit), depth) for depth, limit in sizes.values()]))
        return [next(trees) if request.slot in sizes else Tree.from_root(request.root) for request in inputs]

    def capture(self, captures: Captures) -> None:
        """See Capturable: captures drafts of all numbers of requests and depths, and keeps. Overwrites every slot."""
        if self._settings.nodes == 1:  # no tree ever grows
            return
        randomize(self._grower.keys, self._grower.values)
        for rows in sorted(paddings(1, self.committed_rows), reverse=True):
            with captures.attempt(f"draft keys of {rows} rows"):
                self._kept[rows] = self._checked_keep(
                    StaticKeep(self._grower, self._numbers, rows, captures.capture), rows
                )
        for requests in range(self._slots, 0, -1):  # largest first, so that the others reuse its memory pool
            for depth in range(min(self._captured_depth, self._settings.depth), 0, -1):
                with captures.attempt(f"drafts of {requests} trees with {depth} levels"):
                    sizes = dict(requests=requests, depth=depth)
                    static = StaticDraft(self._grower, self._numbers, **sizes, capture=captures.capture)
                    self._check(static, requests, depth)
                    self._captured[requests, depth] = static

    def release(self) -> None:
        self._captured, self._kept = {}, {}

    def _check(self, static: StaticDraft, requests: int, depth: int) -> None:
        """Compares a captured draft with the same work run eagerly, and with a draft of other shapes.

        The kernel that grows whole trees is compared with its reference first.

        Other shapes round differently, which may decide a near tie otherwise and change a tree. Trees that differ are
        drafted again from other rows; a fault shows every time.
        """
        nodes = [self._settings.nodes] * requests
        what = f"a captured draft of {requests} trees with {depth} levels"
        self._grower.check(requests, depth)
        errors: list[Tensor] = []
        for draw in range(_DRAWS):
            inputs = check_inputs(self._decoder, requests, depth, draw, prefix_len=max(1, self.committed_rows // 2))
            expected = self._grow(inputs, inputs, nodes, depth)
            found = static(inputs, nodes)
            check_errors(tree_errors(found, static.again(), what=what), torch.float32, what=what)
            errors.append(tree_errors(found, expected, what=what))
            least = torch.stack(errors).amin(dim=0)
            if fits(least, self._decoder.dtype):
                return
        check_errors(least, self._decoder.dtype, what=what)

    def _checked_keep(self, static: StaticKeep, rows: int) -> StaticKeep:
        """Compares the keys and values written by the capture with those of the same work run eagerly."""
        n = min(rows, self.committed_rows)
        shape = (2, max(1, n - 1), self._grower.hidden_size)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(rows))
        following, hidden = drawn.to(self._decoder.device, self._decoder.dtype)
        places = [*range(len(hidden))], [*range(len(hidden))]  # in the first slot
        stores = self._grower.keys, self._grower.values
        self._grower.keep(following, hidden, to_device(places, hidden.device))
        expected = [store[0, : len(hidden)].flatten(1).clone() for store in stores]
        randomize(*stores)
        static(KeptRows(following, hidden, places))
        for store, wanted in zip(stores, expected, strict=True):
            check_rows(store[0, : len(hidden)].flatten(1), wanted, what=f"captured draft keys of {rows} rows")
        return static

    def _forwards(self, depth: int) -> int:
        return depth if self._grower.parallel_depth == 1 else 1

    def _rows_to_keep(self, inputs: Sequence[DraftInput]) -> KeptRows | None:
        """The new rows that no tree grows from, which need no attention or MLP; None: there are none.

        An answer that lacks only its last token has no further tree to read them.
        """
        parts = [each for each in inputs if len(each.new) and (each.mid_prompt or each.max_depth > 0)]
        if not parts:
            return None
        following, hidden = (_joined([getattr(each.new, name) for each in parts]) for name in ("following", "hidden"))
        places = self._grower.places(parts)
        return KeptRows(following, hidden, places, self._kept.get(padded_rows(len(hidden))))

    def _keep(self, kept: KeptRows) -> None:
        """Writes the head's keys and values of rows."""
        if kept.static is not None:
            kept.static(kept)
        else:
            self._grower.keep(kept.following, kept.hidden, to_device(kept.places, self._decoder.device))

    def _feed(self, inputs: Sequence[DraftInput], depths: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The head's states by slot, [1 + masks, hidden], after the last committed row and each mask of a tree."""
        if not inputs:
            return {}
        following = torch.cat([request.new.following for request in inputs])
        fused = self._grower.head.fuse(following, torch.cat([request.new.hidden for request in inputs]))
        parts: list[tuple[Span, Ancestry | None]] = []
        packed: list[Tensor] = []
        wanted: list[int] = []  # number of states per request
        start = 0
        for request, rows in zip(inputs, fused.split([len(request.new) for request in inputs]), strict=True):
            masks = self._grower.masks((depths or {}).get(request.slot, 1))
            first, n = request.prefix_len - len(rows), len(rows) + len(masks)
            parts.append((Span(request.slot, start, n, first, is_tree=False), None))
            packed += [rows, masks]
            wanted.append(1 + len(masks))
            start += n
        self.forwards += 1
        states = self._grower.forward(torch.cat(packed), pack_layout(parts, self._slot_rows, fused.device))
        return {span.slot: states[span.stop - n : span.stop] for (span, _), n in zip(parts, wanted, strict=True)}

    def _grow(
        self, inputs: Sequence[DraftInput], growing: Sequence[DraftInput], nodes: Sequence[int], depth: int
    ) -> GrownTrees:
        """Feeds all requests' rows and grows the trees of `growing`, eagerly."""
        depths = {request.slot: min(request.max_depth, depth) for request in growing}
        fed = self._feed(inputs, depths)
        self.forwards += self._forwards(depth) - 1
        # Levels beyond a tree's own depth are discarded, so their state is arbitrary.
        predicted = pad_sequence([fed[request.slot] for request in growing], batch_first=True)
        return self._grower.grow(self._grower.start_of(growing, nodes), predicted, depth)


def _before_newest(request: DraftInput, left: int) -> DraftInput:
    """The request without up to `left` of its newest rows written by nodes."""
    before = request.new.before_newest(left)
    return replace(request, new=before, prefix_len=request.prefix_len - len(request.new) + len(before))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def check_inputs(decoder: PackedDecoder, requests: int, depth: int, draw: int, *, prefix_len: int) -> list[DraftInput]:
    """Requests in the first slots with random rows of different counts, each with a lower depth than the previous."""
    generator = torch.Generator().manual_seed(_DRAWS * requests + draw)
    config, device = decoder.config, decoder.device
    states = torch.randn(requests * MAX_ROWS, config.hidden_size, generator=generator).to(device, decoder.dtype)
    inputs = []
    for slot in range(requests):
        rows = min(prefix_len, 1 + (slot + depth) % MAX_ROWS)
        tokens = torch.randint(config.vocab_size, (rows,), generator=generator)
        nodes = range(slot * MAX_ROWS, slot * MAX_ROWS + rows)
        ids = tuple(tokens.tolist())
        new = NewRows(states=states, nodes=tuple(nodes), tokens=ids, embed=decoder.embed_tokens)
        root = tokens[-1].to(device)
        inputs.append(DraftInput(slot, prefix_len, new, root, max_depth=max(1, depth - slot), position=1))
    return inputs


def tree_errors(found: GrownTrees, expected: GrownTrees, *, what: str) -> Tensor:
    """`row_errors` of the trees' sorted log-probabilities, which ignore the choice between equal nodes.

    Raises RuntimeError if roots differ or nothing was drafted.
    """
    if not bool((expected.log_probs[:, 1:] > -torch.inf).any(dim=1).all()):
        raise RuntimeError(f"{what} has no drafts")
    if not found.numbers[0, :, 0].equal(expected.numbers[0, :, 0]):
        raise RuntimeError(f"{what} has other roots")
    return row_errors(*(each.log_probs.clamp(min=_UNLIKELY).sort(dim=1).values for each in (found, expected)))
