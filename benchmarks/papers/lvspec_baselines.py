# SPDX-License-Identifier: Apache-2.0
"""Baselines of the LVSpec paper (arXiv 2604.05650): random acceptance of mismatches, relevance from embeddings."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specvla_ros.models.target import Target
from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.accept import Acceptance, AcceptReason, Verification
from specvla_ros.speculation.rules.lvspec import LVSpec

# Constants of splitmix64's last step as signed numbers.
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))
_STEP = 1_000_003
_BITS = 53


@dataclass(frozen=True)
class RandomRelaxation:
    """Random relaxation (figure 7): accepts the target's own choice, and each mismatch with the same probability.

    The random number is a hash of the seed, the bits of the target's largest logit at the position, the token and its
    depth. An episode is therefore reproducible in any process and any order, unlike with a stateful generator. No two
    positions share their logits.

    Randomly accepted tokens are reported as IRRELEVANT, like LVSpec's own loose tokens.
    """

    share: float = parameter(0.7, "Probability with which a mismatch is accepted.", minimum=0.0, maximum=1.0)
    seed: int = parameter(0, "Seed of the random acceptance.", minimum=0, maximum=1 << 30)
    needs_hidden: ClassVar[bool] = False
    needs_visual: ClassVar[bool] = False

    def accept(self, verification: Verification) -> Acceptance:
        """Judges each node separately, independently of the path."""
        exact = verification.exact
        accepted = exact | (_lots(verification, self.seed) < self.share)
        reasons = torch.where(exact, int(AcceptReason.EXACT), int(AcceptReason.IRRELEVANT))
        return Acceptance(accepted[:, None], reasons)


def _lots(verification: Verification, seed: int) -> Tensor:
    """Float64 [requests, n], uniform over [0, 1)."""
    trees = verification.trees
    bits = verification.logits.amax(dim=-1).to(torch.float32).view(torch.int32).to(torch.int64)
    judged = verification.of_nodes(bits).gather(1, trees.parents.clamp(min=0))
    mixed = ((judged * _STEP + trees.tokens) * _STEP + trees.depths) * _STEP + seed
    for shift, factor in _FACTORS:
        mixed = (mixed ^ (mixed >> shift & ((1 << (64 - shift)) - 1))) * factor
    return (mixed & ((1 << _BITS) - 1)).to(torch.float64) / (1 << _BITS)


@dataclass(frozen=True)
class EmbeddingRelevance:
    """LVSpec with the relevance from the input embeddings of drafted tokens and image, not hidden states (table 6).

    Args:
        rule: LVSpec with its parameters.
        embed: maps token ids to embeddings.
        image: the projector's last output, [image_tokens, hidden]; one frame at a time.
    """

    rule: LVSpec
    embed: Callable[[Tensor], Tensor]
    image: "LastOutput"
    needs_hidden: ClassVar[bool] = False
    needs_visual: ClassVar[bool] = False

    def accept(self, verification: Verification) -> Acceptance:
        """See `LVSpec.accept`."""
        image = self.image.value.reshape(1, -1, self.image.value.shape[-1])
        return self.rule.accept(replace(verification, hidden=self.embed(verification.trees.tokens), visual=image))

    @staticmethod
    def of_target(rule: LVSpec, target: Target) -> "EmbeddingRelevance":
        """Creates the rule for a policy of OpenVLA's architecture."""
        image = LastOutput()
        target.model.projector.register_forward_hook(image.keep)  # type: ignore[attr-defined]
        return EmbeddingRelevance(rule, target.decoder.embed_tokens, image)


@dataclass
class LastOutput:
    """The last output of a module."""

    value: Tensor = field(default_factory=lambda: torch.empty(0))

    def keep(self, _module: Any, _inputs: Any, output: Tensor) -> None:
        """Keeps the output; a forward hook."""
        self.value = output
