"""`specvla plan` and `bench --measure` as a user types them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from specvla_ros.cli.app import app
from specvla_ros.errors import UserError
from specvla_ros.planning import measure
from specvla_ros.planning.cost import model_cost
from specvla_ros.planning.device import read_device
from specvla_ros.policies.bundled import nano_policy


def specvla(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def refusal(*arguments: object) -> str:
    done = specvla(*arguments)
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


def test_a_plan_is_shown_and_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = specvla("plan", "--device", "orin", "--json", path)
    assert done.exit_code == 0, done.output
    assert "nothing here was measured" in done.output
    assert "specpipe, 3 chunks" in done.output
    written = json.loads(path.read_text())
    assert written["device"]["sources"]["bandwidth_gb_s"]
    assert len(written["modes"]) == 8
    assert written["model"]["prompt_rows"] == 290
    assert_profile(done.output, written["profile"])


def assert_profile(output: str, profile: dict[str, Any]) -> None:
    start = output.index("/**:")
    snippet = yaml.safe_load(output[start : output.index("\n\n", start)])["/**"]["ros__parameters"]
    assert snippet == {
        "decode": {
            "mode": profile["mode"],
            "max_in_flight": profile["max_in_flight"],
            "prefill_chunks": profile["prefill_chunks"],
        },
        "draft": {"nodes": profile["nodes"], "depth": profile["depth"], "top_k": profile["top_k"]},
    }


@pytest.mark.parametrize("weights", ["none", "int4", "w8a8", "fp8"])
def test_a_plan_of_the_nano_policy(tmp_path: Path, weights: str) -> None:
    path = tmp_path / "plan.json"
    done = specvla("plan", "--device", "h200", "--model", nano_policy(), "--weights", weights, "--json", path)
    assert done.exit_code == 0, done.output
    written = json.loads(path.read_text())
    assert written["model"]["action_tokens"] == 7
    assert written["model"]["prompt_rows"] == 64 + 34
    assert written["weights"] == weights


def test_counts_of_the_nano_policy_are_those_of_its_model() -> None:
    from specvla_ros.models.checkpoint import load_target
    from specvla_ros.models.config import read_config

    counts = model_cost(read_config(nano_policy()))
    model = load_target(nano_policy(), device="cpu").model
    decoder = sum(p.numel() for layer in model.decoder.layers for p in layer.parameters() if p.dim() == 2)
    assert counts.decoder_values == decoder
    vision = [*model.towers.parameters(), *model.projector.parameters()]
    assert counts.vision_values == sum(p.numel() for p in vision if p.dim() in (2, 4))


def test_the_documentation_shows_what_the_command_prints() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "plan.md").read_text()
    shown = " ".join(page.split())
    for line in specvla("plan", "--device", "orin").output.splitlines():
        if "─" not in line:
            assert " ".join(line.split()) in shown


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    assert "orin" in refusal("plan", "--device", "toaster")
    assert "config.json is missing" in refusal("plan", "--device", "orin", "--model", tmp_path)
    assert "does not exist" in refusal("plan", "--device", "orin", "--model", tmp_path / "none")
    assert "no fp8 rate" in refusal("plan", "--device", "orin", "--weights", "fp8")
    assert "cannot be written" in refusal("plan", "--device", "orin", "--json", tmp_path / "none" / "plan.json")
    raw = read_device("orin").as_json()
    del raw["memory_gb"]
    (tmp_path / "device.json").write_text(json.dumps(raw))
    assert "lacks the field 'memory_gb'" in refusal("plan", "--device", tmp_path / "device.json")
    assert specvla("plan").exit_code == 2


def test_this_machine_is_measured_and_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROWS", (1, 64))
    monkeypatch.setattr(measure, "_TURNS", 1)
    path = tmp_path / "here.json"
    done = specvla("bench", "--measure", "--out", path, "--model", nano_policy())
    assert done.exit_code == 0, done.output
    device = read_device(str(path))
    assert device.kind == "measured"
    assert set(device.tflops_by_rows) == {1, 64}
    assert "torch" in device.sources["tflops_by_rows"]
    done = specvla("plan", "--device", path, "--model", nano_policy())
    assert done.exit_code == 0, done.output
    assert "rates measured on" in done.output
    assert "no int8 rate" in refusal("plan", "--device", path, "--weights", "w8a8")
    assert "does not exist" in refusal("bench", "--measure", "--out", tmp_path / "none" / "here.json")


def test_a_bench_of_nothing_says_what_to_type() -> None:
    assert "`specvla bench --measure`" in refusal("bench")


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_help_says_what_it_is_for(command: str) -> None:
    done = specvla(command, "--help")
    assert done.exit_code == 0
    assert "Default: OpenVLA-7B's shapes" in " ".join(done.output.replace("│", " ").split())
