# SPDX-License-Identifier: Apache-2.0
"""The logits of all of a tree's levels from one forward of a parallel head, where few ids are drafted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, references
from specvla_kernels.expand_tree import MAX_COLUMNS, Window
from specvla_kernels.graph_capture import check_rows
from specvla_kernels.grow_tree import PathLogits, grow_tree
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.speculation.drafters.eagle.head import EagleHead

_MAX_TERMS = 8 * MAX_COLUMNS  # ids times levels; a 7B head's weights then take 64 MiB
_DRAWS = 4  # of logits to check the kernel with
_UNLIKELY = -50.0  # instead of -inf, so that differences are finite


@dataclass(frozen=True)
class PathTerms:
    """A parallel head's branches and the output head, multiplied in advance; see `EagleHead.path_weights`."""

    ids: range  # of children
    window: Window | None  # chooses children, see `Candidates`
    of_states: Tensor  # [levels, ids, hidden], in the output head's dtype
    of_tokens: Tensor  # [levels - 1, ids, ids], in the logits' dtype

    @staticmethod
    def from_head(
        head: EagleHead, decoder: PackedDecoder, ids: range | None, window: Window | None
    ) -> "PathTerms | None":
        """None if the head grows trees level by level, or the children's ids are any (None) or too many."""
        depth = head.parallel_depth
        if depth == 1 or ids is None or len(ids) > MAX_COLUMNS or len(ids) * depth > _MAX_TERMS:
            return None
        output = decoder.lm_head.weight[ids.start : ids.stop]
        embedded = decoder.embed_tokens(torch.arange(ids.start, ids.stop, device=decoder.device))
        wide = torch.promote_types(decoder.dtype, torch.float32)  # multiplied without rounding in between
        of_states, of_tokens = head.path_weights(output.to(wide), embedded.to(wide))
        return PathTerms(ids, window, of_states.to(output.dtype), of_tokens)

    def logits(self, products: Tensor, dimensions: Tensor) -> PathLogits:
        """Terms of the logits from the products [trees, levels, levels * ids] of the states with `of_states`.

        `dimensions` is int64 [trees], the action dimension of the first level's children.
        """
        terms = products.unflatten(2, (products.shape[1], len(self.ids)))
        return PathLogits(terms, self.of_tokens, dimensions, self.ids.start, self.window)

    def check(self, trees: int, levels: int, *, k: int, max_nodes: int) -> None:
        """Compares the kernel with its reference on random states' terms; raises RuntimeError if trees differ.

        Rounding may decide a near tie otherwise: trees that differ are grown again from other terms. A fault shows
        every time. Where the references are in use, nothing runs.
        """
        if not has_kernels(self.of_tokens):
            return
        device, what = self.of_tokens.device, f"trees of {levels} levels from one forward"
        zeros = torch.zeros(trees, dtype=torch.int64, device=device)
        for seed in range(_DRAWS):
            drawn = torch.randn(trees, levels, levels, len(self.ids), generator=torch.Generator().manual_seed(seed))
            logits = PathLogits(drawn.to(device), self.of_tokens, zeros, self.ids.start, self.window)
            given = logits, zeros, zeros + levels, zeros + max_nodes
            with references():
                expected = grow_tree(*given, k=k, max_nodes=max_nodes)
            found = grow_tree(*given, k=k, max_nodes=max_nodes)
            if found.numbers.equal(expected.numbers):
                check_rows(*(each.log_probs.clamp(min=_UNLIKELY) for each in (found, expected)), what=what)
                return
        raise RuntimeError(f"{what} differ from the reference's")
