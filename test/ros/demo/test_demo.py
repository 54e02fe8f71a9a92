# SPDX-License-Identifier: Apache-2.0
"""The demo, as a newcomer runs it, with the policy that is shipped."""

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import av
import pytest
from support.gl import needs_gl
from support.patience import PATIENCE_S, wait_until

from specvla_ros.errors import UserError
from specvla_ros.policies.bundled import nano_policy

COMMAND = [sys.executable, "-m", "specvla_ros.cli.app", "demo", "--episodes", "1"]


@needs_gl
def test_arm_acts_over_topics_and_leaves_a_report_with_films(tmp_path):
    run = subprocess.run(
        [*COMMAND, "--out", str(tmp_path), "--task", "lift_red", "--task", "push_green"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "the arm did" in run.stdout, run.stdout + run.stderr
    assert "lift the red cube: " in run.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["tasks"]) == {"lift_red", "push_green"} and summary["success"]["episodes"] == 2
    assert run.returncode == (0 if summary["success"]["successes"] else 1)
    assert summary["latency_s"]["p50"] > 0 and summary["action_rate_hz"] > 1
    for task in summary["tasks"]:
        (path,) = (tmp_path / "films").glob(f"{task}-*.mp4")
        with av.open(str(path)) as film:
            assert sum(1 for _ in film.decode(video=0)) > 5
    assert "data:video/mp4" in (tmp_path / "report.html").read_text()


@needs_gl
def test_typed_instruction_is_what_the_arm_is_judged_by(tmp_path):
    command = [*COMMAND, "--out", str(tmp_path), "--task", "put_red", "--policy", str(_sluggish(tmp_path / "policy"))]
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, close_fds=True)
    os.close(slave)
    os.set_blocking(master, False)
    shown = ""

    def shows(text):
        nonlocal shown
        with contextlib.suppress(OSError):
            shown += os.read(master, 1 << 16).decode(errors="ignore")
        return text in shown or process.poll() is not None

    wait_until(lambda: shows("then Enter: "))
    os.write(master, b"push the green cube into the white zone")
    wait_until(lambda: shows("then Enter: push the green cube into the white zone"))
    wait_until(lambda: shows("actions/s"))
    os.write(master, b"\n")
    wait_until(lambda: shows("report with films") and process.poll() is not None)
    assert process.returncode in (0, 1)
    os.close(master)
    assert set(json.loads((tmp_path / "summary.json").read_text())["tasks"]) == {"push_green"}


def _sluggish(directory):
    """The shipped policy with displacements so small that no task is done before its time is up."""
    shutil.copytree(nano_policy(), directory)
    config = json.loads((directory / "config.json").read_text())
    for statistics in config["norm_stats"].values():
        action = statistics["action"]
        action["q01"], action["q99"] = [-1e-4] * 6 + action["q01"][6:], [1e-4] * 6 + action["q99"][6:]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@needs_gl
def test_nothing_outlives_a_demo_that_is_killed(tmp_path):
    demo = subprocess.Popen([*COMMAND, "--out", str(tmp_path)], stdout=subprocess.DEVNULL)
    children = wait_until(lambda: found if len(found := _children(demo.pid)) == 2 else [])
    # From here on they have asked to end with the demo: ROS is loaded after that.
    wait_until(lambda: all("_rclpy_pybind11" in Path(f"/proc/{child}/maps").read_text() for child in children))
    demo.kill()
    demo.wait()
    wait_until(lambda: not any(map(_runs, children)))


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@needs_gl
def test_policy_that_cannot_be_loaded_ends_with_one_sentence(tmp_path):
    run = subprocess.run(
        [*COMMAND, "--out", str(tmp_path / "out"), "--policy", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert run.returncode == 2 and "does not exist" in run.stderr and "Traceback" not in run.stderr


def test_shipped_policy_is_small_and_complete():
    directory = nano_policy()
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "training.json"} <= names
    assert sum(path.stat().st_size for path in directory.iterdir()) < 16e6


def test_missing_shipped_policy_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("specvla_ros.policies.bundled.__file__", str(tmp_path / "shipped.py"))
    with pytest.raises(UserError, match="name a checkpoint with --policy"):
        nano_policy()
