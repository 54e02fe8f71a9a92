# SPDX-License-Identifier: Apache-2.0
"""Rounded rows and their products: the kernels against the references, and what rounding may cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES, TOLERANCES
from support.nightly import examples

from specvla_kernels import device
from specvla_kernels.device import widest
from specvla_kernels.gated_unit import GATES
from specvla_kernels.rmsnorm_residual import RowNorm
from specvla_kernels.rounded_linear import (
    Rounded,
    round_rows_reference,
    round_rows_triton,
    rounded_linear_reference,
    rounded_linear_triton,
)

pytest.importorskip("triton")

FORMATS = (torch.int8, torch.float8_e4m3fn)
EMPTY = torch.empty
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # the interpreter's numpy


def poisoned(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    made = EMPTY(*size, dtype=dtype, device=device)
    return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(77)


@settings(max_examples=examples(40), deadline=None)
@given(
    n_rows=st.integers(1, 4),
    width=st.sampled_from([1, 48, 480, 1500, 9000]),
    how=st.sampled_from(["", "norm", "offset norm", *GATES]),
    dtype=st.sampled_from(DTYPES),
    to=st.sampled_from(FORMATS),
    seed=st.integers(0, 1000),
)
def test_rows_are_rounded_as_the_reference_rounds_them(
    n_rows: int, width: int, how: str, dtype: torch.dtype, to: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate = how if how in GATES else ""
    x = torch.randn(n_rows, 4 * width, generator=generator)[:, : width * (2 if gate else 1)]
    if not how:  # of very different sizes, as activations are
        x *= 10.0 ** torch.randint(-3, 3, (n_rows, 1), generator=generator)
    x = x.to(DEVICE, dtype)
    weight = torch.randn(width, generator=generator).to(DEVICE, dtype)
    norm = RowNorm(weight, 1e-6, how.startswith("offset")) if "norm" in how else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        found = round_rows_triton(x, to, norm=norm, gate=gate)
    expected = round_rows_reference(x, to, norm=norm, gate=gate)
    torch.testing.assert_close(found.steps, expected.steps, atol=1e-30, rtol=1e-5)
    values, wanted = (each.values.double() for each in (found, expected))
    # What lies in the middle may fall to either side where the arithmetic in front of it differs in its last bit.
    neighbours = 1.0 if to == torch.int8 else wanted.abs() * 2**-3 + 2**-9
    assert ((values - wanted).abs() <= neighbours).all()
    if how == "":
        assert torch.equal(values, wanted) and torch.equal(found.steps, expected.steps)
    else:
        assert (values != wanted).float().mean() < 0.02 + 1 / values.numel()


@settings(max_examples=examples(30), deadline=None)
@given(
    n_rows=st.sampled_from([1, 2, 17, 33, 64, 130]),
    shape=st.sampled_from([(8, 8), (24, 64), (288, 96), (100, 300)]),
    dtype=st.sampled_from(DTYPES),
    to=st.sampled_from(FORMATS),
    bias=st.booleans(),
    residual=st.booleans(),
    processors=st.sampled_from([1, 4, 1000]),
    seed=st.integers(0, 1000),
)
def test_the_product_is_the_reference(
    n_rows: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    to: torch.dtype,
    bias: bool,
    residual: bool,
    processors: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = shape

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(DEVICE)

    x = round_rows_reference(random(n_rows, in_features), to)
    weight = round_rows_reference(random(out_features, in_features) / in_features**0.5, to)
    around = dict(
        bias=random(out_features).to(dtype) if bias else None,
        residual=random(n_rows, 2 * out_features).to(dtype)[:, :out_features] if residual else None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        patch.setattr(device, "multiprocessors", lambda _: processors)
        found = rounded_linear_triton(x, weight, dtype, **around)
    wide = {name: None if part is None else part.double() for name, part in around.items()}
    x, weight = (Rounded(each.values, each.steps.double()) for each in (x, weight))
    expected = rounded_linear_reference(x, weight, torch.float64, **wide)
    assert found.dtype == dtype
    within = dict(TOLERANCES[dtype])
    if DEVICE.type == "cuda" and to == torch.float8_e4m3fn:  # sums of Hopper's float8 keep 14 bits
        rows, columns = (Rounded(each.values.double().abs(), each.steps) for each in (x, weight))
        within["atol"] += float(rounded_linear_reference(rows, columns, torch.float64).max()) * 2**-13
    torch.testing.assert_close(found.double(), expected, **within)


@pytest.mark.parametrize(
    ("row_tiles", "width", "columns"),
    [(1, 22016, 128), (1, 12288, 64), (1, 4096, 32), (2, 4096, 32), (3, 4096, 64), (5, 4096, 128), (1, 8, 32)],
)
def test_the_widest_tile_is_chosen_that_leaves_no_multiprocessor_idle(
    row_tiles: int, width: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "multiprocessors", lambda _: 132)
    tiles = [(columns, 128, 4, 4) for columns in (32, 64, 128)]
    assert widest(tiles, row_tiles, width, DEVICE)[0] == columns


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_not_finite_stays_so_in_its_row_alone(to: torch.dtype) -> None:
    x = torch.randn(4, 48, device=DEVICE)
    norm = RowNorm(torch.ones(48, device=DEVICE), 1e-6)
    weight = round_rows_reference(torch.randn(24, 48, device=DEVICE), to)
    broken = x.clone()
    broken[1, 3], broken[2, 5] = torch.nan, torch.inf
    for run in (round_rows_triton, round_rows_reference):
        for how in ({}, {"norm": norm}, {"gate": "silu"}):
            product = rounded_linear_triton if run is round_rows_triton else rounded_linear_reference
            if "gate" in how:
                x, broken = x[:, :48].repeat(1, 2), broken[:, :48].repeat(1, 2)
            else:
                x, broken = x[:, :48], broken[:, :48]
            clean = product(run(x, to, **how), weight, torch.float32)
            out = product(run(broken, to, **how), weight, torch.float32)
            assert not out[1:3].isfinite().any(), (run, how)
            assert torch.equal(out[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("to", FORMATS)
def test_rows_of_zeros_give_zeros(to: torch.dtype) -> None:
    weight = round_rows_reference(torch.randn(24, 16, device=DEVICE), to)
    rows = round_rows_triton(torch.zeros(3, 16, device=DEVICE), to)
    assert not rounded_linear_triton(rows, weight, torch.float32).any()
