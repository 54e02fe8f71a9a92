# SPDX-License-Identifier: Apache-2.0
"""The devices' tables against what others measured: what is claimed is met, and what is not claimed says so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.papers.emulation import Figure, published
from specvla_ros.lab.planning.device import Software, known_devices, read_device

FIGURES = published()
CLAIMED = [figure for figure in FIGURES if figure.band_percent is not None]
CAPTURED = [figure for figure in FIGURES if figure.captured_band_percent is not None]


def name_of(figure: Figure) -> str:
    return f"{figure.system}, {figure.device}, {figure.model} {figure.weights}, {figure.work} {figure.rows}"


@pytest.mark.parametrize("figure", CLAIMED, ids=name_of)
def test_the_emulation_stays_in_the_band_around_each_figure_that_it_claims(figure: Figure) -> None:
    found = figure.as_json()
    assert abs(found["error_percent"]) <= found["band_percent"] <= 15, found


@pytest.mark.parametrize("figure", CAPTURED, ids=name_of)
def test_captured_graphs_stay_in_the_band_around_each_figure_that_is_claimed_for_them(figure: Figure) -> None:
    found = figure.as_json()
    assert figure.software == "captured"
    assert abs(found["captured_error_percent"]) <= found["captured_band_percent"] <= 10, found


def test_eager_software_was_slower_than_what_is_emulated_for_captured_graphs() -> None:
    eager = [figure for figure in FIGURES if figure.software == "eager"]
    assert len(eager) >= 10 and all(figure.published_s > figure.emulated_s(Software.CAPTURED) for figure in eager)


def test_every_figure_says_whether_it_is_claimed_and_where_it_is_from() -> None:
    for figure in FIGURES:
        assert figure.use in ("fitted", "predicted", "compared") and figure.unit in ("ms", "frames/s", "tokens/s")
        assert (figure.band_percent is None and figure.captured_band_percent is None) == (figure.use == "compared")
        assert figure.software in [each.value for each in Software]
        assert len(figure.source) > 10 and figure.device in known_devices()


def test_what_is_fitted_on_a_device_is_fitted_to_a_figure_of_that_device() -> None:
    fitted = {figure.device for figure in CLAIMED if figure.use == "fitted"}
    for name in known_devices():
        origins = [text for key, text in read_device(name).sources.items() if key.startswith("efficiency")]
        assert any(text.startswith("fitted") for text in origins) == (name in fitted)


def test_what_is_fitted_for_captured_graphs_is_claimed_for_them_or_measured_by_this_package() -> None:
    claimed = {figure.device for figure in CAPTURED if figure.use == "fitted"}
    for name in known_devices():
        origins = [text for key, text in read_device(name).sources.items() if key.startswith("captured")]
        of_others = [text for text in origins if text.startswith("fitted") and "this package's own" not in text]
        assert bool(of_others) == (name in claimed)


def test_table_1_of_actionflow_is_printed_as_it_is() -> None:
    printed = {(f.system, f.device): f.value for f in CLAIMED if f.system.startswith("ActionFlow")}
    assert printed == {
        ("ActionFlow, baseline", "orin"): 803.0,
        ("ActionFlow", "orin"): 3.20,
        ("ActionFlow, baseline", "rtx5090"): 131.2,
        ("ActionFlow", "rtx5090"): 19.45,
    }


@pytest.mark.parametrize(("device", "too_kind"), [("orin", 1.6), ("rtx5090", 1.4)])
def test_what_was_assumed_before_is_found_too_kind(device: str, too_kind: float, tmp_path: Path) -> None:
    """60 % of the matrix rate, 80 % of the bandwidth and 0.3 ms per forward, whose pipeline was never measured."""
    shares = {"bandwidth": 0.8, "compute_by_rows": {"1": 0.6}, "layer_us": 0.3e3 / 33}
    path = tmp_path / "before.json"
    path.write_text(json.dumps(read_device(device).as_json() | {"efficiency": shares, "captured": shares}))
    figure = next(each for each in CLAIMED if each.device == device and each.work == "pipeline")
    assert figure.published_s / replace(figure, device=str(path)).emulated_s() > too_kind


def test_the_committed_result_is_of_todays_tables() -> None:
    result = json.loads((Path(__file__).resolve().parents[3] / "benchmarks/results/emulation.json").read_text())
    assert [row["emulated"] for row in result["figures"]] == pytest.approx(
        [row.as_json()["emulated"] for row in FIGURES]
    )
    assert [row["source"] for row in result["figures"]] == [row.source for row in FIGURES]
