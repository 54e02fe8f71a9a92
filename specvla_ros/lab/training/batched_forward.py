# SPDX-License-Identifier: Apache-2.0
"""Forward passes of policy and draft head for training: whole batches, no KV cache, with gradients.

They use the served model's parameters; `test_batched_forward` compares them with the packed forward.
"""

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_ros.models.decoder import DecoderLayer, PackedDecoder
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.speculation.drafters.eagle.head import EagleHead


def action_logits(model: OpenVLA, pixels: Tensor, prompt_ids: Tensor, lengths: Tensor, answers: Tensor) -> Tensor:
    """Logits of every action token, given the true tokens before it (teacher forcing).

    All instructions of a step share its images' rows: a sequence is BOS, the images, then one branch per instruction
    that attends to those rows and itself. Each branch gives the same logits as a separate sequence.

    Args:
        pixels: [batch, cameras, 3 * towers, size, size], normalised.
        prompt_ids: int64 [batch, asked, n], BOS first, padded on the right.
        lengths: int64 [batch, asked], number of each prompt's ids without padding.
        answers: int64 [batch, asked, action_dim], the action tokens, or answers of different lengths; negative values
            are padding, whose predictions are meaningless.

    Returns:
        [batch, asked, action_dim, vocab].
    """
    batch, asked, dim = answers.shape
    image = image_embeddings(model, pixels.flatten(0, 1)).unflatten(0, (batch, -1)).flatten(1, 2)
    prefix = 1 + image.shape[1]
    # The answer directly follows its prompt; padding comes after both, where causal attention masks it. The answer's
    # last token predicts nothing.
    width = prompt_ids.shape[2] + dim - 1
    text_ids = F.pad(prompt_ids, (0, dim))
    at = lengths[..., None] + torch.arange(dim, device=answers.device)
    text_ids = text_ids.scatter(2, at, answers.clamp(min=0))[..., :width]
    text = model.decoder.embed_tokens(text_ids).to(image.dtype)
    branches = text[:, :, 1:].flatten(1, 2)
    embeddings = torch.cat((text[:, 0, :1], image, branches), dim=1)
    mask, positions = _branch_layout(prefix, asked, width - 1, image.device)
    # The token before each answer predicts it.
    rows = at - 2 + prefix + (width - 1) * torch.arange(asked, device=answers.device)[:, None]
    hidden = decoder_hidden(model.decoder, embeddings, mask, positions, rows.flatten(1))
    return F.linear(hidden, model.decoder.lm_head.weight).view(batch, asked, dim, -1)


