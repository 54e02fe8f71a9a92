# SPDX-License-Identifier: Apache-2.0
"""The report of a GPU machine: it keeps what it found, goes on after a kill, and refuses to time references."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.patience import PATIENCE_S, wait_until

from benchmarks.gpu import page as gpu_page
from benchmarks.gpu import steps as gpu_steps
from benchmarks.gpu.report import LEFT, REFUSED, STEPS, Report
from specvla_kernels.rounded_linear import Rounded, round_rows
from specvla_ros.models.settings import QUANTIZATIONS

ROOT = Path(__file__).resolve().parents[3]
REPORT = [sys.executable, "-m", "benchmarks.gpu.report"]
TINY = ["--device", "cpu", "--sizes", "tiny"]
# As on a machine where only the checkout is: nothing says where the packages are.
BARE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")} | {
    "OMP_NUM_THREADS": "1"
}

# All in one process, which has imported torch once.
EVERY_STEP = """
import json, sys
from pathlib import Path
import torch
from support import gpu_dry_run
from benchmarks.gpu import page, steps as gpu_steps

out, steps = Path(sys.argv[1]), {}
with gpu_dry_run.device():
    for name, step in gpu_steps.STEPS.items():
        job = gpu_steps.Job("cuda", "tiny", torch.bfloat16, True, out / f"{name}.json", {}, fake=True)
        step(job)
        steps[name] = {"state": "done", "seconds": 0.0, "found": job.found}
state = {"options": {"device": "cuda", "sizes": "tiny", "dry_run": True}, "steps": steps}
(out / "report.json").write_text(json.dumps(state))
(out / "report.html").write_text(page.page(state))
"""
# On a machine that has what the how-to installs, and nothing else that this one has.
IMPORTS = """
import importlib, re, sys
from importlib import metadata

installed, kept = metadata.packages_distributions(), set()
left = ["torch", "triton", "numpy", "pillow", "pyyaml", "rich", "safetensors", "tokenizers", "typer",
        "transformers", "accelerate", "pytest", "pytest-xdist", "hypothesis"]
while left:
    if (name := left.pop().lower()) not in kept:
        kept.add(name)
        try:
            left += [re.match(r"[\\w.-]+", each)[0] for each in metadata.requires(name) or [] if "extra ==" not in each]
        except metadata.PackageNotFoundError:
            continue
missing = {module for module, names in installed.items() if not {name.lower() for name in names} & kept} | {"rclpy"}
missing -= {"specvla_ros", "specvla_kernels"}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
assert {"zstandard", "mujoco", "rclpy"} <= missing, sorted(missing)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
# What needs numbers, a compiler for the device, or packages that need not be there.
LEFT_OUT = {
    ("modes", "transformers"),
    ("attention", "FlexAttention"),
    ("attention", "torch varlen"),
    ("attention", "flash-attn"),
    ("soak", "step"),
}


def report(out: Path, *arguments: str, steps: str) -> subprocess.CompletedProcess[str]:
    command = [*REPORT, *arguments, "--out", str(out), "--steps", steps, "--budget-s", "300"]
    return subprocess.run(command, capture_output=True, text=True, timeout=320, env=BARE, cwd=ROOT)


def state(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())["steps"]
    return found


