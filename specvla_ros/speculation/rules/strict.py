# SPDX-License-Identifier: Apache-2.0
"""Strict acceptance: commits a drafted token only if it is the target's own choice, so decoding is lossless.

That choice comes from a forward with other rows than plain decoding's, so half precision may round it differently: see
docs/explanation/speculative-decoding.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from specvla_ros.speculation.rules.registry import RuleContext, rule

if TYPE_CHECKING:
    from specvla_kernels.accept_within import Within
    from specvla_ros.speculation.accept import Acceptance, Verification


@dataclass(frozen=True)
class Strict:
    """Accepts only the target's own choice."""

    needs_hidden: ClassVar[bool] = False
    needs_visual: ClassVar[bool] = False

    @cached_property
    def within(self) -> Within:
        from specvla_kernels.accept_within import Within
        from specvla_ros.speculation.accept import AcceptReason

        return Within(None, exact_reason=int(AcceptReason.EXACT), relaxed_reason=int(AcceptReason.NEAR))

    def accept(self, verification: Verification) -> Acceptance:
        import torch

        from specvla_ros.speculation.accept import Acceptance, AcceptReason

        reasons = torch.full_like(verification.trees.tokens, int(AcceptReason.EXACT))
        return Acceptance(verification.exact[:, None], reasons)


@rule("strict", order=0)
def _strict(context: RuleContext) -> Strict:
    return Strict()