def _branch_layout(prefix: int, branches: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The attention mask, bool [rows, rows], and the position of each row, int64 [rows]."""
    rows = torch.arange(prefix + branches * width, device=device)
    branch = torch.where(rows < prefix, -1, (rows - prefix) // width)
    positions = torch.where(rows < prefix, rows, prefix + (rows - prefix) % width)
    mask = (rows[:, None] >= rows) & ((branch == -1) | (branch[:, None] == branch))
    return mask, positions


def image_embeddings(model: OpenVLA, pixels: Tensor) -> Tensor:
    """Maps pixels [batch, 3 * towers, size, size] to embeddings [batch, image_tokens, hidden]."""
    features = [tower(image) for tower, image in zip(model.towers, pixels.split(3, dim=1), strict=True)]
    return model.projector(torch.cat(features, dim=2))


def decoder_hidden(
    decoder: PackedDecoder, embeddings: Tensor, mask: Tensor, positions: Tensor, wanted: Tensor
) -> Tensor:
    """Hidden states after the final norm, [batch, n, hidden], of the rows `wanted`, int64 [batch, n].

    `embeddings` are [batch, rows, hidden]; `mask`, bool [rows, rows], is True where a row (first) attends to another.
    """
    cos, sin = decoder.rotation(positions)
    x = embeddings
    for layer in cast(Iterable[DecoderLayer], decoder.layers):
        x = attend(layer, x, *queries_keys_values(layer, x, cos, sin), mask)
        if layer is decoder.layers[-1]:  # the other rows are unused after the last attention
            x = x.gather(1, wanted[:, :, None].expand(-1, -1, x.shape[-1]))
        x = mlp(layer, x)
    return decoder.norm(x)


def queries_keys_values(layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Projects rows [batch, length, hidden] to [batch, heads, length, head_dim], with RoPE as in transformers."""

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        c, s = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    qkv = layer.qkv(layer.input_norm(x))
    qkv = qkv if layer.qkv_bias is None else qkv + layer.qkv_bias
    q, k, v = (each.transpose(1, 2) for each in layer.split_heads(qkv))
    return rotated(q), rotated(k), v


def attend(layer: DecoderLayer, x: Tensor, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The layer's first half: rows plus their attention."""
    dtype, grouped = q.dtype, layer.heads != layer.kv_heads
    if q.device.type == "cpu":  # its backward takes half the time of bfloat16's
        q, keys, values = q.float(), keys.float(), values.float()
    with torch.autocast("cpu", enabled=False):
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)
    return x + layer.out(attended.to(dtype).transpose(1, 2).flatten(2))


def mlp(layer: DecoderLayer, x: Tensor) -> Tensor:
    """The layer's second half: rows plus the MLP's output."""
    gate, up = layer.gate_up(layer.post_norm(x)).chunk(2, dim=-1)
    return x + layer.down(layer.gate(gate) * up)


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
    """Predicted hidden states of the answer's rows, from the target's states and then from the head's own.

    Row i takes the embedding of the token after it and the hidden state at it, and predicts the hidden state after it.
    In step 1 the input state is the target's. In step s the s-1 newest states of a row's history are the head's own, as
    when it drafts the s-th token of a tree (training-time test: HASS, EAGLE-3); earlier ones are the target's. From
    step 2, a parallel head's rows are masks in place of token and state; then `EagleHead.branched` takes the token, and
    the state predicted for the row before.

    Args:
        following: [batch, rows, hidden], embeddings of the following tokens.
        hidden: [batch, rows, hidden], the target's hidden states.
        padding: int64 [batch], number of padding rows at the left end.
        cos, sin: float32 [rows, head_dim / 2]; padding has no effect, as attention depends on relative positions.
        answer: number of the answer's rows, at the right end.
        steps: number of steps, 1 to `answer`.

    Returns:
        Per step s (from 1), [batch, answer - s + 1, hidden]: the answer's rows starting with the s-th.
    """
    rows = following.shape[1]
    row = torch.arange(rows, device=following.device)
    # A row of padding attends to itself: a softmax over nothing is NaN.
    seen = ((row[:, None] >= row) & (row >= padding[:, None, None])) | (row[:, None] == row)
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def predict(x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
        q, k, v = queries_keys_values(head.layer, x, cos, sin)
        keys.append(k)
        values.append(v)
        x, q = x[:, -visible.shape[1] :], q[:, :, -visible.shape[1] :]  # other rows are only attended to
        x = attend(head.layer, x, q, torch.cat(keys, dim=2), torch.cat(values, dim=2), visible[:, None])
        return mlp(head.layer, x)

    results = [predict(head.fuse(following, hidden), cos, sin, seen[:, -answer:])]
    cos, sin, following = cos[-answer:], sin[-answer:], following[:, -answer:]
    for step in range(1, steps):
        visible = _visible(padding, rows, answer, step)
        # Row a of the answer takes the prediction of row a-1 in the previous step.
        known = following[:, step:], results[-1][:, :-1]
        if head.parallel_depth > 1:
            fed = head.mask_rows[step - 1].expand(len(padding), answer - step, -1)
            results.append(head.branched(predict(fed, cos[step:], sin[step:], visible), *known))
        else:
            results.append(predict(head.fuse(*known), cos[step:], sin[step:], visible))
    return results


def _visible(padding: Tensor, rows: int, answer: int, step: int) -> Tensor:
    """Mask [batch, answer - step, keys]: the target's keys up to `step` rows earlier, then one of each later step."""
    column = torch.arange(rows, device=padding.device)
    row = column[rows - answer + step :, None]
    masks = [(column <= row - step) & (column >= padding[:, None, None])]
    for earlier in range(1, step + 1):
        own = column[rows - answer + earlier :] == row - (step - earlier)
        masks.append(own.expand(len(padding), -1, -1))
    return torch.cat(masks, dim=2)