@pytest.mark.nightly
def test_it_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = [*REPORT, *TINY, "--out", str(out), "--steps", "environment,gemm", "--budget-s", "300"]
    process = subprocess.Popen(command, env=BARE, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    part = out / "gemm.json"
    until = time.monotonic() + 200
    while not (part.exists() and len(json.loads(part.read_text() or "{}")) >= 2):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = json.loads(part.read_text())
    assert state(out)["environment"]["state"] == "done" and "gemm" not in state(out)
    for child in _children_of_step("gemm", out):
        os.kill(child, signal.SIGKILL)

    done = report(out, *TINY, steps="environment,gemm,tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "environment, at most" not in done.stdout, "what is done is not done again"
    steps = state(out)
    assert all(entry["state"] == "done" for entry in steps.values())
    found = steps["gemm"]["found"]
    assert len(found) == 4 * 3 and all(found[name] == figures for name, figures in before.items())
    assert steps["tests"]["found"]["captured"]["failed"] == {}
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "report.html", "report.json"]
    page = (out / "report.html").read_text()
    assert all(title in page for title in ("Matrix products", "Tests on the device", "On a CPU, on references"))
    assert "http" not in page, "it needs nothing else"


def _children_of_step(step: str, out: Path) -> list[int]:
    """A killed report leaves its step behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if str(out / f"{step}.json") in words:
                found.append(int(entry.name))
    return found


def test_a_gpu_that_is_not_there_is_told_by_the_exit_code(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = report(tmp_path / "report", steps="environment,modes")
    assert done.returncode == 3
    assert "no CUDA GPU found" in done.stderr
    assert "modes" not in state(tmp_path / "report")


def test_a_refused_step_is_done_once_the_machine_is_put_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([REFUSED, REFUSED, REFUSED, 0])
    (tmp_path / "log.txt").write_text("gpu_report: references are not timed on a GPU\n")
    monkeypatch.setattr(Report, "_call", lambda *_: next(codes))
    options = {"device": "cuda", "sizes": "7b", "dry_run": False}
    ended = [Report(tmp_path, options).run([STEPS[0]], time.monotonic() + 99) for _ in range(4)]
    assert ended == [REFUSED, REFUSED, REFUSED, 0]
    assert state(tmp_path)["environment"]["state"] == "done"


def test_ctrl_c_ends_the_step_too(tmp_path: Path) -> None:
    """Else it would take the device from the next call's steps, and write to the same file."""
    command = [*REPORT, *TINY, "--out", str(tmp_path), "--steps", "gemm", "--budget-s", "300"]
    process = subprocess.Popen(command, env=BARE, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
    part = tmp_path / "gemm.json"
    wait_until(lambda: part.exists() and json.loads(part.read_text() or "{}"))
    children = _children_of_step("gemm", tmp_path)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_S) != 0
    left = _children_of_step("gemm", tmp_path)
    for child in left:
        os.kill(child, signal.SIGKILL)
    assert children and not left


def test_the_page_of_a_report_that_is_not_done_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 40))  # the second step finds no time left
    monkeypatch.setattr(Report, "_call", lambda *_: 0)
    monkeypatch.setattr("benchmarks.gpu.report.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    report = Report(tmp_path, {"device": "cpu", "sizes": "tiny", "dry_run": False})
    assert report.run(list(STEPS[:3]), deadline=100.0) == LEFT
    page = (tmp_path / "report.html").read_text()
    assert "1 of 3 steps are done, without modes, chunks." in page and "answer failed" in page


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"tests": {"kernels": {"failures": 2, "errors": 1}, "engine": {"failures": 0, "errors": 0}}},
            "failed on this device: 3",
        ),
        ({"soak": {"soak": {"passed": False, "phases": {}}}}, "the soak failed"),
        ({"soak": {"soak": {"passed": True, "phases": {}}}}, ""),
    ],
)
def test_a_page_passes_no_device_on_which_something_failed(found: dict[str, Any], said: str) -> None:
    """A step is done when it has run to its end, whatever it found."""
    rest = {"tests": 5, "skipped": 0, "seconds": 1.0, "failed": {}}
    for group in found.get("tests", {}).values():
        group.update(rest)
    steps = {name: {"state": "done", "seconds": 1.0, "found": each} for name, each in found.items()}
    text = gpu_page.page({"options": {"device": "cuda", "sizes": "7b"}, "steps": steps})
    assert ("answer failed" in text) == bool(said) and said in text


