# SPDX-License-Identifier: Apache-2.0
"""A whole decoder on the kernels gives what it gives on the references: prefill, trees, and commitment between."""

from dataclasses import replace

import pytest
import torch
from support.kernels import DEVICE, forced
from support.nightly import nightly_but

from specvla_kernels import (
    commit_kv,
    gated_unit,
    layer_products,
    packed_attention,
    rmsnorm_residual,
    rope_write_kv,
    rounded_linear,
)
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import KVCache, new_cache
from specvla_ros.models import quantization
from specvla_ros.models.config import DecoderShape, DecoderVariant
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder

pytest.importorskip("triton")

CONFIG = DecoderShape(
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=20,
    vocab_size=50,
)


def two_ticks(decoder: PackedDecoder) -> tuple[torch.Tensor, KVCache]:
    """A tree in slot 2 beside a prefill in slot 0, then a tree in each; their logits and the KV cache."""
    cache = new_cache(decoder, slots=3, slot_rows=40)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(50, (21,), generator=generator).to(DEVICE)
    tree = Ancestry.from_parents([-1, 0, 0, 1, 2, 4], DEVICE)
    drafted = torch.randint(50, (6,), generator=generator).to(DEVICE)

    first = packed_forward(decoder, [Segment(2, 0, prompt[:9]), Segment(0, 0, prompt)], cache)
    both = [Segment(2, 9, drafted, tree, wanted=6), Segment(0, 21, drafted.flip(0), tree, wanted=6)]
    second = packed_forward(decoder, both, cache)
    slots, first_rows = torch.tensor([2, 0], device=DEVICE), torch.tensor([9, 21], device=DEVICE)
    nodes = torch.tensor([[0, 2, 4, 5], [0, 1, -1, -1]], device=DEVICE)
    commit_kv.commit_kv(cache.keys, cache.values, slots, first_rows, nodes)
    third = packed_forward(decoder, [Segment(0, 23, drafted, tree, wanted=6), Segment(2, 13, drafted[:1])], cache)
    return torch.cat((first.logits, second.logits, third.logits)), cache


VARIANTS = {
    "llama": DecoderVariant(),
    "qwen2": DecoderVariant(qkv_bias=True),
    "qwen3": DecoderVariant(qk_norm=True),
    "gemma": DecoderVariant(unit_offset_norms=True, scaled_embeddings=True, gate="gelu_tanh"),
}
OPERATORS = (rope_write_kv, packed_attention, commit_kv, layer_products, rmsnorm_residual, gated_unit)


@pytest.mark.parametrize(
    ("variant", "fused"),
    nightly_but(
        lambda case: case[0] in ("llama", "qwen3"),
        [*((name, name != "qwen3") for name in VARIANTS), ("llama", False)],
        of_several=True,
    ),
)
@torch.inference_mode()
def test_a_decoder_on_kernels_gives_what_it_gives_on_references(
    variant: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    decoder = PackedDecoder(replace(CONFIG, variant=VARIANTS[variant])).requires_grad_(False)
    for weight in decoder.parameters():
        weight.copy_(torch.randn(weight.shape) * 0.2)
    decoder.to(DEVICE)
    results = []
    for kernels in (False, True):
        for operator in OPERATORS:
            monkeypatch.setattr(operator, "has_kernels", lambda _, kernels=kernels: kernels)
        with forced(fused):
            results.append(two_ticks(decoder))
    (expected, expected_cache), (logits, cache) = results

    assert expected.isfinite().all()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache.keys, expected_cache.keys, atol=1e-4, rtol=1e-4, equal_nan=True)
    torch.testing.assert_close(cache.values, expected_cache.values, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("how", "normed"),
    nightly_but(
        lambda case: case[0] == "w8a8",
        [("w8a8", True), ("w8a8", False), ("fp8", True), ("fp8", False)],
        of_several=True,
    ),
)
@torch.inference_mode()
def test_a_quantised_decoder_on_kernels_gives_what_it_gives_on_references(
    how: str, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`normed`: with a norm before the attention, which a draft head's layer lacks."""
    torch.manual_seed(0)
    decoder = PackedDecoder(CONFIG).requires_grad_(False)
    for weight in decoder.parameters():
        weight.copy_(torch.randn(weight.shape) * 0.2)
    decoder.to(DEVICE)
    monkeypatch.setattr(quantization, "pack_int8", lambda *_: None)
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        quantization.quantize_layer(layer, how)
        layer.input_norm = layer.input_norm if normed else torch.nn.Identity()
    results = []
    for kernels in (False, True):
        for operator in (*OPERATORS, rounded_linear, quantization):
            monkeypatch.setattr(operator, "has_kernels", lambda _, kernels=kernels: kernels)
        results.append(two_ticks(decoder)[0])
    near = torch.cosine_similarity(results[0], results[1], dim=1)
    # A value in the middle of two steps may fall to either side, and moves a logit by what rounding costs anyway.
    assert near.min() > 0.99 and near.mean() > 0.999, near
