# SPDX-License-Identifier: Apache-2.0
"""The EAGLE draft head as a drafter: it keeps its own keys and values, and grows a tree per request."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specvla_kernels.graph_capture import Capture, Captures, check_rows, randomize
from specvla_kernels.layout import Ancestry, Span, pack_layout
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.speculation.drafters.children import Children, WindowMass, top_k
from specvla_ros.speculation.drafters.eagle_head import EagleHead
from specvla_ros.speculation.drafters.registry import Drafter, DraftInput, DraftWork
from specvla_ros.speculation.drafters.tree_growth import DraftStart, GrownTrees, TreeGrower, tree_size
from specvla_ros.speculation.settings import DraftSettings
from specvla_ros.speculation.tree import Tree

MAX_ROWS = 8  # of a request in a captured draft: what OpenVLA's actions commit at once; more are fed before


class StaticDraft:
    """Feeds the head the newest committed rows of some requests and grows their trees, as it was captured.

    Args:
        grower: the head and its keys and values.
        requests: number of trees.
        depth: of the deepest tree.
        capture: makes it repeatable.

    Raises:
        Exception: whatever the capture raises.
    """

    def __init__(self, grower: TreeGrower, *, requests: int, depth: int, capture: Capture) -> None:
        self._grower = grower
        self._depth = depth
        device = grower.keys.device
        # One committed row each, in a slot that is there: the capture runs too.
        self._numbers = torch.ones((6, requests), dtype=torch.int64, device=device)
        self._numbers[0] = 0
        self._roots = torch.zeros(requests, dtype=torch.int64, device=device)
        shape = (requests, MAX_ROWS, grower.hidden_size)
        self._following = torch.zeros(shape, dtype=grower.keys.dtype, device=device)
        self._hidden = torch.zeros_like(self._following)
        self._none = torch.zeros_like(self._following[0])
        self._replay = capture(self.run)

    def __call__(self, inputs: Sequence[DraftInput], nodes: Sequence[int]) -> GrownTrees:
        """What `TreeGrower.grow` gives, to rounding; nothing is read back.

        Args:
            inputs: one per request, each of at most `MAX_ROWS` rows.
            nodes: maximum of each tree, the root included.
        """
        numbers = torch.tensor(DraftStart.numbers(inputs, nodes), pin_memory=self._numbers.is_cuda)
        self._numbers.copy_(numbers, non_blocking=True)
        torch.stack([request.root for request in inputs], out=self._roots)
        self._fill([request.following for request in inputs], [request.hidden for request in inputs])
        return self._replay().clone()  # the next draft overwrites it

    def run(self) -> GrownTrees:
        """What is captured, launch by launch: the last draft once more."""
        start = DraftStart.on_device(self._numbers, self._roots)
        predicted = self._grower.predict(start, self._following, self._hidden, self._depth)
        return self._grower.grow(start, predicted, self._depth)

    def _fill(self, *states: Sequence[Tensor]) -> None:
        """Each request's rows, then zeros, in one launch."""
        places: list[Tensor] = []
        rows: list[Tensor] = []
        for memory, parts in zip((self._following, self._hidden), states, strict=True):
            for mine, part in zip(memory, parts, strict=True):
                places += mine.split([len(part), len(mine) - len(part)])
                rows += [part, self._none[len(part) :]]
        torch._foreach_copy_(places, rows)


_UNLIKELY = -50.0  # in place of -inf, which has no distance


