"""The draft head's forward pass as training needs it: batches, gradients, and the head fed with its own features.

It reads the parameters of the very head that is served; `test_draft_forward` holds it against the drafter.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_ros.drafting.eagle_head import EagleHead
from specvla_ros.training.batched_forward import rotate


def draft_features(
    head: EagleHead,
    following: Tensor,
    hidden: Tensor,
    padding: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    answer: int,
    steps: int,
) -> list[Tensor]:
    """Predicted hidden states of the answer's rows, fed with the target's own and then with the head's.

    Row i takes the embedding of the token behind it and the hidden state at it, and predicts the hidden state behind
    it. In step 1 that state is the target's. In step s the s-1 newest states of a row's history are the head's own, as
    they are when it drafts the s-th token of a tree (training-time test: HASS, EAGLE-3). Earlier rows are seen as the
    target made them.

    Args:
        head: of one layer.
        following: [batch, rows, hidden], embeddings.
        hidden: [batch, rows, hidden], the target's.
        padding: int64 [batch], rows at the left end that are none.
        cos: float32 [rows, head_dim / 2]; attention knows only differences of positions, so padding shifts nothing.
        sin: like cos.
        answer: the last so many rows are the answer's.
        steps: 1 or more, at most `answer`.

    Returns:
        Per step s (from 1), [batch, answer - s + 1, hidden]: of the answer's rows from the s-th on.
    """
    rows = following.shape[1]
    places = torch.arange(rows, device=following.device)
    seen = (places[:, None] >= places) & (places >= padding[:, None, None])
    # A row of padding sees itself: a softmax over nothing is NaN.
    seen = seen | torch.eye(rows, dtype=torch.bool, device=seen.device)
    x = _fuse(head, following, hidden)
    keys, values = _keys_values(head, x, cos, sin)
    predicted = _block(head, x, keys, values, cos, sin, seen)[:, -answer:]
    results = [predicted]
    stored = [(keys, values)]
    cos, sin, following = cos[-answer:], sin[-answer:], following[:, -answer:]
    for step in range(1, steps):
        # Row a of the answer is fed with what row a-1 predicted in the step before.
        x = _fuse(head, following[:, step:], results[-1][:, :-1])
        stored.append(_keys_values(head, x, cos[step:], sin[step:]))
        visible = _visible(padding, rows, answer, step)
        keys = torch.cat([each for each, _ in stored], dim=2)
        values = torch.cat([each for _, each in stored], dim=2)
        results.append(_block(head, x, keys, values, cos[step:], sin[step:], visible))
    return results


def _visible(padding: Tensor, rows: int, answer: int, step: int) -> Tensor:
    """Which keys of all steps a row sees: the target's up to `step` places before it, then one of each step since.

    Bool [batch, answer - step, keys].
    """
    device = padding.device
    row = torch.arange(rows - answer + step, rows, device=device)[:, None]
    column = torch.arange(rows, device=device)
    masks = [(column <= row - step) & (column >= padding[:, None, None])]
    for earlier in range(1, step + 1):
        column = torch.arange(rows - answer + earlier, rows, device=device)
        masks.append((column == row - (step - earlier)).expand(len(padding), -1, -1))
    return torch.cat(masks, dim=2)


def _fuse(head: EagleHead, following: Tensor, hidden: Tensor) -> Tensor:
    return head.fc(torch.cat((following, hidden), dim=-1))


def _keys_values(head: EagleHead, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    _, k, v = _qkv(head, x)
    return rotate(k, cos, sin), v


def _block(
    head: EagleHead, x: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, visible: Tensor
) -> Tensor:
    layer = head.layer
    q, _, _ = _qkv(head, x)
    attended = F.scaled_dot_product_attention(
        rotate(q, cos, sin), keys, values, attn_mask=visible[:, None], enable_gqa=layer.heads != layer.kv_heads
    )
    x = x + layer.out(attended.transpose(1, 2).flatten(2))
    gate, up = layer.gate_up(layer.post_norm(x)).chunk(2, dim=-1)
    return x + layer.down(F.silu(gate) * up)


def _qkv(head: EagleHead, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    layer = head.layer
    qkv = layer.qkv(x).view(*x.shape[:2], -1, layer.head_dim).transpose(1, 2)
    q, k, v = qkv.split((layer.heads, layer.kv_heads, layer.kv_heads), dim=1)
    return q, k, v
