# SPDX-License-Identifier: Apache-2.0
"""A rule of another package: the first drafts of a tree, where they are exact."""

from dataclasses import dataclass

import torch

from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.accept import Acceptance, AcceptReason, Verification
from specvla_ros.speculation.rules.registry import RuleContext, rule


@dataclass(frozen=True)
class FirstOnly:
    depth: int = parameter(1, "Drafted tokens that may be accepted at once.", minimum=1, maximum=8)
    needs_hidden: bool = False
    needs_visual: bool = False

    def accept(self, verification: Verification) -> Acceptance:
        first = verification.exact & (verification.trees.depths <= self.depth)
        return Acceptance(first[:, None], torch.full_like(verification.trees.tokens, int(AcceptReason.EXACT)))


@rule("first_only", settings=FirstOnly)
def make(context: RuleContext) -> FirstOnly:
    made: FirstOnly = context.own("first_only")
    return made
