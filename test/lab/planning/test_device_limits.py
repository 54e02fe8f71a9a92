# SPDX-License-Identifier: Apache-2.0
"""Devices on disk: what is read back, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.errors import UserError
from specvla_ros.lab.planning.cost import (
    OPENVLA_7B,
    Forward,
    WeightFormat,
    forward_parts,
    model_cost,
    ridge_rows,
    roofline_seconds,
)
from specvla_ros.lab.planning.device import LIMIT, Arithmetic, Device, Efficiency, Software, known_devices, read_device

FIGURES = st.floats(min_value=1e-3, max_value=1e6)


REACHED = ("bandwidth", "compute_by_rows", "layer_us")
DEVICES = ["a100", "h100", "h200", "l4", "orin", "orin_nano", "orin_nx", "rtx4090", "rtx5090", "thor"]


@pytest.mark.parametrize("name", DEVICES)
def test_the_packages_devices_name_the_source_of_each_figure(name: str) -> None:
    limits = read_device(name)
    assert limits.kind == "assumed"
    for figure in ("bandwidth_gb_s", "dense_tflops", "int8_tops", "fp8_tflops", "memory_gb"):
        assert len(limits.sources[figure]) > 5
    origins = [
        limits.sources.get(kind, limits.sources.get(f"{kind}.{name}"))
        for kind in ("efficiency", "captured")
        for name in REACHED
    ]
    assert all(origin and origin.startswith(("published: ", "fitted ", "fitted: ", "assumed: ")) for origin in origins)
    assert known_devices() == DEVICES


@given(
    figures=st.tuples(FIGURES, FIGURES, FIGURES),
    eight_bit=st.tuples(st.none() | FIGURES, st.none() | FIGURES),
    by_rows=st.dictionaries(st.integers(1, 512), FIGURES, max_size=4),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    shares=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    layer_us=st.integers(0, 999),
)
def test_a_device_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    figures: tuple[float, float, float],
    eight_bit: tuple[float | None, float | None],
    by_rows: dict[int, float],
    dtype: str,
    shares: tuple[float, float],
    layer_us: int,
) -> None:
    efficiency = Efficiency(shares[0], {296: shares[1], 900: min(1.0, 2 * shares[1])}, layer_us * 1e-6)
    sources = {"bandwidth_gb_s": "measured"}
    captured = Efficiency(1.0, {300: 1.0}, layer_us / 2 * 1e-6)
    device = Device("a", "measured", dtype, *figures, *eight_bit, by_rows, sources, "8.7", efficiency, captured)
    path = tmp_path_factory.mktemp("device") / "a.json"
    path.write_text(json.dumps(device.as_json()))
    assert read_device(str(path)) == device


def reached(**change: Any) -> dict[str, Any]:
    return {"efficiency": {"bandwidth": 0.8, "compute_by_rows": {"296": 0.5}, "layer_us": 100} | change}


def captured(**change: Any) -> dict[str, Any]:
    return {"captured": read_device("orin").captured.as_json() | change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth_gb_s": None}, "bandwidth_gb_s must be a number"),
        ({"bandwidth_gb_s": -1}, "above 0"),
        ({"memory_gb": 0}, "above 0"),
        ({"dense_tflops": "much"}, "dense_tflops must be a number"),
        ({"dense_tflops": 42e12}, "check its unit"),
        ({"int8_tops": float("nan")}, "int8_tops must be a number"),
        ({"fp8_tflops": True}, "fp8_tflops must be a number"),
        ({"kind": "guessed"}, "assumed, measured"),
        ({"dtype": "int4"}, "bfloat16, float16, float32"),
        ({"dtype": ["bfloat16"]}, "bfloat16, float16, float32"),
        ({"sources": "a data sheet"}, "with the origin of each figure"),
        ({"tflops_by_rows": [1, 2]}, "rates by rows"),
        ({"tflops_by_rows": {"zero": 1}}, "rates by rows"),
        ({"tflops_by_rows": {"16": -2}}, r"tflops_by_rows\[16\] must be above 0"),
        ({"stage_times": {"vision_s": 0.1}}, r"stage_times are no longer read; .* its efficiency: \{\"bandwidth\""),
        ({"efficiency": "toaster"}, "the name of one of the package's devices"),
        ({"efficiency": None}, "efficiency must be"),
        ({"efficiency": {"bandwidth": 0.8}}, "efficiency must be"),
        (reached(bandwidth=1.1), "efficiency.bandwidth must be above 0 and at most 1"),
        (reached(compute_by_rows={}), "shares by rows"),
        (reached(compute_by_rows={"many": 0.3}), "shares by rows"),
        (reached(compute_by_rows={"16": True}), r"compute_by_rows\[16\] must be above 0"),
        (reached(compute_by_rows={"16": 0.1, "32": 0.3}), "more rows would take less time"),
        (reached(layer_us=-1), "layer_us must be between 0 and"),
        ({"captured": "toaster"}, "captured must be .* the name of one of the package's devices"),
        ({"captured": None}, "captured must be"),
        (captured(bandwidth=1.1), "captured.bandwidth must be above 0 and at most 1"),
        (captured(bandwidth=0.5), "captured must not be slower than efficiency"),
        (captured(compute_by_rows={"296": 0.7, "1032": 0.5}), "captured must not be slower than efficiency"),
        (captured(layer_us=181), "captured must not be slower than efficiency"),
    ],
)
def test_bad_figures_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(read_device("orin").as_json() | change))
    with pytest.raises(UserError, match=message):
        read_device(str(path))


@pytest.mark.parametrize("name", DEVICES)
def test_the_units_of_a_device_go_with_its_compute_capability(name: str) -> None:
    device = read_device(name)
    capability = tuple(map(int, device.capability.split(".")))
    assert (device.fp8_tflops is not None) == (capability >= (8, 9))
    assert device.int8_tops is not None and device.int8_tops > 1.9 * device.dense_tflops


@pytest.mark.parametrize("field", ["name", "kind", "dtype", "bandwidth_gb_s", "dense_tflops", "memory_gb", "sources"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    raw = read_device("orin").as_json()
    del raw[field]
    path = tmp_path / "device.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=f"lacks the field '{field}'"):
        read_device(str(path))


def test_files_that_are_no_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nor one of a100, h100, h200, l4, orin, .*, thor; .*specvla bench --measure"):
        read_device("toaster")
    (tmp_path / "text.json").write_text("no device")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_device(str(tmp_path / "text.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="holds a JSON list"):
        read_device(str(tmp_path / "list.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_device(str(tmp_path / "binary.json"))


def test_units_that_are_not_there_are_not_used() -> None:
    with pytest.raises(UserError, match="no fp8 rate: choose another weight format: none, int4, w8a8"):
        read_device("orin").operations_per_s(Arithmetic.FP8, 290)


def test_measured_rates_go_by_rows() -> None:
    device = Device("a", "measured", "float32", 1, 9, 1, tflops_by_rows={1: 1.0, 64: 5.0, 256: 9.0})
    rates = [device.operations_per_s(Arithmetic.DENSE, rows) / 1e12 for rows in (1, 2, 64, 65, 256, 999)]
    assert rates == [1, 5, 5, 9, 9, 9]


def test_the_ridge_of_a_measured_device_is_where_products_take_longer() -> None:
    """A GPU whose single row reaches 70 % of the bandwidth: flat up to 128 rows, twice as long with 256."""
    model = model_cost(OPENVLA_7B)
    one_row = 0.7 * 1e3 / 1e3  # TFLOP/s at 1000 GB/s, two operations per two bytes
    rates = {1: one_row, 16: 15.6 * one_row, 64: 66 * one_row, 128: 127 * one_row, 256: 128 * one_row}
    device = Device("a", "measured", "bfloat16", 1000, 128 * one_row, 80, tflops_by_rows=rates)
    assert ridge_rows(model, device, WeightFormat.NONE) == pytest.approx(1.1 * 128)


def test_a_share_lies_on_the_line_between_two_numbers_of_rows() -> None:
    efficiency = Efficiency(1.0, {300: 0.3, 1000: 0.65}, 0.0)
    shares = [efficiency.compute(rows) for rows in (1, 300, 400, 1000, 4000)]
    assert shares == pytest.approx([0.3, 0.3, 0.35, 0.65, 0.65])
    assert {Efficiency(1.0, {300: 0.3}, 0.0).compute(rows) for rows in (1, 300, 4000)} == {0.3}


@pytest.mark.parametrize(("name", "like"), [("orin_nx", "orin"), ("orin_nano", "orin"), ("rtx4090", "rtx5090")])
def test_a_device_without_a_publication_takes_the_shares_of_the_nearest_that_has_one(name: str, like: str) -> None:
    assert read_device(name).efficiency == read_device(like).efficiency != LIMIT


@pytest.mark.parametrize("name", DEVICES)
def test_captured_software_is_never_slower_than_eager(name: str) -> None:
    device, model = read_device(name), model_cost(OPENVLA_7B)
    for rows in (1, 16, 64, 145, 290, 338, 1056):
        parts = forward_parts(Forward(rows, image=True), model, WeightFormat.NONE, 2)
        eager, fast, limit = (
            roofline_seconds(parts, device, efficiency) for efficiency in (device.efficiency, device.captured, LIMIT)
        )
        assert limit < fast <= eager
    assert device.running(Software.CAPTURED).efficiency == device.captured
    assert device.running(Software.EAGER) == device


def test_a_file_without_captured_shares_has_one_kind_of_software(tmp_path: Path) -> None:
    raw = read_device("orin").as_json()
    del raw["captured"]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(raw))
    device = read_device(str(path))
    assert device.captured == device.efficiency == read_device("orin").efficiency


def test_files_of_before_are_read(tmp_path: Path) -> None:
    """As `specvla bench --measure` wrote them; a file of assumed figures must say what it takes for reached."""
    raw = read_device("orin").as_json() | {"kind": "measured"}
    del raw["efficiency"], raw["captured"]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(raw))
    efficiency = read_device(str(path)).efficiency
    assert (efficiency.bandwidth, efficiency.compute(1), efficiency.compute(300)) == (1.0, 1.0, 1.0)
    assert efficiency.layer_s == read_device("rtx5090").efficiency.layer_s
    path.write_text(json.dumps(raw | {"kind": "assumed"}))
    with pytest.raises(UserError, match="efficiency must be"):
        read_device(str(path))
