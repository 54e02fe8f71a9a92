# SPDX-License-Identifier: Apache-2.0
"""A rule for each class of tokens: actions, numbers in text, and the rest of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specvla_ros.speculation.rules.registry import RuleContext, rule
from specvla_ros.speculation.rules.strict import Strict

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from specvla_ros.speculation.accept import Acceptance, AcceptanceRule, Verification


@dataclass(frozen=True)
class Composite:
    """Chooses a rule by the class of the drafted token and of the target's own choice at its position.

    Both actions: the action rule, or strict if the codec defines no distance between them. Both text: strict if either
    contains a digit, else the text rule. One of each: never accepted, so that only the target decides where text ends.
    """

    action: AcceptanceRule
    text: AcceptanceRule
    # bool [vocab], ids whose text contains a digit; on the model's device, otherwise each verification copies it there.
    numbers: Tensor

    @property
    def needs_hidden(self) -> bool:
        return self.action.needs_hidden or self.text.needs_hidden

    @property
    def needs_visual(self) -> bool:
        return self.action.needs_visual or self.text.needs_visual

    def accept(self, verification: Verification) -> Acceptance:
        import torch

        from specvla_ros.speculation.accept import Acceptance, AcceptReason

        measured, actions = verification.measured, verification.distances or verification.actions
        tokens, wanted = verification.trees.tokens, measured.wanted
        is_action = measured.dimensions >= 0
        of_actions, wants_action = actions.contain(tokens), actions.contain(wanted)
        mixed = of_actions ^ wants_action
        numbers = self.numbers.to(tokens.device)
        number = numbers[tokens.clamp(min=0)] | numbers[wanted.clamp(min=0)] | of_actions
        action, text, exact = (rule.accept(verification) for rule in (self.action, self.text, Strict()))
        words = torch.where(number[:, None], exact.mask, text.mask)
        mask = torch.where(is_action[:, None], action.mask, words) & ~mixed[:, None]
        words = torch.where(number, int(AcceptReason.EXACT), text.reasons)
        return Acceptance(mask, torch.where(is_action, action.reasons, words), measured)


def number_tokens(tokenizer: Tokenizer | None, vocab_size: int) -> Tensor:
    """Bool [vocab_size]: ids whose text contains a digit; none without a tokenizer.

    A tokenizer's ids beyond the model's, such as PaliGemma's `<image>`, have no logit and are never drafted.
    """
    import torch

    numbers = torch.zeros(vocab_size, dtype=torch.bool)
    if tokenizer is not None:
        for text, token in tokenizer.get_vocab().items():
            if token < vocab_size:
                numbers[token] = any(character.isdigit() for character in text)
    return numbers


@rule("composite", order=40)
def _composite(context: RuleContext) -> Composite:
    decoder = context.target.decoder
    numbers = number_tokens(context.target.tokenizer, decoder.config.vocab_size)
    return Composite(context.rule("bin_distance"), context.rule("fly"), numbers.to(decoder.device))
