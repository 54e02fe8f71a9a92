"""The commands as a user types them: results on stdout, one clear message and an exit code when something is wrong."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.bags import episode, write_bag
from support.checkpoints import write_checkpoint
from support.paths import ORACLES, needs


def specvla(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from specvla_ros.cli.app import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "frame.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(path)
    return path


def refused(done: "subprocess.CompletedProcess[str]", text: str) -> None:
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@needs(ORACLES)
def test_predict_gives_the_originals_action() -> None:
    oracle = ORACLES / "openvla_tiny_a"
    case = json.loads((oracle / "cases.json").read_text())[3]  # its ids lack the trailing token
    done = specvla(
        *("predict", "--checkpoint", oracle / "checkpoint", "--image", oracle / case["image"], "--json"),
        *("--unnorm-key", case["unnorm_key"], "--prompt-ids", ",".join(map(str, case["input_ids_given"]))),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens"] == case["generated_ids"]
    np.testing.assert_allclose(result["values"], case["action"], atol=1e-6, rtol=0)
    assert list(result["action"].values()) == result["values"]


def test_predict_reads_an_instruction(checkpoint: Path, image: Path) -> None:
    done = specvla("predict", "--checkpoint", checkpoint, "--image", image, "--instruction", "put carrot on plate")
    assert done.returncode == 0, done.stderr
    assert "gripper" in done.stdout


def test_predict_refuses_what_it_cannot_use(checkpoint: Path, image: Path, tmp_path: Path) -> None:
    base = ("predict", "--checkpoint", checkpoint)
    say = ("--instruction", "go")
    refused(specvla("predict", "--checkpoint", tmp_path / "no", "--image", image, *say), "does not exist")
    refused(specvla(*base, "--image", tmp_path / "no.png", *say), "no.png does not exist")
    (tmp_path / "text.png").write_text("no picture")
    refused(specvla(*base, "--image", tmp_path / "text.png", *say), "cannot be read")
    refused(specvla(*base, "--image", image), "either --instruction or --prompt-ids")
    refused(specvla(*base, "--image", image, "--prompt-ids", "1,two"), "whole numbers")
    refused(specvla(*base, "--image", image, "--prompt-ids", "1,9999999"), "outside the vocabulary")
    refused(specvla(*base, "--image", image, *say, "--unnorm-key", "moon"), "it has: demo_bridge")
    refused(specvla(*base, "--image", image, "--instruction", "x" * 10_240), "shorten the instruction")


def test_predict_with_quantised_weights(checkpoint: Path, image: Path) -> None:
    command = ("predict", "--checkpoint", checkpoint, "--image", image, "--instruction", "put carrot on plate")
    refused(specvla(*command, "--device", "cpu", "--quantization", "fp8"), "on a CPU choose w8a8")
    pytest.importorskip("torchao", reason="torchao is not installed")
    done = specvla(*command, "--device", "cpu", "--quantization", "w8a8")
    assert done.returncode == 0, done.stderr
    assert "gripper" in done.stdout


def test_replay_writes_its_results_and_keeps_limits(checkpoint: Path, tmp_path: Path) -> None:
    bag = write_bag(tmp_path / "bag", episode())
    base = ("replay", bag, "--checkpoint", checkpoint, "--no-progress")
    done = specvla(*base, "--out", tmp_path / "out", "--max-drop-fraction", "0")
    assert done.returncode == 0, done.stderr
    assert "5 of 5 frames answered" in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"frames.jsonl", "summary.json", "report.html", "actions_bag"} <= names
    done = specvla(*base, "--out", tmp_path / "limited", "--max-p95-latency-s", "0.000001")
    assert done.returncode == 1
    assert "p95" in done.stderr
    refused(specvla(*base, "--out", tmp_path / "out"), "holds the result of an earlier replay")
    refused(specvla(*base, "--out", tmp_path / "x", "--image-topic", "/nope"), "/nope")


def test_doctor_finds_this_environment_usable() -> None:
    done = specvla("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 0, checks
    assert checks["torch"]["state"] == checks["rclpy"]["state"] == checks["messages"]["state"] == "ok"


def test_doctor_names_what_is_missing_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    from specvla_ros.cli.doctor import examine

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "rclpy", None)
    checks = {check.name: check for check in examine()}
    for name, fix in (("torch", "pip install torch"), ("rclpy", "source /opt/ros")):
        assert checks[name].state == "missing"
        assert fix in checks[name].fix


@pytest.mark.parametrize("command", ["predict", "replay", "demo", "doctor"])
def test_every_command_has_help(command: str) -> None:
    done = specvla(command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_worker_processes_may_import_the_command() -> None:
    """As multiprocessing does where processes are not forked."""
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "specvla"), run_name="__mp_main__")
