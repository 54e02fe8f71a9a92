# SPDX-License-Identifier: Apache-2.0
"""Turned layers compute what they computed, and are rounded better where a channel stands out."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.checkpoints import load_openvla, write_checkpoint
from support.nightly import nightly_but

from benchmarks.random_policy import random_decoder
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models.config import DecoderShape, DecoderVariant
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder
from specvla_ros.models.quantization import ROTATED, quantize_layer, rotate_layer, rotation, turn_stream


def logits(decoder: PackedDecoder) -> torch.Tensor:
    cache = new_cache(decoder, slots=1, slot_rows=32)
    return packed_forward(decoder, [Segment(0, 0, torch.arange(20), wanted=20)], cache).logits


def layers_of(decoder: PackedDecoder) -> list[DecoderLayer]:
    return [cast(DecoderLayer, layer) for layer in decoder.layers]


def turned(decoder: PackedDecoder) -> PackedDecoder:
    turn = turn_stream(decoder)
    for layer in layers_of(decoder):
        rotate_layer(layer, turn)
    return decoder


@pytest.mark.parametrize("size", nightly_but(lambda size: size < 4096, [1, 2, 3, 32, 80, 96, 192, 1024, 4096]))
def test_a_rotation_is_orthogonal_and_spreads_a_channel_over_all(size: int) -> None:
    made = rotation(size)
    torch.testing.assert_close(made @ made.T, torch.eye(size, dtype=torch.float64))
    if size & (size - 1) == 0:
        torch.testing.assert_close(made.abs(), torch.full_like(made, size**-0.5))
    assert made.equal(rotation(size)), "the same in every process"


@pytest.mark.parametrize(
    "variant",
    [DecoderVariant(), DecoderVariant(qkv_bias=True), DecoderVariant(unit_offset_norms=True, scaled_embeddings=True)],
    ids=["llama", "qwen2", "gemma"],
)
@torch.inference_mode()
def test_turned_layers_compute_the_same(variant: DecoderVariant) -> None:
    shape: Any = DecoderShape(48, 80, 3, 4, 2, 24, vocab_size=50, max_position_embeddings=64, variant=variant)
    plain, other = (random_decoder(shape, seed=2, dtype=torch.float64) for _ in range(2))
    for decoder in (plain, other):
        for parameter in decoder.parameters():
            if parameter.dim() == 1:  # norms' weights and biases of all sizes
                parameter.copy_(torch.linspace(-1.5, 1.5, len(parameter), dtype=torch.float64))
    torch.testing.assert_close(logits(turned(other)), logits(plain), atol=1e-9, rtol=1e-9)


@torch.inference_mode()
def test_a_channel_that_stands_out_costs_the_others_less() -> None:
    """As in large language models: two channels of the stream are a hundred times as large, and count for little."""
    shape = DecoderShape(64, 96, 4, 4, 4, 16, vocab_size=50, max_position_embeddings=64)
    off = {}
    for rotated in (False, True):
        plain, rounded = (random_decoder(shape, seed=4) for _ in range(2))
        for decoder in (plain, rounded):
            decoder.embed_tokens.weight[:, [3, 40]] *= 100.0
            for layer in layers_of(decoder):
                for matrix in (layer.qkv, layer.gate_up):
                    matrix.weight[:, [3, 40]] *= 0.01
        if rotated:
            turned(rounded)
        for layer in layers_of(rounded):
            quantize_layer(layer, "w8a8")
        expected = logits(plain)
        off[rotated] = float((logits(rounded) - expected).norm() / expected.norm())
    assert off[True] < 0.5 * off[False], off


def test_a_checkpoint_is_turned_while_it_is_loaded(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, seed=5)
    plain, made = load_openvla(directory, device="cpu"), load_openvla(directory, device="cpu", quantization=ROTATED)
    assert plain.decoder.turn is None and made.decoder.turn is not None
    assert made.describe()["quantization"] == ROTATED
    layer = layers_of(made.decoder)[0]
    assert bool((layer.post_norm.weight == 1).all()), "its weight is in the matrix behind it"
    close = torch.nn.functional.cosine_similarity(logits(made.decoder), logits(plain.decoder), dim=1)
    assert float(close.min()) > 0.98
