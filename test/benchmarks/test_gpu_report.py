# SPDX-License-Identifier: Apache-2.0
"""The report of a GPU machine: it keeps what it found, goes on after a kill, and refuses to time references."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
REPORT = [sys.executable, str(BENCHMARKS / "gpu_report.py")]
TINY = ["--device", "cpu", "--sizes", "tiny"]
# As on a machine where only the checkout is: nothing says where the packages are.
BARE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")} | {
    "OMP_NUM_THREADS": "1"
}


def report(out: Path, *arguments: str, steps: str) -> subprocess.CompletedProcess[str]:
    command = [*REPORT, *arguments, "--out", str(out), "--steps", steps, "--budget-s", "300"]
    return subprocess.run(command, capture_output=True, text=True, timeout=320, env=BARE, cwd=out.parent)


def state(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())["steps"]
    return found


def test_it_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = [*REPORT, *TINY, "--out", str(out), "--steps", "environment,gemm", "--budget-s", "300"]
    process = subprocess.Popen(command, env=BARE, start_new_session=True, stdout=subprocess.DEVNULL)
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

    done = report(out, *TINY, steps="environment,gemm,tests,vllm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "environment, at most" not in done.stdout, "what is done is not done again"
    steps = state(out)
    assert all(entry["state"] == "done" for entry in steps.values())
    found = steps["gemm"]["found"]
    assert len(found) == 4 * 3 and all(found[name] == figures for name, figures in before.items())
    assert steps["tests"]["found"]["captured"]["failed"] == {}
    assert "not installed" in steps["vllm"]["found"]["skipped"]
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
    assert "there is no CUDA GPU" in done.stderr
    assert "modes" not in state(tmp_path / "report")


def test_a_folder_holds_figures_of_one_kind(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    kept = {"options": {"device": "cuda", "sizes": "7b", "dry_run": False}, "steps": {}}
    (tmp_path / "report" / "report.json").write_text(json.dumps(kept))
    done = report(tmp_path / "report", *TINY, steps="environment")
    assert done.returncode == 1 and "name another --out" in done.stderr


def test_a_dry_run_takes_the_gpu_branches(tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = report(out, "--dry-run", "--sizes", "tiny", steps="gemm,ticks")
    assert done.returncode == 0, done.stdout + done.stderr + (out / "log.txt").read_text()
    found = state(out)
    products = found["gemm"]["found"]["down 384"]["seconds"]
    ours = {"bfloat16, fused_linear", "int8, rounded_linear alone", "fp8, rounded_linear alone"}
    assert {products[name] for name in (*ours, "fp8, torch's product alone")} == {1e-3}, "as the fake events say"
    assert found["ticks"]["found"]["specpipe"]["cuda_graphs"].endswith(" captured")
    assert "A dry run" in (out / "report.html").read_text()
