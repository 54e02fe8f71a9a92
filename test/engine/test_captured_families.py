# SPDX-License-Identifier: Apache-2.0
"""The forward of every family and weight format can be captured: no copy from the host, and no read-back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.static_forwards import recorded, use_table

from benchmarks.random_policy import random_decoder
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.cuda_graphs import ForwardSizes, StaticForward, logits_memory
from specvla_ros.engine.kv_cache import KVCache, new_cache
from specvla_ros.models.config import DECODERS, DecoderShape
from specvla_ros.models.decoder import DecoderLayer
from specvla_ros.models.quantization import quantize_layer

QWEN_VL = replace(DECODERS["qwen2"], rope_sections=(2, 3, 3))
FAMILIES: dict[str, DecoderShape] = {
    **DECODERS,
    "qwen2.5-vl": QWEN_VL,
    "qwen3-vl": replace(DECODERS["qwen3"], rope_sections=(2, 3, 3), rope_interleaved=True, deepstack=1),
}
SIZES = ForwardSizes(slots=2, nodes=4, prompts=(9,))


@pytest.mark.parametrize(
    ("family", "quantization"),
    [*((name, "none") for name in FAMILIES), ("llama", "w8a8"), ("qwen2.5-vl", "w8a8")],
)
@torch.inference_mode()
def test_the_forward_of_every_family_can_be_captured(
    family: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_table(monkeypatch)
    decoder = random_decoder(small(FAMILIES[family]))
    if quantization != "none":
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            quantize_layer(layer, quantization)
    axes = decoder.config.rope_axes
    parents = Ancestry.from_parents([-1, 0, 0])
    several = [
        [prompt(decoder.embed_tokens(torch.arange(9)), axes), tree(1, 20, parents, axes)],
        [tree(0, 9, parents, axes), tree(1, 22, parents, axes)],
    ]
    cache = new_cache(decoder, slots=2, slot_rows=32)
    for segments in several:
        bucket = SIZES.bucket([len(each) for each in segments])
        assert bucket is not None
        logits = logits_memory(decoder, SIZES)
        static = StaticForward(decoder, cache, bucket, segments=SIZES.segments, logits=logits, capture=recorded)
        seed(cache)
        expected = packed_forward(decoder, segments, cache)
        written = cache.keys.clone()
        seed(cache)
        found = static(segments)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cache.keys[:, :, :-1], written[:, :, :-1], atol=1e-4, rtol=1e-4)


def small(shape: DecoderShape) -> DecoderShape:
    return replace(
        shape,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=50,
        max_position_embeddings=128,
    )


def prompt(embeddings: torch.Tensor, axes: int) -> Segment:
    """Nine rows whose height and width count up less quickly than their time."""
    rows = np.arange(len(embeddings))
    return Segment(0, 0, embeddings, positions=np.stack([rows, rows // 2, rows // 3]) if axes > 1 else None)


def tree(slot: int, prefix_len: int, ancestry: Ancestry, axes: int) -> Segment:
    positions = np.full((axes, len(ancestry)), prefix_len - 3) if axes > 1 else None
    return Segment(slot, prefix_len, torch.arange(len(ancestry)), ancestry, wanted=len(ancestry), positions=positions)


def seed(cache: KVCache) -> None:
    for number, store in enumerate((cache.keys, cache.values)):
        store.copy_(torch.randn(store.shape, generator=torch.Generator().manual_seed(number)))
