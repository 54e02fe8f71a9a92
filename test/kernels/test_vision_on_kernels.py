# SPDX-License-Identifier: Apache-2.0
"""What a vision tower runs on: each kernel against its reference, and a whole tower on kernels against one without."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES, TOLERANCES, forced, poisoned_empty
from support.nightly import examples

from specvla_kernels import layer_products, layernorm_residual, patch_embedding, rounded_linear
from specvla_kernels.layernorm_residual import layernorm_residual_reference, layernorm_residual_triton
from specvla_kernels.patch_embedding import patch_embedding_reference, patch_embedding_triton
from specvla_ros.models import quantization
from specvla_ros.models.config import VisionTowerConfig
from specvla_ros.models.families.openvla import model as openvla_model
from specvla_ros.models.families.openvla.model import VisionTower
from specvla_ros.models.quantization import quantize_products

pytest.importorskip("triton")

_OPERATORS = openvla_model, layer_products, layernorm_residual, patch_embedding, quantization, rounded_linear


@settings(max_examples=examples(30), deadline=None)
@given(
    n_rows=st.integers(1, 4),
    dim=st.sampled_from([1, 48, 1000, 1152]),
    scaled=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_a_norm_behind_a_scaled_residual(n_rows: int, dim: int, scaled: bool, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = (torch.randn(n_rows, 2 * dim, generator=generator) * 3 + 1).to(DEVICE, dtype)
    x, residual = wide.chunk(2, dim=1)  # strided rows
    scale, weight, bias = torch.randn(3, dim, generator=generator).to(DEVICE, dtype)
    given_scale = scale if scaled else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisoned_empty)
        normed, total = layernorm_residual_triton(x, residual, given_scale, weight, bias, 1e-2)

    exact = residual.double() + x.double() * (scale.double() if scaled else 1.0)
    torch.testing.assert_close(total.double(), exact, **TOLERANCES[dtype])
    expected, _ = layernorm_residual_reference(
        total.double(), torch.zeros_like(total).double(), None, weight.double(), bias.double(), 1e-2
    )
    bound = TOLERANCES[dtype]
    torch.testing.assert_close(normed.double(), expected, atol=2 * bound["atol"], rtol=2 * bound["rtol"])


@settings(max_examples=examples(15), deadline=None)
@given(
    patch_size=st.sampled_from([2, 3, 14]),
    side=st.integers(1, 7),
    dim=st.sampled_from([1, 32, 40]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_patches(patch_size: int, side: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    image, weight = random(3, side * patch_size, side * patch_size), random(dim, 3, patch_size, patch_size)
    weight = weight / weight[0].numel() ** 0.5
    operands = image, weight, random(dim), random(side * side, dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisoned_empty)
        out = patch_embedding_triton(*operands)
    expected = patch_embedding_reference(*(each.double() for each in operands))
    torch.testing.assert_close(out.double(), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize(("fused", "weights"), [(True, "none"), (False, "none"), (False, "w8a8"), (False, "fp8")])
@pytest.mark.parametrize(("tokens", "layer_scale"), [(2, True), (0, False)])
@torch.no_grad()
def test_a_tower_on_kernels_gives_what_it_gives_on_references(
    tokens: int, layer_scale: bool, fused: bool, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = VisionTowerConfig(
        embed_dim=24, depth=4, heads=2, mlp_dim=40, patch_size=4, class_token=tokens > 0, register_tokens=tokens,
        layer_scale=layer_scale, image_size=20,
    )  # fmt: skip
    tower = VisionTower(config).requires_grad_(False)
    for weight in tower.parameters():
        weight.copy_(torch.randn(weight.shape) * 0.3)
    tower.to(DEVICE)
    pixels = torch.randn(3, 20, 20, device=DEVICE)
    exact = tower(pixels)
    if weights != "none":
        monkeypatch.setattr(quantization, "pack_int8", lambda *_: None)  # a GPU has none
        quantize_products(tower.blocks, weights)
    features = []
    for kernels in (False, True):
        for operator in _OPERATORS:
            monkeypatch.setattr(operator, "has_kernels", lambda _, kernels=kernels: kernels)
        with forced(fused):
            features.append(tower(pixels))
    assert features[0].isfinite().all() and features[0].shape == (25, 24)
    if weights == "none":
        torch.testing.assert_close(*features, atol=1e-4, rtol=1e-4)
    else:  # a value at the border between two steps may be rounded either way
        assert F.cosine_similarity(features[0], features[1], dim=1).min() > 0.999
        assert F.cosine_similarity(exact, features[1], dim=1).min() > 0.9 and not torch.equal(exact, features[1])
