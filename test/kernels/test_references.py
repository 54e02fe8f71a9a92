# SPDX-License-Identifier: Apache-2.0
"""The reference operators against their definitions, row by row, in float64."""

import pytest
import torch

from specvla_kernels.fused_linear import linear
from specvla_kernels.layout import PackedLayout, Span
from specvla_kernels.packed_attention import packed_attention
from specvla_kernels.rope_write_kv import rope_write_kv


def layout(spans: tuple[Span, ...], ancestors: list[int]) -> PackedLayout:
    zeros = torch.zeros(len(ancestors), dtype=torch.int64)
    return PackedLayout(spans, zeros, zeros, torch.tensor(ancestors))


@pytest.mark.parametrize("group", [1, 4])
def test_attention_sees_the_prefix_and_its_own_ancestors_only(group: int) -> None:
    torch.manual_seed(0)
    kv_heads, dim, rows = 2, 8, 12
    keys, values = (torch.full((3, rows, kv_heads, dim), float("nan"), dtype=torch.float64) for _ in range(2))
    # A chain of 3 from the start, a chunk of 2 behind 4, a tree of 3 (a root with two children) behind 5.
    spans = (Span(2, 0, 3, 0, False), Span(0, 3, 2, 4, False), Span(1, 5, 3, 5, True))
    visible = [[0], [0, 1], [0, 1, 2], [*range(5)], [*range(6)], [*range(6)], [*range(7)], [*range(6), 7]]
    for span in spans:
        for cache in (keys, values):
            cache[span.slot, : span.prefix_len + span.length] = torch.randn(kv_heads, dim, dtype=torch.float64)
            cache[span.slot, : span.prefix_len + span.length] += torch.randn(
                span.prefix_len + span.length, kv_heads, dim, dtype=torch.float64
            )
    q = torch.randn(8, kv_heads * group, dim, dtype=torch.float64)

    out = packed_attention(q, keys, values, layout(spans, [0] * 5 + [0b1, 0b11, 0b101]))

    for span in spans:
        for row in range(span.start, span.stop):
            for head in range(kv_heads * group):
                k = keys[span.slot, visible[row], head // group]
                v = values[span.slot, visible[row], head // group]
                weights = torch.softmax(k @ q[row, head] / dim**0.5, dim=0)
                torch.testing.assert_close(out[row, head], weights @ v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rope_rotates_pairs_half_a_head_apart_and_writes_the_given_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 4, 6), torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    angles = torch.rand(3, 3) * 6
    k_cache, v_cache = (torch.full((2, 5, 2, 6), -9.0, dtype=dtype) for _ in range(2))
    rows = torch.tensor([7, 1, 9])

    rotated = rope_write_kv(q.to(dtype), k.to(dtype), v.to(dtype), angles.cos(), angles.sin(), rows, k_cache, v_cache)

    def as_complex(x: torch.Tensor) -> torch.Tensor:
        x = x.to(dtype).double()
        return torch.complex(x[..., :3], x[..., 3:])

    turn = torch.polar(torch.ones(3, 3), angles).to(torch.complex128)[:, None]
    atol, rtol = (4e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(as_complex(rotated), as_complex(q) * turn, atol=atol, rtol=rtol)
    written = k_cache.flatten(0, 1)
    torch.testing.assert_close(as_complex(written[rows]), as_complex(k) * turn, atol=atol, rtol=rtol)
    torch.testing.assert_close(v_cache.flatten(0, 1)[rows], v.to(dtype))
    untouched = [row for row in range(10) if row not in rows.tolist()]
    assert (written[untouched] == -9).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 7), (13, 7), (2048, 512), (1025, 1024)], ids=str)
@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (5,), (6,), (70,), (1, 9), (2, 3)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_the_plain_product_for_any_number_of_threads(
    threads: int, rows: tuple[int, ...], shape: tuple[int, int], dtype: torch.dtype, biased: bool
) -> None:
    torch.manual_seed(2)
    x = torch.randn(*rows, 2 * shape[1], dtype=dtype)[..., : shape[1]]  # as of a wider matrix
    weight = torch.randn(shape, dtype=dtype) / shape[1] ** 0.5
    bias = torch.randn(shape[0], dtype=dtype) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            product = linear(x, weight, bias)
        rounding = 2e-2 if biased and dtype == torch.bfloat16 else None  # product and sum are rounded
        torch.testing.assert_close(product, expected.to(dtype), rtol=rounding, atol=rounding)
        assert product.is_contiguous()
    finally:
        torch.set_num_threads(before)


def test_linear_has_a_gradient() -> None:
    x, weight = torch.randn(3, 1024), torch.randn(1024, 1024, requires_grad=True)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(dim=0).expand(1024, -1))


def test_linear_without_onednn_is_the_plain_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    x, weight = torch.randn(3, 1024), torch.randn(1024, 1024) / 32
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight), x @ weight.T)