def check_inputs(decoder: PackedDecoder, requests: int, depth: int, *, prefix_len: int) -> list[DraftInput]:
    """Requests with random rows, of different numbers, each of a depth less than the one before.

    Args:
        decoder: the target.
        requests: number of requests; they have the first slots.
        depth: of the deepest tree.
        prefix_len: committed rows of each slot, at least one.
    """
    generator = torch.Generator().manual_seed(requests)
    config, device = decoder.config, decoder.device
    inputs = []
    for slot in range(requests):
        rows = min(prefix_len, 1 + (slot + depth) % MAX_ROWS)
        hidden = torch.randn(rows, config.hidden_size, generator=generator)
        tokens = torch.randint(config.vocab_size, (rows,), generator=generator).to(device)
        inputs.append(
            DraftInput(
                slot=slot,
                prefix_len=prefix_len,
                hidden=hidden.to(device, decoder.dtype),
                following=decoder.embed_tokens(tokens),
                root=tokens[-1],
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


class EagleDrafter(Drafter):
    """Feeds the head what was committed, and grows trees after it.

    Args:
        head: the draft head.
        decoder: the target, whose embeddings and output head it shares.
        settings: size of the trees.
        slots: maximum of requests in flight.
        slot_rows: maximum of committed rows of a slot.
        children: how a node's children are chosen; by default the likeliest.
        ids: the only ones that an answer has, see TreeGrower; None: it may have any.
        captured_depth: maximum depth of the trees that `capture` is for.

    Attributes:
        committed_rows: maximum of a slot.
        forwards: of the head since it was made.
    """

    def __init__(
        self,
        head: EagleHead,
        decoder: PackedDecoder,
        settings: DraftSettings,
        *,
        slots: int,
        slot_rows: int,
        children: Children | None = None,
        ids: range | None = None,
        captured_depth: int = 0,
    ) -> None:
        self._decoder = decoder
        self._settings = settings
        self._window = children if isinstance(children, WindowMass) else None
        self._captured_depth = captured_depth
        self.committed_rows = slot_rows
        self.forwards = 0
        self._slots = slots
        self._slot_rows = slot_rows + max(settings.beam_nodes, MAX_ROWS + settings.depth)
        self._captured: dict[tuple[int, int], StaticDraft] = {}  # by number of trees that grow, and depth
        self._grower = TreeGrower(
            head,
            decoder,
            k=settings.top_k,
            nodes=settings.nodes,
            slots=slots,
            slot_rows=self._slot_rows,
            children=children or top_k(settings.top_k),
            ids=ids,
        )

    @property
    def work(self) -> DraftWork:
        """Forwards of the head."""
        return DraftWork(head_forwards=self.forwards)

    def set_tolerance(self, bins: tuple[int, ...]) -> None:
        """Gives it to the windows of the children."""
        if self._window is not None:
            self._window.tolerate(bins)

    def draft(
        self, inputs: Sequence[DraftInput], nodes: Sequence[int] | None = None, *, last: bool = True
    ) -> list[Tree]:
        """Feeds the head what was committed and grows the next trees.

        Args:
            inputs: one per request, of different slots.
            nodes: of each tree, the root included; by default, and at most, those of the settings.
            last: makes no difference.
        """
        limits = nodes if nodes is not None else [self._settings.nodes] * len(inputs)
        sizes = {
            request.slot: (min(request.max_depth, self._settings.depth), limit)
            for request, limit in zip(inputs, limits, strict=True)
            if request.max_depth > 0 and limit > 1
        }
        growing = [request for request in inputs if request.slot in sizes]
        if not growing:
            self._keep(inputs)
            return [Tree.from_root(request.root) for request in inputs]
        max_nodes, deepest = [limit for _, limit in sizes.values()], max(depth for depth, _ in sizes.values())
        static = self._captured.get((len(growing), deepest))
        if static is None:
            grown = self._grow(inputs, growing, max_nodes, deepest)
        else:
            left = dict.fromkeys(sizes, MAX_ROWS)
            self._keep([rows for request in inputs if (rows := _but_newest(request, left.get(request.slot, 0)))])
            self.forwards += self._forwards(deepest)
            grown = static([_newest(request) for request in growing], max_nodes)
        k = self._settings.top_k
        trees = iter(grown.split([(tree_size(depth, k, limit), depth) for depth, limit in sizes.values()]))
        return [next(trees) if request.slot in sizes else Tree.from_root(request.root) for request in inputs]

    def capture(self, captures: Captures) -> None:
        """See Capturable: a draft for every number of requests and every depth. Every slot is written to."""
        if self._settings.nodes == 1:  # nothing ever grows
            return
        randomize(self._grower.keys, self._grower.values)
        for requests in range(self._slots, 0, -1):  # the largest first: the others then find memory in its pool
            for depth in range(min(self._captured_depth, self._settings.depth), 0, -1):
                with captures.attempt(f"drafts of {requests} trees with {depth} levels"):
                    static = StaticDraft(self._grower, requests=requests, depth=depth, capture=captures.capture)
                    self._check(static, requests, depth)
                    self._captured[requests, depth] = static

    def release(self) -> None:
        """See Capturable."""
        self._captured = {}

    def _check(self, static: StaticDraft, requests: int, depth: int) -> None:
        """Compares a captured draft with the same work launch by launch, and with a draft of other shapes."""
        inputs = check_inputs(self._decoder, requests, depth, prefix_len=max(1, self.committed_rows // 2))
        nodes = [self._settings.nodes] * requests
        expected = self._grow(inputs, inputs, nodes, depth)
        found = static(inputs, nodes)
        what = f"a captured draft of {requests} trees with {depth} levels"
        check_trees(found, static.run(), dtype=torch.float32, what=what)
        check_trees(found, expected, dtype=self._decoder.dtype, what=what)

    def _forwards(self, depth: int) -> int:
        """Of the head for trees so deep."""
        return depth if self._grower.parallel_depth == 1 else 1

    def _keep(self, inputs: Sequence[DraftInput]) -> None:
        """The head's keys and values of newly committed rows, after which nothing grows yet."""
        if not inputs:
            return
        self.forwards += 1
        following, hidden = [each.following for each in inputs], [each.hidden for each in inputs]
        self._grower.keep(
            following[0] if len(inputs) == 1 else torch.cat(following),
            hidden[0] if len(inputs) == 1 else torch.cat(hidden),
            [(each.slot, row) for each in inputs for row in range(each.prefix_len - len(each.hidden), each.prefix_len)],
        )

    def _feed(self, inputs: Sequence[DraftInput], depths: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The head over the newly committed rows and the masks behind them.

        Args:
            inputs: the requests.
            depths: of the trees that will grow, by slot; the others have no masks.

        Returns:
            By slot, the states [1 + masks, hidden] after the last committed row and each mask.
        """
        if not inputs:
            return {}
        following = torch.cat([request.following for request in inputs])
        fused = self._grower.fuse(following, torch.cat([request.hidden for request in inputs]))
        parts: list[tuple[Span, Ancestry | None]] = []
        packed: list[Tensor] = []
        wanted: list[int] = []  # states of each request
        start = 0
        for request, rows in zip(inputs, fused.split([len(request.hidden) for request in inputs]), strict=True):
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
        """Feeds all requests' rows and grows the trees of some, launch by launch."""
        depths = {request.slot: min(request.max_depth, depth) for request in growing}
        fed = self._feed(inputs, depths)
        self.forwards += self._forwards(depth) - 1
        # No level beyond a tree's own is kept, so any state will do there.
        predicted = pad_sequence([fed[request.slot] for request in growing], batch_first=True)
        return self._grower.grow(DraftStart.from_inputs(growing, nodes), predicted, depth)


def _newest(request: DraftInput) -> DraftInput:
    """With as many rows as a captured draft takes."""
    return replace(request, hidden=request.hidden[-MAX_ROWS:], following=request.following[-MAX_ROWS:])


def _but_newest(request: DraftInput, left: int) -> DraftInput | None:
    """Without its newest `left` rows; None: it has no others."""
    rows = len(request.hidden) - left
    if rows <= 0:
        return None
    hidden, following = request.hidden[:rows], request.following[:rows]
    return replace(request, hidden=hidden, following=following, prefix_len=request.prefix_len - left)
