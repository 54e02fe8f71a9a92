# SPDX-License-Identifier: Apache-2.0
"""Plans for eager software and for captured graphs, side by side."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specvla_ros.lab.cli.app import app
from specvla_ros.lab.planning.device import read_device
from specvla_ros.lab.planning.plan_range import make_plans
from specvla_ros.models.settings import WeightFormat


@pytest.mark.parametrize("name", ["orin", "rtx5090", "h100", "thor"])
def test_no_fixed_mode_is_slower_with_captured_graphs(name: str) -> None:
    plans = make_plans(read_device(name), WeightFormat.NONE)
    for eager, captured in zip(plans.eager.modes, plans.captured.modes, strict=True):
        assert captured.mode == eager.mode
        assert captured.image_age_s == pytest.approx(eager.image_age_s), "the limit depends on no software"
        assert captured.image_age_s < captured.derated_image_age_s < eager.derated_image_age_s
        if not eager.mode.chooses:  # auto may take a longer latency for younger images
            assert captured.derated_latency_s < eager.derated_latency_s
            assert captured.derated_rate_hz > eager.derated_rate_hz
    for eager_s, captured_s in zip(plans.eager.forwards, plans.captured.forwards, strict=True):
        assert captured_s.derated_seconds <= eager_s.derated_seconds
    ages = plans.captured.format_ages
    assert all(ages[each] < age_s for each, age_s in plans.eager.format_ages.items())


def test_a_choice_that_captured_graphs_turn_is_said(tmp_path: Path) -> None:
    """Seven tokens on a 5090: without drafts, an eager stack is better off one frame at a time."""
    path = tmp_path / "plan.json"
    done = CliRunner().invoke(app, ["plan", "--device", "rtx5090", "--json", str(path)])
    assert done.exit_code == 0, done.output
    written = json.loads(path.read_text())
    turned = "the best mode without drafts is `pipeline, 3 chunks`, not `ar`"
    assert written["changes"] == [turned] and f"With captured graphs, {turned}." in done.output
    age_s = {
        kind: {mode["mode"]["name"]: mode["derated_image_age_s"] for mode in modes}
        for kind, modes in (("eager", written["modes"]), ("captured", written["captured"]["modes"]))
    }
    assert age_s["eager"]["ar"] < age_s["eager"]["pipeline, 3 chunks"]
    assert age_s["captured"]["ar"] > 1.03 * age_s["captured"]["pipeline, 3 chunks"]
    first = done.output.splitlines()[0]
    assert first == written["verdict"] and " to " in first and "eager execution to CUDA graphs" in first
    assert written["derated"] != written["captured"]["derated"]


def test_a_change_within_the_noise_is_not_said() -> None:
    device = read_device("rtx5090")
    shares = replace(device.efficiency, layer_s=device.efficiency.layer_s - 1e-6)
    plans = make_plans(replace(device, captured=shares), WeightFormat.NONE)
    assert not plans.single and plans.changes == []


def test_a_file_with_one_set_of_shares_is_planned_for_one_kind(tmp_path: Path) -> None:
    raw = read_device("orin").as_json()
    del raw["captured"]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(raw))
    done = CliRunner().invoke(app, ["plan", "--device", str(path)])
    assert done.exit_code == 0, done.output
    assert "captured" not in done.output and "eager" not in done.output
    assert re.search(r"expected \d\.\d+ actions/s, \d+ ms \(derated\)\n", done.output)


def test_parameters_that_depend_on_the_software_are_said() -> None:
    plans = make_plans(read_device("orin"), WeightFormat.NONE)
    assert "draft.nodes is 16, not 64" in plans.changes
    assert (plans.eager.parameters["draft.nodes"], plans.captured.parameters["draft.nodes"]) == (64, 16)


def test_a_parameter_that_only_one_software_needs_is_said_with_its_default() -> None:
    changes = make_plans(read_device("rtx5090"), WeightFormat.NONE, robots=6).changes
    assert "acceptance.rule is strict, not bin_distance" in changes
    assert "acceptance.bins is [0], not [9]" in changes
    assert "draft.head is none, not empty" in changes


def test_no_figure_of_a_long_answer_is_cut_off() -> None:
    done = CliRunner().invoke(app, ["plan", "--device", "orin", "--tokens", "216"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "…" not in done.output and "specpipe, 3 chunks" in done.output
