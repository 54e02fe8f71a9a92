"""Strict acceptance: a drafted token is committed only if it is the target's own choice, so nothing is lost."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_ros.speculation.accept import NOT_A_NUMBER, Acceptance, AcceptReason, Verification


def greedy_choice(logits: Tensor) -> Tensor:
    """The target's most likely token at each node; the lowest id wins a tie, on every device.

    Args:
        logits: float32 [n, vocab].

    Returns:
        int64 [n]; NOT_A_NUMBER for a row with a NaN.
    """
    best = logits.amax(dim=-1, keepdim=True)
    vocab = logits.shape[-1]
    ids = torch.arange(vocab, device=logits.device)
    choice = torch.where(logits == best, ids, vocab).amin(dim=-1)
    return torch.where(choice == vocab, NOT_A_NUMBER, choice)


@dataclass(frozen=True)
class Strict:
    """Accepts what the target would have chosen itself."""

    needs_hidden: bool = False
    needs_visual: bool = False

    def accept(self, verification: Verification) -> Acceptance:
        """Exact tokens only."""
        reasons = torch.full_like(verification.trees.tokens, int(AcceptReason.EXACT))
        return Acceptance(verification.exact[:, None], reasons)
