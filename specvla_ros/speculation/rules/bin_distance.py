# SPDX-License-Identifier: Apache-2.0
"""Bin-distance acceptance: accepts action tokens near the target's own choice (Spec-VLA, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from specvla_ros.speculation.rules.registry import RuleContext, rule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specvla_kernels.accept_within import Within
    from specvla_ros.speculation.accept import Acceptance, Verification


@dataclass(frozen=True)
class BinDistance:
    """Accepts an action token at most r bins from the target's own choice for the same prefix (Spec-VLA eq. 5).

    Distances are between bins, not ids: the two lowest action ids decode to the same value. The published code compares
    raw ids of any token, so with r = 9 it also accepts non-action ids and the -1 that pads its shorter paths.

    Other codecs count in their own steps: digits in units of a number's last place, FAST in steps of a coefficient.
    """

    # r in steps of the codec; for bins, one per action dimension. A dimension beyond the last is strict.
    bins: tuple[int, ...]
    # The model's device; otherwise each verification copies the tolerances there.
    device: torch.device | str = field(default="cpu", compare=False, repr=False)
    needs_hidden: ClassVar[bool] = False
    needs_visual: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _ = self.tolerances  # upload now: within a tick the copy would wait for the device

    @cached_property
    def tolerances(self) -> Tensor:
        """Tolerances in bins, int64 [dimensions + 2]: r of each dimension, 0 beyond them, -1 (no match) without one."""
        import torch

        return torch.tensor((*self.bins, 0, -1), device=self.device)

    @cached_property
    def within(self) -> Within:
        from specvla_kernels.accept_within import Within
        from specvla_ros.speculation.accept import AcceptReason

        return Within(self.tolerances, exact_reason=int(AcceptReason.EXACT), relaxed_reason=int(AcceptReason.NEAR))

    def accept(self, verification: Verification) -> Acceptance:
        import torch

        from specvla_ros.speculation.accept import Acceptance, AcceptReason

        measured = verification.measured
        exact, dimensions = measured.exact, measured.dimensions
        tolerances = self.tolerances.to(dimensions.device)[dimensions.clamp(max=len(self.bins))]
        near = measured.distances <= tolerances
        reasons = torch.where(exact, int(AcceptReason.EXACT), int(AcceptReason.NEAR))
        return Acceptance((exact | near)[:, None], reasons, measured)


@rule("bin_distance", order=10)
def _bin_distance(context: RuleContext) -> BinDistance:
    return BinDistance(context.bins, context.target.decoder.device)
