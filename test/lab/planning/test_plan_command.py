# SPDX-License-Identifier: Apache-2.0
"""`specvla plan` and `bench --measure` as a user types them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import load_openvla
from support.paths import ORACLES, needs
from typer.testing import CliRunner, Result

from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.planning import measure
from specvla_ros.lab.planning.cost import OPENVLA_7B, model_cost
from specvla_ros.lab.planning.device import known_devices, read_device
from specvla_ros.lab.planning.limits import MODES, mode_limit, spec_vla_relaxed
from specvla_ros.lab.planning.plan import make_plan
from specvla_ros.models.settings import WeightFormat
from specvla_ros.settings.parameter import values_of
from specvla_ros.speculation.drafters.eagle import answer_ids
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings


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
    assert "nothing was measured" in done.output
    assert "specpipe, 3 chunks" in done.output
    written = json.loads(path.read_text())
    assert written["device"]["sources"]["bandwidth_gb_s"]
    assert len(written["modes"]) == 9
    assert written["model"]["prompt_rows"] == 290
    printed = values_of(read_back(done.output, tmp_path))
    for name, value in written["profile"]["parameters"].items():
        assert printed[name] == (tuple(value) if isinstance(value, list) else value)


def read_back(output: str, tmp_path: Path) -> EngineSettings:
    """The settings of an engine that is started with what was printed."""
    start = output.index("/**:")
    path = tmp_path / "profile.yaml"
    path.write_text(output[start : output.index("\n\n", start)])
    return engine_settings_from(params_file=path)


@pytest.mark.parametrize("device", known_devices())
def test_the_printed_parameters_are_the_settings_that_were_planned(device: str, tmp_path: Path) -> None:
    planned = make_plan(read_device(device), WeightFormat.NONE)
    done = specvla("plan", "--device", device)
    read = read_back(done.output, tmp_path)
    assert read == planned.profile.settings
    limit = planned.profile.limit.mode
    assert (read.mode, read.prefill_chunks, read.slots) == (limit.decode_mode, limit.chunks, limit.max_in_flight)
    assert (read.tree_nodes, read.draft.depth) == (limit.nodes, limit.depth)
    assert read.acceptance == (planned.lengths.acceptance if read.drafts else AcceptanceSettings())


def test_acceptance_is_as_relaxed_as_the_lengths_that_were_planned_with(tmp_path: Path) -> None:
    done = specvla("plan", "--device", "orin")
    read = read_back(done.output, tmp_path)
    assert read.drafts and read.draft.head == "" and read.draft.depth == DraftSettings().depth
    assert (read.acceptance.rule, read.acceptance.bins, read.acceptance.gripper_bins) == ("bin_distance", (9,), 0)
    assert "the settings behind the lengths of Spec-VLA relaxed, LIBERO-Goal" in " ".join(done.output.split())


@pytest.mark.parametrize("weights", ["none", "int4", "w8a8", "fp8"])
def test_a_plan_of_the_nano_policy(tmp_path: Path, weights: str) -> None:
    path = tmp_path / "plan.json"
    done = specvla("plan", "--device", "h200", "--model", nano_policy(), "--weights", weights, "--json", path)
    assert done.exit_code == 0, done.output
    written = json.loads(path.read_text())
    assert written["model"]["action_tokens"] == 7
    assert written["model"]["prompt_rows"] == 64 + 34
    assert written["weights"] == weights


def test_a_head_that_drafts_in_one_pass_costs_one_forward(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(nano_policy(), policy)
    config = policy / "draft" / "config.json"
    draft_s = []
    for depth in (1, 5):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"parallel_depth": depth}))
        plan = make_plan(read_device("orin"), WeightFormat.NONE, policy)
        draft_s.append(next(each.derated_seconds for each in plan.forwards if each.name.startswith("draft head, 5")))
    assert draft_s[0] / 5 < draft_s[1] < 1.2 * draft_s[0] / 5  # the branches read a little more


def test_counts_of_the_nano_policy_are_those_of_its_model() -> None:
    from specvla_ros.models.families.openvla.config import read_config

    counts = model_cost(read_config(nano_policy()))
    target = load_openvla(nano_policy(), device="cpu")
    model = target.model
    decoder = sum(p.numel() for layer in model.decoder.layers for p in layer.parameters() if p.dim() == 2)
    assert counts.decoder_values == decoder
    ids = answer_ids(target.codec, 8)
    assert ids is not None and counts.draft_head_values == len(ids) * model.decoder.config.hidden_size
    vision = [*model.towers.parameters(), *model.projector.parameters()]
    assert counts.vision_values == sum(p.numel() for p in vision if p.dim() in (2, 4))


def test_the_documentation_shows_what_the_command_prints() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "plan.md").read_text()
    shown = " ".join(page.split())
    for line in specvla("plan", "--device", "orin").output.splitlines():
        if "─" not in line:
            assert " ".join(line.split()) in shown


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    assert "orin" in refusal("plan", "--device", "toaster")
    assert "config.json is missing" in refusal("plan", "--device", "orin", "--model", tmp_path)
    assert "does not exist" in refusal("plan", "--device", "orin", "--model", tmp_path / "none")
    assert "no fp8 rate" in refusal("plan", "--device", "orin", "--weights", "fp8")
    assert "create it first" in refusal("plan", "--device", "orin", "--json", tmp_path / "none" / "plan.json")
    raw = read_device("orin").as_json()
    del raw["memory_gb"]
    (tmp_path / "device.json").write_text(json.dumps(raw))
    assert "lacks the field 'memory_gb'" in refusal("plan", "--device", tmp_path / "device.json")
    assert specvla("plan").exit_code == 2


@needs(ORACLES)
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("ecot_tiny_a", "give the length of an answer with --tokens N"),
        ("oft_tiny_a", "it answers in one forward"),
        ("nora_tiny_a", "its model_type is 'qwen2_5_vl', but only OpenVLA's architecture can be planned"),
        ("pi0fast_tiny_a", "only OpenVLA's architecture can be planned"),
        ("minivla_tiny_a", "only OpenVLA's architecture can be planned"),
    ],
)
def test_policies_that_answer_otherwise_are_not_planned_as_seven_tokens(policy: str, words: str) -> None:
    directory = ORACLES / policy
    found = next(path for path in (directory / "checkpoint", directory) if (path / "config.json").exists())
    assert words in refusal("plan", "--device", "orin", "--model", found)


def test_the_length_of_an_answer_is_planned_for() -> None:
    device, lengths = read_device("orin"), spec_vla_relaxed("goal")
    rates = []
    for tokens in (7, 43):
        model = replace(model_cost(OPENVLA_7B), action_tokens=tokens)
        rates.append(mode_limit(MODES[0], model, device, WeightFormat.NONE, lengths).derated_rate_hz)
    assert rates[1] < rates[0] / 4
    assert make_plan(device, WeightFormat.NONE, tokens=7) == make_plan(device, WeightFormat.NONE)
    assert "an answer of one token" in refusal("plan", "--device", "orin", "--tokens", "1")


def test_what_does_not_fit_is_said_first_and_by_the_exit_code() -> None:
    done = specvla("plan", "--device", "orin_nano")
    assert done.exit_code == 1 and "does not fit on" in done.output.splitlines()[0]


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


@pytest.mark.parametrize(
    ("busy", "own", "stolen", "words"),
    [
        (190.0, 180.0, 0.0, ""),
        (190.0, 100.0, 0.0, "other processes used 45% of its CPU time. Delays"),
        (190.0, 100.0, 60.0, "other processes used 45% of its CPU time (30% went to its host)"),
    ],
)
def test_a_machine_that_others_keep_busy_is_named(busy: float, own: float, stolen: float, words: str) -> None:
    before = measure.CpuTimes.now()
    after = measure.CpuTimes(before.total + 200, before.busy + busy, before.stolen + stolen, before.own + own)
    found = measure.busy_machine(before, after)
    assert words in found and bool(found) is bool(words)
    assert before.total >= before.busy > 0 and before.own > 0
