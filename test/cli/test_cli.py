# SPDX-License-Identifier: Apache-2.0
"""The commands as a user types them: results on stdout, one clear message and an exit code when something is wrong."""

import json
import re
import runpy
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer.main
from PIL import Image
from rich.markup import render
from support.bags import IMAGE, episode, write_bag
from support.checkpoints import write_checkpoint
from support.paths import ORACLES, needs
from support.typed import specvla
from typer.core import TyperOption
from typer.testing import CliRunner

from specvla_ros import __version__
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.cli.options import BagOptions
from specvla_ros.lab.terminal import one_line_endings
from specvla_ros.messages.image_file import read_image
from specvla_ros.models.settings import ModelSettings
from specvla_ros.settings.parameter import walk

COMMANDS: dict = typer.main.get_command(app).commands  # type: ignore[attr-defined]
INSTALLED = Path(sys.executable).parent / "specvla"


def without(missing: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Runs the command as on a machine that lacks a Python package."""
    code = f"import sys; sys.modules['{missing}'] = None; from specvla_ros.lab.cli.app import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
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
    assert result["tokens"] == case["generated_ids"] and result["adapter"] == ""
    np.testing.assert_allclose(result["values"], [case["action"]], atol=1e-6, rtol=0)
    assert [list(result["action"].values())] == result["values"]


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
    blank = specvla("predict", "--policy", "nano", "--image", image, "--instruction", "  ")
    refused(blank, "either --instruction or --prompt-ids")
    refused(specvla(*base, "--image", image, "--prompt-ids", "1,two"), "whole numbers")
    refused(specvla(*base, "--image", image, "--prompt-ids", "1,9999999"), "outside the vocabulary")
    refused(specvla(*base, "--image", image, *say, "--unnorm-key", "moon"), "it has: bridge_orig")
    refused(specvla(*base, "--image", image, "--instruction", "x" * 10_240), "shorten it")
    refused(specvla(*base, "--image", image, *say, "--state", "0.1"), "does not read the robot's state")


def test_predict_with_quantised_weights(checkpoint: Path, image: Path) -> None:
    command = ("predict", "--checkpoint", checkpoint, "--image", image, "--instruction", "put carrot on plate")
    refused(specvla(*command, "--device", "cpu", "--quantization", "fp8"), "on a CPU choose w8a8")
    pytest.importorskip("torchao", reason="torchao is not installed")
    done = specvla(*command, "--device", "cpu", "--quantization", "w8a8")
    assert done.returncode == 0, done.stderr
    assert "gripper" in done.stdout


def test_replay_writes_its_results_and_keeps_limits(checkpoint: Path, tmp_path: Path) -> None:
    again = [(topic, kind, time_ns + 10**9, message) for topic, kind, time_ns, message in episode(2)]
    looped = write_bag(tmp_path / "looped", [*episode(), *again])
    done = specvla("replay", looped, "--checkpoint", checkpoint, "--no-progress", "--out", tmp_path / "once")
    assert "5 of 7 frames answered" in done.stdout and "no action for 2 out_of_order" in done.stdout, done.stderr
    bag = write_bag(tmp_path / "bag", episode())
    base = ("replay", bag, "--checkpoint", checkpoint, "--no-progress")
    done = specvla(*base, "--out", tmp_path / "out", "--max-drop-fraction", "0")
    assert done.returncode == 0, done.stderr
    assert "5 of 5 frames answered in mode auto, p95 " in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"frames.jsonl", "summary.json", "report.html", "actions_bag"} <= names
    done = specvla(*base, "--out", tmp_path / "limited", "--max-p95-latency-s", "0.000001")
    assert done.returncode == 1
    assert "p95" in done.stderr
    refused(specvla(*base, "--out", tmp_path / "out"), "holds the result of an earlier replay")
    refused(specvla(*base, "--out", tmp_path / "x", "--image-topic", "/nope"), "/nope")


FILES = {"plan": "--json", "bench": "--out", "robot-model": "--out"}  # whose result is one file
LATER = ("certify", "collect-answers")  # which need it only with other options, and check it before they load


@pytest.mark.parametrize("words", [[name] for name in (*COMMANDS, "fleet-draft --promote")] + [["robot", "stops"]])
def test_no_result_can_be_lost_to_its_path(words: list[str], tmp_path: Path) -> None:
    """At once, since hours may pass before the results are written."""
    name, _, option = words[0].partition(" ")
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.touch()
    option = option or FILES.get(name, "--out")
    command = COMMANDS[name].commands[words[1]] if words[1:] else COMMANDS[name]
    if name in LATER or option not in {flag for each in command.params for flag in each.opts}:
        return
    wrong = {folder: "is a directory", tmp_path / "none" / "x": "create it first"} if name in FILES else {}
    for path, text in (wrong or {file: "is a file; give a directory", file / "x": "is a file"}).items():
        with pytest.raises(UserError, match=f"{option} .*{text}"):
            CliRunner().invoke(app, [name, *words[1:], option, str(path)], catch_exceptions=False)


def test_a_file_of_results_is_checked_before_the_policy_is_loaded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specvla_ros.models.checkpoint.load_target", pytest.fail)
    bag = write_bag(tmp_path / "bag", episode())
    base = ["--policy", str(checkpoint), "--data", str(bag)]
    (tmp_path / "x.html").mkdir()
    for words, text in (
        (["certify", "--mode", "spec", "--out", bag], f"--out {bag} is a directory"),
        (["certify", "--mode", "spec", "--out", tmp_path / "x.json"], "x.html is a directory"),
        (["certify", "--mode", "spec", "--out", tmp_path / "y.html"], "the name of the certificate's page"),
        (["collect-answers", "--out", bag], f"--out {bag} is a directory"),
    ):
        with pytest.raises(UserError, match=text):
            CliRunner().invoke(app, [*map(str, words), *base], catch_exceptions=False)


@pytest.mark.parametrize("name", ["calibrate", "fleet-draft"])
def test_results_of_another_command_are_seen_before_the_policy_is_loaded(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specvla_ros.models.checkpoint.load_target", pytest.fail)
    (tmp_path / "settings.json").write_text('{"command": "replay"}')
    base = [name, "--policy", str(checkpoint), "--data", str(tmp_path), "--out", str(tmp_path)]
    with pytest.raises(UserError, match="holds results of `specvla replay`"):
        CliRunner().invoke(app, base, catch_exceptions=False)


@needs(ORACLES)
def test_all_that_a_replay_lacks_is_said_at_once(image: Path, tmp_path: Path) -> None:
    """A checkpoint of two datasets that are not known here, without a tokenizer."""
    bag = write_bag(tmp_path / "bag", episode(2))
    base = ("replay", bag, "--checkpoint", ORACLES / "openvla_tiny_a" / "checkpoint", "--out", tmp_path / "out")
    done = specvla(*base)
    for words in ("tiny_nomask (--unnorm-key NAME)", "tokenizer.json is missing", "each as -p action.dt:=0.2"):
        refused(done, words)
    refused(
        specvla(*base, "--unnorm-key", "tiny_bridge", "-p", "action.dt:=0.2"),
        "missing; it is needed to read instructions",
    )
    assert not (tmp_path / "out").exists()
    certify = ("certify", "--data", bag, *base[2:4], "--mode", "spec", "--out", tmp_path / "certificate.json")
    for words in ("tiny_nomask (--unnorm-key NAME)", "tokenizer.json is missing; it is needed to read instructions"):
        refused(specvla(*certify), words)
        refused(specvla("serve", *base[2:4], "--port", "0"), words)
        refused(specvla("predict", *base[2:4], "--image", image, "--instruction", "lift"), words)


def test_replay_of_many_bags_gives_one_report_and_one_exit_code(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_bag(tmp_path / "bags" / name, episode(3))
    (tmp_path / "bags" / "notes.txt").touch()
    base = ("replay", "--checkpoint", checkpoint, "--device", "cpu", "--no-progress")
    done = specvla(*base, tmp_path / "bags", "--out", tmp_path / "out", "--max-drop-fraction", "0", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "6 of 6 frames of 2 bags answered" in done.stdout
    assert "notes.txt" in done.stderr
    next((tmp_path / "bags" / "b").glob("*.mcap")).write_bytes(b"no bag")
    done = specvla(*base, tmp_path / "bags" / "a", tmp_path / "bags" / "b", "--out", tmp_path / "again")
    assert done.returncode == 1
    assert "3 of 3 frames of 2 bags answered" in done.stdout
    assert re.search(r"^specvla: b: ", done.stderr, re.MULTILINE)
    refused(
        specvla(*base, tmp_path / "bags" / "a", tmp_path / "bags" / "b"),
        "several bags need a directory for their results",
    )
    refused(specvla(*base, tmp_path / "bags", "--out", tmp_path / "x", "--viewer", "spawn"), "--viewer shows one bag")
    refused(
        specvla(*base, tmp_path / "bags" / "a", "--ray", "auto"),
        "--workers, --per-engine and --ray need more than one bag",
    )


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


def test_doctor_says_what_to_type_for_each_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from specvla_ros.cli import doctor

    def absent(name: str) -> str:
        raise doctor.metadata.PackageNotFoundError(name)

    def broken(name: str) -> None:
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(doctor.metadata, "version", absent)
    monkeypatch.setattr(doctor, "import_module", broken)
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9))
    monkeypatch.setenv("CXX", "/nowhere/g++ -O2")
    typed = re.compile(r"(pip|apt|apt-get) install |source |make |sysctl -w |export |nvidia-smi")
    found = [check for check in doctor.examine() if check.state != "ok"]
    missing = {"python", "torch", "ruckig", "mujoco", "raw images", "rclpy", "C++ compiler"}
    assert missing <= {check.name for check in found}
    assert [check for check in found if not typed.search(check.fix)] == []


def test_doctor_finds_messages_that_were_built_from_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import specvla_ros.msg
    from specvla_ros.cli.doctor import examine

    monkeypatch.delattr(specvla_ros.msg, "Reasoning")
    (found,) = [check for check in examine() if check.name == "messages"]
    assert found.state == "missing" and "Reasoning is missing" in found.found and "colcon build" in found.fix


def test_doctor_knows_every_message_and_action() -> None:
    from specvla_ros.cli.doctor import _INTERFACES

    root = Path(__file__).parents[2]
    assert {*_INTERFACES} == {file.stem for folder in ("msg", "action") for file in (root / folder).iterdir()}


def test_doctor_survives_a_middleware_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMW_IMPLEMENTATION", "rmw_of_nobody_cpp")
    monkeypatch.setenv("CXX", " ")
    done = specvla("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 1 and checks["RMW"]["state"] == "missing" and checks["torch"]["state"] == "ok"
    assert "RMW_IMPLEMENTATION is rmw_of_nobody_cpp: " in checks["RMW"]["found"]
    assert "apt install ros-<distro>-rmw-of-nobody-cpp" in checks["RMW"]["fix"]


@pytest.mark.parametrize("command", ["predict", "replay", "demo", "doctor"])
def test_every_command_has_help(command: str) -> None:
    done = specvla(command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout
    assert specvla(command, "-h").stdout == done.stdout


def test_an_interface_or_software_that_nobody_uses_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", "--out", str(tmp_path / "out"), "--software", "captured"])
    assert "--software captured only applies with --emulate DEVICE" in str(done.exception)
    done = CliRunner().invoke(app, ["simulate", "--out", str(tmp_path / "out"), "--interface", "twist"])
    assert isinstance(done.exception, UserError)
    assert "--interface twist only applies with --follow driver" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_the_version_is_shown() -> None:
    assert specvla("--version").stdout == f"specvla {__version__}\n"


def test_without_arguments_the_first_steps_are_shown_and_each_is_a_command() -> None:
    shown = CliRunner().invoke(app, []).output
    steps = re.findall(
        r"^ +specvla (\S+).*  \S", shown.partition("Start here:")[2].partition("Options")[0], re.MULTILINE
    )
    assert len(steps) == 5 and set(steps) <= set(COMMANDS)
    panels = re.findall(r"─ ([A-Z][\w ]+) ─", shown)
    assert panels == ["Options", "Run a policy", "Simulation", "Recordings", "Your robot", "Devices", "Training"]


def test_no_word_of_the_help_is_taken_for_markup() -> None:
    for name, command in COMMANDS.items():
        texts = [command.help, *(each.help for each in command.params if isinstance(each, TyperOption))]
        assert [render(text).plain for text in texts if text] == [text for text in texts if text], name


LOADING = {"checkpoint", *(each.path[0] for each in walk(ModelSettings()))}
DECODING = {"param", "params_file"}
OF_BAGS = {each.name for each in fields(BagOptions)} - {"action_topic"}
IN_ANY_MODE = {"mode", "tolerance"}


@pytest.mark.parametrize(
    ("commands", "options"),
    [
        (("predict", "replay", "simulate", "demo"), LOADING | DECODING | IN_ANY_MODE),
        (("sweep", "calibrate"), LOADING | DECODING),
        (("train-draft",), LOADING),
        (
            ("replay", "certify", "calibrate", "train-policy", "train-draft", "collect-answers", "fleet-draft"),
            OF_BAGS,
        ),
    ],
)
def test_whatever_runs_a_policy_takes_the_same_options(commands: tuple[str, ...], options: set[str]) -> None:
    shared = [
        {each.name: (each.opts, each.help) for each in COMMANDS[name].params if each.name in options}
        for name in commands
    ]
    assert all(set(each) == options and each == shared[0] for each in shared)


def decoded(image: Path, *options: object) -> dict:
    """In this process, which has torch already; it keeps its threads."""
    base = ("predict", "--image", image, "--instruction", "lift the red cube", "--device", "cpu", "--json")
    done = CliRunner().invoke(app, [*map(str, base), *map(str, options)], env={"OMP_NUM_THREADS": "1"})
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_predict_decodes_in_every_mode_and_within_a_tolerance(image: Path, tmp_path: Path) -> None:
    plain = decoded(image)
    profile = tmp_path / "profile.yaml"
    profile.write_text("/**: {ros__parameters: {draft: {nodes: 8}, acceptance: {rule: bin_distance, bins: [20]}}}")
    for mode in ("spec", "pipeline", "specpipe"):
        assert decoded(image, "--mode", mode)["tokens"] == plain["tokens"]
    strict = decoded(image, "--mode", "spec", "--params-file", profile, "--tolerance", "0")
    assert strict["tokens"] == plain["tokens"]
    near = decoded(image, "--mode", "spec", "--tolerance", "2mm,1deg", "-p", "draft.nodes:=16", "--action-head")
    assert np.abs(np.subtract(near["values"], plain["values"]))[0, :3].max() <= 0.002 + 1e-9


def test_a_parameter_file_says_how_to_load_as_it_says_to_the_node(image: Path, tmp_path: Path) -> None:
    cropped = decoded(image, "-p", "center_crop:=true")
    assert cropped["tokens"] != decoded(image)["tokens"]
    file = tmp_path / "robot.yaml"
    file.write_text("policy: {ros__parameters: {center_crop: true, base_frame: base_link, instruction: ''}}")
    assert decoded(image, "--params-file", file)["tokens"] == cropped["tokens"]
    assert decoded(image, "--params-file", file, "-p", "center_crop:=false")["tokens"] != cropped["tokens"]
    file.write_text("policy: {ros__parameters: {checkpoint: digits, instruction: lift the red cube}}")
    named = specvla("predict", "--image", image, "--params-file", file, "--device", "cpu", "--json")
    assert json.loads(named.stdout)["tokens"] == decoded(image, "--policy", "digits")["tokens"], named.stderr
    both = specvla("predict", "--image", image, "--params-file", file, "--policy", "nano", "--device", "cpu", "--json")
    assert json.loads(both.stdout)["tokens"] == decoded(image)["tokens"]
    assert f"checkpoint: --checkpoint nano replaces digits of {file}" in both.stderr
    command = ("predict", "--image", image, "--instruction", "lift the red cube", "--params-file", file)
    for wrong, words in (
        ("unnorm_key: nonsense", "nonsense"),
        ("model: {prompt: ecot}", "which token ends an answer"),
        ("centre_crop: true", "did you mean 'center_crop'?"),
    ):
        file.write_text(f"policy: {{ros__parameters: {{{wrong}}}}}")
        refused(specvla(*command), words)
    refused(specvla(*command[:-2], "-p", "model.promt:=ecot"), "did you mean 'model.prompt'?")
    refused(specvla("collect-answers", "--data", "sim", "--params-file", file), "did you mean 'center_crop'?")


def test_what_is_no_option_is_otherbefore_anything_is_loaded(image: Path) -> None:
    command = ("predict", "--image", image, "--instruction", "lift the red cube")
    refused(specvla(*command, "--tolerance", "2"), "write it as 2mm,1.1deg")
    unread = specvla(*command, "--mode", "ar", "--tolerance", "5bins", "--unnorm-key", "none")
    assert "--tolerance 5bins has no effect: it applies to drafted tokens, and mode ar does not draft" in unread.stderr
    strict = ("--mode", "spec", "--tolerance", "5bins", "-p", "acceptance.rule:=strict", "--unnorm-key", "none")
    assert "--tolerance 5bins has no effect: the rule strict has none" in specvla(*command, *strict).stderr
    composite = specvla(*command, *strict, "-p", "acceptance.rule:=composite")
    assert "has no effect" not in composite.stderr
    refused(
        specvla(*command, "-p", "action.dt:=0.1"), "'action.dt' is a parameter of the policy node that this command"
    )
    refused(specvla(*command, "-p", "draft.node:=3"), "did you mean 'draft.nodes'?")
    refused(specvla(*command, "--mode", "fast"), "specpipe")
    refused(specvla(*command, "--params-file", "none.yaml"), "none.yaml does not exist")
    refused(specvla(*command, "--action-head", "-p", "decode.max_reasoning_tokens:=5"), "model.action_head")


def test_replay_pipelines_and_speculates(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / "bag", episode())
    done = specvla(
        *("replay", bag, "--instruction", "lift the red cube", "--mode", "specpipe", "--tolerance", "5mm,3deg"),
        *("-p", "draft.nodes:=16", "--device", "cpu", "--out", tmp_path / "out", "--no-progress"),
    )
    assert done.returncode == 0, done.stderr
    assert "forwards per action, τ" in done.stdout
    assert "<h2>Decoding</h2>" in (tmp_path / "out" / "report.html").read_text()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    settings = summary["settings"]
    assert summary["decode"]["actions"] == summary["actions"]
    assert (settings["mode"], settings["draft"]["nodes"]) == ("specpipe", 16)
    assert settings["acceptance"]["rule"] == "bin_distance" and settings["acceptance"]["tolerance_m"] == 0.005


def test_a_missing_package_is_one_sentence(image: Path) -> None:
    done = without("torch", "predict", "--image", image, "--instruction", "lift the red cube")
    refused(done, "the Python package 'torch' is missing; install it with")
    assert len(done.stderr.strip().splitlines()) == 1
    refused(without("rclpy", "demo"), "The pip wheel has neither")


def test_training_counts_its_images_before_it_asks_the_target(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    bag = write_bag(tmp_path / "bag", episode())
    command = ("train-draft", "--data", bag, "--out", tmp_path / "draft")
    refused(specvla(*command), "the data hold 5 images with an instruction")
    refused(specvla(*command, "--frames", "256"), "greater than or equal to 257")
    assert not (tmp_path / "draft").exists()


@needs(ORACLES)
def test_another_familys_draft_head_is_refused_before_its_images_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    bag = write_bag(tmp_path / "bag", episode(2))
    command = (
        "train-draft",
        "--policy",
        ORACLES / "nora_tiny_a" / "checkpoint",
        "--data",
        bag,
        "--out",
        tmp_path / "o",
    )
    refused(specvla(*command), "is not an OpenVLA checkpoint; draft heads are only trained for OpenVLA")


def test_a_policy_is_asked_for_its_answers(tmp_path: Path) -> None:
    bag = write_bag(tmp_path / "bag", episode(instruction="lift the red cube"))
    out = tmp_path / "answers.npz"
    command = ("collect-answers", "--policy", "digits", "--data", bag, "--out", out, "--device", "cpu")
    done = specvla(*command, "--frames", "3")
    assert done.returncode == 0, done.stderr
    assert f"to 3 images to {out}" in " ".join(done.stdout.split())
    refused(specvla(*command[:2], "nano", *command[3:]), "answers with a single action, but draft.chunk_shift")
    refused(specvla(*command[:2], "wrist", *command[3:]), "give the topic of 'wrist': --camera wrist=TOPIC")


def test_what_a_message_asks_for_is_an_option_of_the_command(checkpoint: Path, tmp_path: Path) -> None:
    """A bag of two cameras without an instruction, which every command that reads bags may be given."""
    entries = [entry for entry in episode(2, actions=False) if entry[1] == IMAGE]
    two = [(f"/{name}", *entry[1:]) for entry in entries for name in ("left", "right")]
    bag = write_bag(tmp_path / "bag", two)
    base = (
        "certify",
        "--checkpoint",
        checkpoint,
        "--data",
        bag,
        "--mode",
        "spec",
        "--device",
        "cpu",
        "-p",
        "draft.temporal:=true",
    )
    refused(specvla(*base), "pick one with --image-topic: /left, /right")
    refused(specvla(*base, "--image-topic", "/right"), "give the robot's task with --instruction 'TEXT'")
    told = ("--image-topic", "/right", "--instruction", "put carrot on plate", "--out", tmp_path / "certificate.json")
    done = specvla(*base, *told)
    assert "2 of 2 images" in done.stdout, done.stderr


@pytest.mark.skipif(not INSTALLED.exists(), reason="the scripts are not installed")
def test_an_installed_script_runs_the_python_that_it_was_installed_with(tmp_path: Path) -> None:
    done = subprocess.run([INSTALLED, "--version"], capture_output=True, text=True, timeout=60, env={}, cwd=tmp_path)
    assert done.stdout == f"specvla {__version__}\n", done.stderr
    first = INSTALLED.read_text().splitlines()[0]
    for name in ("policy", "sim_robot", "bag_player", "specvla"):
        assert (INSTALLED.parents[1] / "lib" / "specvla_ros" / name).read_text().splitlines()[0] == first


@pytest.mark.parametrize(
    ("given", "cores", "before", "threads"),
    [("", 2, 2, 1), ("", 16, 16, 15), ("", 1, 1, 1), ("", 16, 4, 4), ("3", 16, 3, None)],
)
def test_a_core_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, given: str, cores: int, before: int, threads: int | None
) -> None:
    from specvla_ros.models import checkpoint

    chosen: list[int] = []
    monkeypatch.setattr(checkpoint.torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(checkpoint.torch, "get_num_threads", lambda: before)
    monkeypatch.setattr(checkpoint.os, "cpu_count", lambda: cores)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    checkpoint.leave_a_core()
    assert chosen == ([] if threads is None else [threads])


def test_worker_processes_may_import_the_command() -> None:
    """As multiprocessing does where processes are not forked."""
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "specvla"), run_name="__mp_main__")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("no such bag \udcff"), 2, r"specvla: no such bag \\udcff$"),
        (
            OSError(28, "No space left on device", "/data/x"),
            2,
            r"/data/x: No space left .*what was written before is kept",
        ),
        (PermissionError(13, "Permission denied", "/data/x"), 2, "/data/x: Permission denied; check the path"),
        (
            ZeroDivisionError("division by zero"),
            3,
            r"this is a bug of specvla: ZeroDivisionError: .* the trace is in (\S+)",
        ),
        (
            type("PanicException", (BaseException,), {})("rust"),
            3,
            r"this is a bug .*PanicException: rust; the trace is",
        ),
    ],
)
def test_whatever_ends_a_command_is_one_line(
    error: BaseException,
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as ended, one_line_endings():
        raise error
    assert ended.value.code == code
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert re.search(text, said)
    traces = [path.read_text() for path in tmp_path.iterdir()]
    assert len(traces) == (code == 3)
    assert all("Traceback" in trace and "test_cli.py" in trace for trace in traces)


def test_a_fault_on_a_full_disk_still_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(SystemExit), one_line_endings():
        raise ZeroDivisionError
    assert re.search(
        r"bug of specvla: ZeroDivisionError; at .*test_cli\.py:\d+; the trace could not", capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["bomb.png", "picture.eps"])
def test_an_image_that_is_a_bomb_or_a_program_is_not_opened(tmp_path: Path, name: str) -> None:
    if name == "bomb.png":
        Image.new("1", (13000, 13000)).save(tmp_path / name)
    else:
        (tmp_path / name).write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    with pytest.raises(UserError, match=r"13000 x 13000 pixels, above the limit of|cannot be read"):
        read_image(tmp_path / name)


@pytest.mark.nightly
def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    """Files may have some kB each, as on a disk that fills up."""
    device = tmp_path / "device.json"
    device.write_text("old")
    bag = write_bag(tmp_path / "bag", episode(20))
    plan = ("plan", "--device", "orin", "--json", device)
    replay = ("replay", bag, "--instruction", "lift the red cube", "--device", "cpu", "--out", tmp_path / "out")
    for command, limit in ((plan, 1024), (replay, 12_000)):
        # Python would leave a cut module behind, for every process after this one.
        no_bytecode = "import sys; sys.dont_write_bytecode = True; "
        limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        code = f"{no_bytecode}{limited}from specvla_ros.lab.cli.app import main; main()"
        arguments = [sys.executable, "-c", code, *map(str, command)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
        refused(done, "File too large")
    assert device.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bag", "device.json", "out"]
    kept = (tmp_path / "out" / "frames.jsonl").read_text().splitlines()
    assert 1 < len(kept) < 20
    again = specvla(*replay)
    assert again.returncode == 0, again.stderr
    assert "20 of 20 frames answered" in again.stdout
    assert (tmp_path / "out" / "frames.jsonl").read_text().splitlines()[: len(kept) - 1] == kept[:-1]


LACKING = ("mujoco", "mink", "plotly", "av", "pyarrow", "rosbags.image", "cv2", "scipy", "matplotlib", "ray")


def without_simulator_and_plots(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Runs Python as on a robot with requirements/robot.txt."""
    lacking = f"import sys; sys.modules.update(dict.fromkeys({LACKING})); "
    return subprocess.run(
        [sys.executable, "-c", lacking + code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


STRUCTURE = Path(__file__).resolve().parents[2] / "scripts" / "count_structure.py"
GUARDED = STRUCTURE.parents[1] / "config" / "guard.yaml"
NODES = {
    "policy": f"import runpy; sys.path.insert(0, {str(STRUCTURE.parent)!r}); sys.argv[1:] = ['--run-node']; "
    f"runpy.run_path({str(STRUCTURE)!r}, run_name='__main__')",
    "driver": "from specvla_ros.ros.driver.node import DriverNode as Node",
    "guard": "from specvla_ros.ros.guard.node import GuardNode as Node",
    "task": "from specvla_ros.ros.task import TaskNode as Node",
}


@pytest.mark.parametrize("node", NODES)
def test_a_robots_nodes_need_no_extra(node: str) -> None:
    """The policy's answers an image, the others are made."""
    pytest.importorskip("rclpy")
    lacking = "sys.modules.update(dict.fromkeys(('rosbags', 'rich', 'typer'))); "
    arguments = "['--ros-args', '--params-file', sys.argv[1], '-p', \"black_box_dir:=''\"]"
    made = "" if node == "policy" else f"; import rclpy; rclpy.init(args={arguments}); Node().close()"
    done = without_simulator_and_plots(lacking + NODES[node] + made, GUARDED)
    assert done.returncode == 0, done.stderr


def test_without_the_commands_libraries_doctor_runs_and_the_others_say_what_they_want() -> None:
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec\n"
        "import specvla_ros.cli.__main__ as entry\n"
        "entry.find_spec = lambda name: None if name in ('rich', 'typer') else found(name)\n"
        "entry.main()"
    )
    doctor = without_simulator_and_plots(code, "doctor", "--json")
    assert {check["name"] for check in json.loads(doctor.stdout)} >= {"python", "torch", "ruckig", "mujoco"}
    other = without_simulator_and_plots(code, "simulate")
    assert other.returncode == 1 and "pip install -r requirements/lab.txt" in other.stderr


def test_commands_load_without_the_laboratorys_libraries_and_say_which_extra_they_want(tmp_path: Path) -> None:
    main = "sys.modules['rosbags'] = None; from specvla_ros.cli.__main__ import main; main()"
    assert without_simulator_and_plots(main, "serve", "--help").returncode == 0
    done = without_simulator_and_plots(main, "replay", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "'rosbags" in done.stderr and "the extra specvla_ros[lab]" in done.stderr


def test_a_robot_replays_without_plots(tmp_path: Path) -> None:
    command = ("replay", write_bag(tmp_path / "bag", episode(3)), "--out", tmp_path / "out", "--device", "cpu")
    main = "from specvla_ros.lab.cli.app import main; main()"
    done = without_simulator_and_plots(main, *command, "--instruction", "lift the red cube", "--no-progress")
    assert done.returncode == 0, done.stderr
    assert "cannot write report.html: the Python package 'plotly" in done.stderr
    assert "3 of 3 frames answered in mode " in done.stdout
    assert "summary.json" in done.stdout
    assert not (tmp_path / "out" / "report.html").exists()


def test_a_dataset_without_pyarrow_is_refused_with_the_extra_to_install(tmp_path: Path) -> None:
    dataset = Path(__file__).parents[1] / "lab" / "bags" / "lerobot" / "v30"
    main = "from specvla_ros.lab.cli.app import main; main()"
    done = without_simulator_and_plots(main, "replay", dataset, "--out", tmp_path / "out", "--device", "cpu")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "'pyarrow" in done.stderr and "the extra specvla_ros[lab]" in done.stderr
    done = without_simulator_and_plots(main, "export", dataset, "--out", tmp_path / "out")
    assert done.returncode == 2 and "'av' is missing" in done.stderr


def test_doctor_says_what_a_missing_package_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from specvla_ros.cli import doctor

    def version(name: str) -> str:
        if name in ("mink", "plotly", "ruckig"):
            raise doctor.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor.metadata, "version", version)
    checks = {check.name: check for check in doctor.examine()}
    assert [checks[name].state for name in ("mink", "plotly", "ruckig")] == ["note", "note", "missing"]
    assert "only the driver's joint outputs need it" in checks["mink"].fix
    assert "only reports need it" in checks["plotly"].fix


def test_doctor_says_what_a_gpu_lacks_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from specvla_kernels import device
    from specvla_ros.cli.doctor import examine

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.1.0"))
    monkeypatch.setattr(device, "build_fault", lambda: "Triton finds no Python.h in /usr/include: apt install")
    monkeypatch.setattr(device, "why_no_kernels", lambda *_: "Triton 3.1.0 is older than 3.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    checks = {check.name: check for check in examine()}
    assert {checks[name].state for name in ("triton", "triton's compiler", "kernels")} == {"note"}
    assert "older than 3.2" in checks["triton"].fix and "several times slower" in checks["triton"].fix
    assert "Python.h" in checks["triton's compiler"].fix
    assert checks["kernels"].found == "PyTorch references" and "older than 3.2" in checks["kernels"].fix


def test_where_drafting_does_not_pay_is_said(checkpoint: Path, tmp_path: Path) -> None:
    bag = write_bag(tmp_path / "bag", episode(1))
    base = ("replay", bag, "--checkpoint", checkpoint, "--device", "cpu", "--no-progress")
    for mode, said in (("spec", True), ("ar", False)):
        done = specvla(*base, "--mode", mode, "-p", "draft.temporal:=true", "--out", tmp_path / mode)
        assert done.returncode == 0, done.stderr
        assert ("slower than ar here" in done.stderr) is said
    assert (
        "1 pairs of the same frame; 0 have different tokens"
        in specvla("compare", tmp_path / "ar", tmp_path / "spec").stdout
    )
    other = specvla(*base[:1], write_bag(tmp_path / "other", episode(2)), *base[2:], "--out", tmp_path / "of_other")
    assert other.returncode == 0, other.stderr
    refused(specvla("compare", tmp_path / "ar", tmp_path / "of_other"), "share no frame of the same bag")
    refused(specvla("compare", tmp_path / "ar", tmp_path / "nowhere"), "nowhere is not a folder")
    records = (tmp_path / "spec" / "frames.jsonl").read_text().splitlines(keepends=True)
    later = json.loads(records[-1]) | {"frame": 7}
    (tmp_path / "spec" / "frames.jsonl").write_text("".join([*records, json.dumps(later) + "\n"]))
    left_out = specvla("compare", tmp_path / "ar", tmp_path / "spec").stdout
    assert f"left out, since only one of the two holds the frame: 1 of {tmp_path / 'spec'}" in left_out
