# SPDX-License-Identifier: Apache-2.0
"""Hadamard rotation of a decoder's layers (QuaRot, arXiv 2404.00456), so that no channel stands out when it is rounded.

Two of its rotations fold into the weights and change nothing but rounding. The residual stream is turned: the norms'
weights go into the matrices behind them, since the norm of a row does not change when the row is turned, and the
matrices that read the stream or write to it are turned with it. And each head's values are turned, which the output
matrix takes back. The stream is turned where it enters the layers, and back where it leaves them: embeddings, output
head, vision and a draft head stay as they are, at two products of [hidden, hidden] a forward.

What QuaRot turns at run time besides, the input of the MLP's second matrix, would be a kernel more and is left.
"""

import torch
from torch import Tensor

from specvla_ros.models.decoder import DecoderLayer, PackedDecoder, RMSNorm

_SEED = 0


def rotation(size: int) -> Tensor:
    """Float64 [size, size], orthogonal: a Hadamard matrix with random signs, times a small random one beside.

    Hadamard matrices of powers of two are made here; of another size the odd factor is a random orthogonal matrix, as
    in SpinQuant's start (arXiv 2405.16406).
    """
    generator = torch.Generator().manual_seed(_SEED)
    odd = size // (size & -size)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < size // odd:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    beside = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64)).Q.contiguous()
    signs = torch.randint(2, (size,), generator=generator) * 2.0 - 1.0
    return torch.kron(hadamard / hadamard.shape[0] ** 0.5, beside) * signs[:, None]


def turn_stream(decoder: PackedDecoder) -> Tensor:
    """Has the decoder turn its stream, whose layers must be turned by `rotate_layer` then; the turn, [hidden, hidden].

    The decoder must read no features of pictures in its first layers.
    """
    assert not decoder.config.deepstack
    wide = torch.promote_types(decoder.dtype, torch.float32)
    turn = rotation(decoder.config.hidden_size).to(decoder.device, wide)
    decoder.turn = turn.to(decoder.dtype)
    return turn


@torch.no_grad()
def rotate_layer(layer: DecoderLayer, turn: Tensor) -> None:
    """Turns a layer's matrices in place, and takes its norms' weights into them.

    Args:
        layer: with its weights, not quantised.
        turn: of the stream, see `turn_stream`.
    """
    wide = turn.dtype
    of_head = rotation(layer.head_dim).to(turn)
    for norm, matrix in ((layer.input_norm, layer.qkv), (layer.post_norm, layer.gate_up)):
        assert isinstance(norm, RMSNorm)
        scale = norm.weight.to(wide) + float(norm.unit_offset)
        matrix.weight.copy_(matrix.weight.to(wide) * scale @ turn)
        norm.weight.fill_(0.0 if norm.unit_offset else 1.0)
    for matrix in (layer.out, layer.down):
        matrix.weight.copy_(turn.T @ matrix.weight.to(wide))
    first = (layer.heads + layer.kv_heads) * layer.head_dim
    values = layer.qkv.weight[first:].to(wide).unflatten(0, (layer.kv_heads, -1))
    layer.qkv.weight[first:].copy_((of_head.T @ values).flatten(0, 1))
    if layer.qkv_bias is not None:
        biases = layer.qkv_bias[first:].to(wide).unflatten(0, (layer.kv_heads, -1))
        layer.qkv_bias[first:].copy_((biases @ of_head).flatten())
    attended = layer.out.weight.to(wide).unflatten(1, (layer.heads, -1))
    layer.out.weight.copy_((attended @ of_head).flatten(1))
