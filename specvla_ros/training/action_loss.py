"""The loss of action tokens, and how well they are predicted."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_ros.models.action_tokenizer import ActionTokenizer

# Neighbouring bins are neighbouring actions, which plain cross-entropy has to learn from the data, bin by bin.
_BLUR_BINS = 2.0


def action_loss(logits: Tensor, answers: Tensor, tokenizer: ActionTokenizer) -> Tensor:
    """Mean cross-entropy over the vocabulary against the true bin blurred over its neighbours; the gripper sharp.

    Args:
        logits: [..., action_dim, vocab].
        answers: int64 [..., action_dim], action tokens.
        tokenizer: says which ids are bins.

    Returns:
        A scalar, float32.
    """
    log_probabilities = logits.float().log_softmax(-1)
    bins = log_probabilities[..., tokenizer.first_id : tokenizer.vocab_size]
    places = torch.arange(bins.shape[-1], device=bins.device)
    true = (answers - tokenizer.first_id)[..., None]
    weights = torch.exp(-0.5 * ((places - true) / _BLUR_BINS) ** 2)
    weights[..., -1, :] = (places == true[..., -1, :]).float()
    weights = weights / weights.sum(-1, keepdim=True)
    return -(weights * bins).sum(-1).mean()


def cross_entropy(logits: Tensor, answers: Tensor) -> Tensor:
    """Cross-entropy of the true tokens, float32 [action_dim]: what a model without a blur is compared by."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), answers.flatten(), reduction="none")
    return losses.view(-1, answers.shape[-1]).mean(0)
