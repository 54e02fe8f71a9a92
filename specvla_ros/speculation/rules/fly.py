# SPDX-License-Identifier: Apache-2.0
"""FLy's loose acceptance: excuses a mismatch if the target is uncertain and later tokens agree (arXiv 2511.22972)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.rules.registry import RuleContext, rule

if TYPE_CHECKING:
    from specvla_kernels.accept_within import Within
    from specvla_ros.speculation.accept import Acceptance, Verification

ENTROPIES = ("paper", "code")
_CODE_GATE_OFF = 0.01
_CODE_TERMS = 3


@dataclass(frozen=True)
class Fly:
    """Accepts a mismatch if the entropy gate is open and the window after it agrees with the target.

    As in the paper's text, the mismatch at position j of K drafted tokens is accepted if the target's entropy there,
    divided by ln V, is at least theta, the next W tokens of the path are the target's own choices, and j + W <= K. On a
    tree, K is the depth of the deepest draft below the node, and a path may end only where all windows on it are
    complete. W = 0 leaves only the entropy gate.

    The published code differs and is available as `entropy="code"`: entropy in nats over the three most likely tokens
    only, a window of W - 1 tokens, and a theta of at most 0.01 opens the gate always. Its entropy is not monotone: a
    distribution flat over 36 or more tokens counts as certain. A theta is only valid for one of the two variants.

    The defaults take effect within seven tokens: with a window of 2, the first four of six drafts can be excused.
    """

    theta: float = parameter(
        0.3,
        "FLy: min entropy at which a mismatch may be deferred.",
        minimum=0.0,
        maximum=10.0,
        writable=True,
        name="fly_theta",
    )
    window: int = parameter(
        2,
        "FLy: number of tokens after a mismatch that must agree; 0: only the entropy decides.",
        unit="tokens",
        minimum=0,
        maximum=32,
        writable=True,
        name="fly_window",
    )
    entropy: str = parameter(
        "paper",
        "FLy: entropy as defined in its paper, or as computed by its code.",
        choices=ENTROPIES,
        writable=True,
        name="fly_entropy",
    )
    needs_hidden: ClassVar[bool] = False
    needs_visual: ClassVar[bool] = False

    @cached_property
    def within(self) -> Within:
        from specvla_kernels.accept_within import Deferral, Within
        from specvla_ros.speculation.accept import AcceptReason

        exact, deferred = int(AcceptReason.EXACT), int(AcceptReason.DEFERRED)
        if self.entropy == "paper":
            return Within(None, exact, deferred, Deferral(self.theta, self.window, self.window, terms=0))
        theta = -math.inf if self.theta <= _CODE_GATE_OFF else self.theta
        return Within(None, exact, deferred, Deferral(theta, self.window, max(0, self.window - 1), _CODE_TERMS))

    def accept(self, verification: Verification) -> Acceptance:
        import torch

        from specvla_kernels.accept_within import excused
        from specvla_kernels.uncertainty import uncertainty
        from specvla_ros.speculation.accept import Acceptance

        within, exact = self.within, verification.exact
        assert within.deferral is not None
        unsure = verification.of_nodes(uncertainty(verification.logits, within.deferral.terms))
        mask = exact[:, None] | excused(verification.trees, exact, unsure, within.deferral)
        return Acceptance(mask, torch.where(exact, within.exact_reason, within.relaxed_reason))


@rule("fly", settings=Fly, order=20)
def _fly(context: RuleContext) -> Fly:
    return context.own("fly")