def test_a_folder_holds_figures_of_one_kind(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    kept = {"options": {"device": "cuda", "sizes": "7b", "dry_run": False}, "steps": {}}
    (tmp_path / "report" / "report.json").write_text(json.dumps(kept))
    done = report(tmp_path / "report", *TINY, steps="environment")
    assert done.returncode == 1 and "choose another --out" in done.stderr


def test_a_dry_run_is_a_report(tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = report(out, "--dry-run", "--sizes", "tiny", steps="gemm")
    assert done.returncode == 0, done.stdout + done.stderr + (out / "log.txt").read_text()
    products = state(out)["gemm"]["found"]["down 384"]["seconds"]
    ours = {"bfloat16, fused_linear", "int8, rounded_linear alone", "fp8, rounded_linear alone"}
    assert {products[name] for name in (*ours, "fp8, torch's product alone")} == {1e-3}, "as the fake events say"
    assert "A dry run" in (out / "report.html").read_text()


def test_the_driver_is_asked_about_the_gpu_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two GPUs, or CUDA_VISIBLE_DEVICES, the driver's first may be another."""
    temperatures = {"--id=0": "31", "--id=GPU-8f2c-01": "74"}

    def answers(command: list[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout=", ".join([temperatures[command[1]]] * len(gpu_steps._SMI.split(","))), stderr="")

    monkeypatch.setattr(gpu_steps.subprocess, "run", answers)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="8f2c-01"))
    found = gpu_steps.smi()
    assert isinstance(found, dict) and found["temperature.gpu"] == "74"


def test_a_format_that_the_gpu_does_not_compute_is_named_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Orin, an A100 and an RTX 3090 have no float8."""

    def rounds(x: torch.Tensor, dtype: torch.dtype) -> Rounded:
        if dtype == torch.float8_e4m3fn:
            raise RuntimeError("type fp8e4nv not supported in this architecture")
        return round_rows(x, dtype)

    monkeypatch.setattr(gpu_steps, "has_kernels", lambda _: True)
    monkeypatch.setattr(gpu_steps, "round_rows", rounds)
    job = gpu_steps.Job("cpu", "tiny", torch.float32, True, tmp_path / "gemm.json", {})
    gpu_steps.gemm(job)
    assert job.found
    for row in job.found.values():
        assert "fp8e4nv not supported" in row["seconds"]["fp8, rounded_linear alone"]
        assert row["seconds"]["int8, rounded_linear alone"] > 0 and row["seconds"]["float32"] > 0


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dry_run")
    environment = BARE | {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "test"))}
    command = [sys.executable, "-c", EVERY_STEP, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differs from its reference" not in done.stderr, "the check of the kernels runs, too"
    return out


@pytest.mark.nightly
def test_a_dry_run_takes_every_steps_gpu_branch(dry_run: Path) -> None:
    steps = {name: entry["found"] for name, entry in state(dry_run).items()}
    assert steps.keys() == {step.name for step in STEPS}
    assert steps["tests"]["captured"]["tests"] > 0 and not steps["tests"]["captured"]["failed"]
    assert steps["ticks"]["specpipe"]["stages_s"]["draft"] > 0
    assert {(step, name) for step, found in steps.items() for name, _ in _left_out(found)} <= LEFT_OUT
    rows = [(name, row) for step in ("modes", "ticks", "graphs", "formats") for name, row in steps[step].items()]
    captured = {name: row["cuda_graphs"] for name, row in rows if "cuda_graphs" in row}
    assert {f"{weights}, {mode}" for weights in QUANTIZATIONS for mode in ("ar", "specpipe")} <= captured.keys()
    assert all(status.endswith(" captured") != name.endswith("eager") for name, status in captured.items())


@pytest.mark.nightly
def test_what_a_dry_run_leaves_out_says_why(dry_run: Path) -> None:
    reasons = {name: why for entry in state(dry_run).values() for name, why in _left_out(entry["found"])}
    assert "no values" in reasons["transformers"]
    page = (dry_run / "report.html").read_text()
    assert "its checks need numbers" in page and escape(reasons["transformers"]) in page


def _left_out(found: Any, name: str = "step") -> Iterator[tuple[str, str]]:
    """What has a reason in place of figures, and the reason."""
    for key, value in found.items() if isinstance(found, dict) else ():
        if key == "skipped" and isinstance(value, str):
            yield name, value
        elif name == "seconds" and isinstance(value, str):
            yield key, value
        else:
            yield from _left_out(value, key)


def test_tests_and_soak_import_only_what_the_how_to_installs() -> None:
    """A module that cannot be imported on a GPU machine is a test that does not run there."""
    files = [file for paths in gpu_steps._TESTS.values() for path in paths for file in _files(ROOT / "test" / path)]
    modules = [".".join(file.relative_to(ROOT / "test").with_suffix("").parts) for file in files]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "test")))
    command = [sys.executable, "-c", IMPORTS, *modules, "faults.soak"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=BARE | {"PYTHONPATH": path})
    assert len(modules) > 25 and not done.returncode, done.stderr


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("test_*.py")) if path.is_dir() else [path]
