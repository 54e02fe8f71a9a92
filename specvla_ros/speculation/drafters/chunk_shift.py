# SPDX-License-Identifier: Apache-2.0
"""Drafts the chunk of actions before, shifted by the actions that have passed since: no forward, no training.

A policy that answers each picture with a chunk of actions says most of them again a picture later, one or more steps
further on. The chunk before, without what has passed and encoded anew, is therefore close to the next answer. Ours:
nothing published drafts across the overlap of chunks. Verified strictly, it changes no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.branches import Branches
from specvla_ros.speculation.drafters.registry import DraftContext, Drafter, DraftInput, drafter

if TYPE_CHECKING:
    import torch

    from specvla_ros.models.codecs.codec import Codec
    from specvla_ros.speculation.tree import Tree


@dataclass(frozen=True)
class ChunkShiftSettings:
    """Whether the chunk before is drafted."""

    enabled: bool = parameter(
        False,
        "Draft the chunk of actions before, shifted by what has passed since. For policies that answer with chunks and "
        "are asked again before the chunk's end.",
        name="chunk_shift",
    )


@dataclass(frozen=True)
class _Chunk:
    """An answer that was finished: its actions [horizon, dims], and the tokens before and behind theirs."""

    epoch: int
    stamp_ns: int
    actions: np.ndarray
    before: tuple[int, ...]
    behind: tuple[int, ...]


class ChunkShiftDrafter(Drafter):
    """Remembers the newest chunk of an instruction epoch.

    Its drafts are never relaxed: accepted because it is near, a chunk would be followed for ever.

    Args:
        codec: of the policy.
        step_s: seconds that an action takes; 0: an action has passed from picture to picture, whenever they came.
        device: of the trees.
    """

    def __init__(self, codec: Codec, step_s: float, device: torch.device | None = None) -> None:
        self._codec = codec
        self._step_s = step_s
        self._device = device
        self._last: _Chunk | None = None
        self._encoded: dict[int, tuple[int, ...]] = {}  # by actions that have passed

    def observe(self, epoch: int, answer: tuple[int, ...], action: tuple[int, ...], *, stamp_ns: int) -> None:
        """Takes a finished answer; of several in flight the newest stays."""
        if self._last is not None and self._last.epoch == epoch and self._last.stamp_ns >= stamp_ns:
            return
        text = len(self._codec.text_tokens(answer))
        behind = answer[text + len(action) :]
        self._last = _Chunk(epoch, stamp_ns, self._codec.decode(action), answer[:text], behind)
        self._encoded = {}

    def forget(self) -> None:
        """As before the first answer."""
        self._last, self._encoded = None, {}

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Tree]:
        """A chain per request: what the shifted answer has behind the place that the request's has reached."""
        trees = []
        for request, limit in zip(inputs, nodes, strict=True):
            stamp_ns = request.observation.stamp_ns if request.observation is not None else 0
            whole = self.answer(request.epoch, stamp_ns)
            rest = whole[self._codec.resume(whole, request.answer) :] if whole and not request.mid_prompt else ()
            branches = Branches.from_chains([rest], max_depth=request.max_depth, max_nodes=limit - 1)
            trees.append(branches.tree(request.root, relaxable=False))
        return trees

    def draft_prompt(self, epoch: int, *, max_depth: int, in_text: bool, nodes: int, stamp_ns: int) -> Tree | None:
        """The shifted answer from its beginning."""
        import torch

        branches = Branches.from_chains([self.answer(epoch, stamp_ns)], max_depth=max_depth, max_nodes=nodes - 1)
        root = torch.zeros(1, dtype=torch.int64, device=self._device)
        return branches.tree(root, relaxable=False) if len(branches) else None

    def answer(self, epoch: int, stamp_ns: int) -> tuple[int, ...]:
        """The whole answer that is drafted for a picture; empty: none.

        Args:
            epoch: of the picture.
            stamp_ns: its stamp.
        """
        last = self._last
        if last is None or last.epoch != epoch:
            return ()
        passed = round((stamp_ns - last.stamp_ns) * 1e-9 / self._step_s) if self._step_s else 1
        passed = min(max(passed, 0), len(last.actions) - 1)
        if passed not in self._encoded:
            self._encoded[passed] = self._shifted(last, passed)
        return self._encoded[passed]

    def _shifted(self, last: _Chunk, passed: int) -> tuple[int, ...]:
        """The last action stands for those that the chunk does not say yet."""
        held = np.repeat(last.actions[-1:], passed, axis=0)
        try:
            tokens = self._codec.encode(np.concatenate((last.actions[passed:], held)))
        except UserError:  # no tokens for such a chunk: nothing to draft
            return ()
        return (*last.before, *tokens, *last.behind)


@drafter("chunk_shift", settings=ChunkShiftSettings, order=5)
def _chunk_shift(context: DraftContext) -> Drafter | None:
    own: ChunkShiftSettings = context.own("chunk_shift")
    if not own.enabled:
        return None
    codec = context.target.codec
    if codec.horizon < 2:
        raise UserError(
            "draft.chunk_shift is for policies that answer with several actions; this one gives a single one: "
            "set draft.temporal in its place"
        )
    return ChunkShiftDrafter(codec, context.chunk_step_s, context.target.decoder.device)
