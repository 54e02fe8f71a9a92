# SPDX-License-Identifier: Apache-2.0
"""The linear layer with what stands around it, in one launch: against the reference in float64."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES, TOLERANCES, poisoned_empty
from support.nightly import examples

from specvla_kernels import device, product_contest
from specvla_kernels.fused_linear import fused_linear_reference, fused_linear_triton
from specvla_kernels.gated_unit import GATES
from specvla_kernels.product_contest import is_fused, timing
from specvla_kernels.rmsnorm_residual import RowNorm

pytest.importorskip("triton")


@settings(max_examples=examples(50), deadline=None)
@given(
    n_rows=st.sampled_from([1, 2, 16, 17, 33, 64, 70]),
    in_features=st.sampled_from([8, 48, 128, 200]),
    width=st.sampled_from([1, 24, 64, 100]),
    dtype=st.sampled_from(DTYPES),
    norm=st.sampled_from([None, False, True]),
    bias=st.booleans(),
    activation=st.sampled_from(["", "gelu", *GATES]),
    scale=st.booleans(),
    residual=st.booleans(),
    processors=st.sampled_from([1, 1000]),
    seed=st.integers(0, 1000),
)
def test_the_kernel_is_the_reference(
    n_rows: int,
    in_features: int,
    width: int,
    dtype: torch.dtype,
    norm: bool | None,
    bias: bool,
    activation: str,
    scale: bool,
    residual: bool,
    processors: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    x = random(n_rows, 2 * in_features)[:, :in_features]  # strided rows
    out_features = width * (2 if activation in GATES else 1)
    weight = random(out_features, in_features) / in_features**0.5
    norm_weight = random(in_features)
    around = dict(
        bias=random(out_features) if bias and activation not in GATES else None,
        scale=random(width) if scale else None,
        residual=random(n_rows, 2 * width)[:, width:] if residual else None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisoned_empty)
        patch.setattr(device, "multiprocessors", lambda _: processors)
        row_norm = None if norm is None else RowNorm(norm_weight, 1e-6, norm)
        out = fused_linear_triton(x, weight, norm=row_norm, activation=activation, **around)

    exact = None if norm is None else RowNorm(norm_weight.double(), 1e-6, norm)
    wide = {name: None if part is None else part.double() for name, part in around.items()}
    expected = fused_linear_reference(x.double(), weight.double(), norm=exact, activation=activation, **wide)
    assert out.dtype == dtype
    bound = TOLERANCES[dtype]
    # Half precision also rounds the rows times the norm's weight, as the reference would the normed rows.
    torch.testing.assert_close(out.double(), expected, atol=3 * bound["atol"], rtol=3 * bound["rtol"])


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's numpy
def test_what_is_not_finite_stays_so_in_its_row_alone() -> None:
    x = torch.randn(4, 32, device=DEVICE)
    weight, norm = torch.randn(24, 32, device=DEVICE), RowNorm(torch.ones(32, device=DEVICE), 1e-6)
    for activation in ("", "silu"):
        clean = fused_linear_triton(x, weight, norm=norm, activation=activation)
        broken = x.clone()
        broken[1, 3], broken[2, 5] = torch.nan, torch.inf
        out = fused_linear_triton(broken, weight, norm=norm, activation=activation)
        assert out[1:3].isnan().all()
        assert torch.equal(out[[0, 3]], clean[[0, 3]])


def test_the_faster_of_the_two_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16)
    times = {"fused": 2.0, "apart": 1.0}
    monkeypatch.setattr(product_contest, "_faster", {})
    monkeypatch.setattr(product_contest, "seconds", lambda call, _: times[call()])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def decide(kind: str = "norm", rows: torch.Tensor = x) -> bool:
        return is_fused(lambda: "fused", lambda: "apart", rows, weight, kind)  # type: ignore[arg-type, return-value]

    assert decide(), "fewer launches where nothing was timed"
    with timing():
        assert not decide()
    assert not decide() and decide("residual") and len(product_contest._faster) == 1
    assert not decide("residual", x.expand(30, 3, 8).flatten(0, 1)), "many rows are bound by arithmetic"
    assert not decide("residual", x.float()), "float32 has no tensor cores that are exact"
    assert not decide("gate", x.half()), "rows times the norm's weight may overflow"


@pytest.mark.parametrize(
    ("cache_mb", "cold_mb"),
    [(4, 16), (32, 128), (50, 200), (96, 256), (None, 256)],
    ids=["orin", "thor", "h100", "rtx5090", "?"],
)
def test_the_cache_is_emptied_by_as_much_memory_as_it_needs(
    cache_mb: int | None, cold_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace() if cache_mb is None else SimpleNamespace(L2_cache_size=cache_mb << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert product_contest.cold_bytes(torch.device("cuda:0")) == cold_mb << 20
