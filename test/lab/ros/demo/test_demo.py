# SPDX-License-Identifier: Apache-2.0
"""The demo, as a newcomer runs it, with the policy that is shipped."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
from support.checkpoints import copy_checkpoint, edit_json, with_sensors
from support.gl import needs_gl
from support.nightly import nightly_but
from support.patience import PATIENCE_S, wait_until
from support.typed import specvla

from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.ros.demo import run as demo
from specvla_ros.lab.ros.demo.run import _senses
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.models.families.openvla.config import read_config

COMMAND = [sys.executable, "-m", "specvla_ros.cli", "demo", "--episodes", "1"]


@needs_gl
@pytest.mark.parametrize(
    "tasks", nightly_but(lambda tasks: len(tasks) == 1, [("lift_red",), ("lift_red", "push_green")])
)
def test_arm_acts_over_topics_and_leaves_a_report_with_films(tmp_path, tasks):
    run = subprocess.run(
        [*COMMAND, "--out", str(tmp_path), *(word for task in tasks for word in ("--task", task))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "the arm completed" in run.stdout, run.stdout + run.stderr
    assert "lift the red cube: " in run.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["tasks"]) == set(tasks) and summary["success"]["episodes"] == len(tasks)
    assert run.returncode == (0 if summary["success"]["successes"] else 1)
    assert summary["latency_s"]["p50"] > 0 and summary["action_rate_hz"] > 1
    for task in summary["tasks"]:
        (path,) = (tmp_path / "films").glob(f"{task}-*.mp4")
        with av.open(str(path)) as film:
            assert sum(1 for _ in film.decode(video=0)) > 5
    assert "data:video/mp4" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "options, words",
    [
        (
            ("--policy", "joints", "--interface", "pose"),
            "--interface pose is for actions of the tool, but the policy's position joints",
        ),
        (
            ("--policy", "joints", "--robot", "ur5e"),
            "joint5, joint6, joint7, gripper, but this robot has shoulder_pan_joint",
        ),
        (("--policy", "so101", "--robot", "panda"), "but this robot has joint1, joint2, joint3"),
        (("--policy", "nano", "--robot", "so101"), "the policy moves the tool, but the 5 joints"),
    ],
    ids=["interface", "ur5e", "panda", "so101"],
)
def test_a_policy_of_another_arm_or_interface_is_refused_before_anything_starts(tmp_path, options, words):
    run = specvla("demo", "--out", tmp_path / "demo", *options)
    assert run.returncode == 2 and words in " ".join(run.stderr.split()), run.stdout + run.stderr
    assert not (tmp_path / "demo").exists()


class BroughtUpError(Exception):
    """Ends a demo where its nodes would start."""


@needs_gl
def test_a_policy_with_several_statistics_is_shown_with_those_that_were_named(tmp_path, monkeypatch):
    policy, key = copy_checkpoint(nano_policy(), tmp_path / "policy"), "specvla_table"
    edit_json(policy / "config.json", lambda config: config["norm_stats"].update(other=config["norm_stats"][key]))

    def begun(_: object) -> None:
        raise BroughtUpError

    monkeypatch.setattr(demo, "refuse_others", begun)
    monkeypatch.setattr(demo, "rclpy", SimpleNamespace(init=lambda args: None, try_shutdown=lambda: None))
    with pytest.raises(BroughtUpError):
        demo.run_demo(
            tmp_path / "demo",
            policy,
            robot=demo.DemoRobot(TABLE_ARM),
            tasks=[],
            episodes=1,
            seed=0,
            parameters={"unnorm_key": key, "decode.mode": "ar"},
        )


@pytest.mark.nightly
@needs_gl
@pytest.mark.parametrize(
    "how, robot, interface",
    [
        (["--interface", "pose", "--task", "lift_red"], "table", "pose"),
        (["--policy", "joints", "--task", "lift_red"], "table", "joint_trajectory_chunk"),
        (["--robot", "so101", "--task", "point_red"], "so101", "joint_trajectory_chunk"),
    ],
    ids=["poses", "joints", "so101"],
)
def test_commanded_arm_moves_through_driver_and_guard(tmp_path, how, robot, interface):
    run = subprocess.run(
        [*COMMAND, "--out", str(tmp_path), *how],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "guard: passing" in run.stdout and "the arm completed" in run.stdout, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert run.returncode == (0 if summary["success"]["successes"] else 1)
    context = summary["context"]
    assert (context["settings"]["robot"], context["settings"]["interface"]) == (robot, interface)
    assert set(context["refused"]) == {"driver", "guard"}
    assert context["refused"]["guard"]["not_enabled"] >= 1, "nothing goes through before the operator enables it"
    assert "Driver and guard" in (tmp_path / "report.html").read_text()
    (path,) = (tmp_path / "films").glob("*.mp4")
    with av.open(str(path)) as film:
        first, *_, last = (frame.to_ndarray(format="rgb24").astype(int) for frame in film.decode(video=0))
    assert np.abs(last - first).max() > 50, "the arm is where it was"


@pytest.mark.nightly
@needs_gl
def test_a_key_stops_the_arm_and_another_clears_the_stop(tmp_path):
    command = [*COMMAND, "--out", str(tmp_path), "--interface", "pose", "--episodes", "100"]
    with _terminal(command) as (master, shown, process):
        wait_until(lambda: "Esc: stop the arm" in shown() and "passing" in shown())
        os.write(master, b"\x1b")
        wait_until(lambda: "stopped: stop: " in shown())
        cleared = len(shown())

        wait_until(lambda: "passing" in shown()[cleared:], meanwhile=lambda: _press_clear(master))
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "report with films" in shown() and process.poll() is not None)
        assert "Traceback" not in shown()
    assert json.loads((tmp_path / "summary.json").read_text())["context"]["refused"]["guard"]["stop"] == 1


def _press_clear(master):
    """Again and again, as who stands there does: the guard refuses it until the arm has come to rest."""
    os.write(master, b"\x12")
    time.sleep(0.5)


@contextlib.contextmanager
def _terminal(command):
    """A command on a terminal: where keys go, a function that gives all that was shown so far, and its process."""
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, close_fds=True)
    os.close(slave)
    os.set_blocking(master, False)
    read = []

    def shown():
        with contextlib.suppress(OSError):
            read.append(os.read(master, 1 << 16).decode(errors="ignore"))
        return "".join(read)

    try:
        yield master, shown, process
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.parametrize(
    ("package", "options", "how"),
    [
        ("robosuite", ["--robot", "panda"], "pip install --no-deps robosuite=="),
        ("rerun", ["--rerun"], "pip install -r requirements/rerun.txt"),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_brings_it(tmp_path, package, options, how):
    run = specvla("demo", "--out", tmp_path, *options, lacking=package)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert how in " ".join(run.stderr.split())


@pytest.mark.nightly
@needs_gl
def test_typed_instruction_is_what_the_arm_is_judged_by_and_a_key_stops_it(tmp_path):
    policy = str(_sluggish(tmp_path / "policy"))
    command = [*COMMAND, "--out", str(tmp_path), "--interface", "pose", "--task", "put_red", "--policy", policy]
    with _terminal(command) as (master, shown, process):
        wait_until(lambda: "then Enter: " in shown())
        os.write(master, b"push the green cube into the white zone")
        wait_until(lambda: "then Enter: push the green cube into the white zone" in shown())
        # Two seconds on, when all have found each other: who is not yet known to the robot is not heard by it.
        wait_until(lambda: re.search(r"episode +1, \w+, [2-9]\.", shown()))
        os.write(master, b"\n")
        wait_until(lambda: "passing" in shown())
        os.write(master, b"\x1b")
        wait_until(lambda: "stopped: stop: " in shown())
        stopped = len(shown())
        wait_until(lambda: "passing" in shown()[stopped:], meanwhile=lambda: _press_clear(master))
        wait_until(lambda: "report with films" in shown() and process.poll() is not None)
        assert process.returncode in (0, 1) and "Traceback" not in shown()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["tasks"]) == {"push_green"} and summary["context"]["refused"]["guard"]["stop"] == 1
    assert summary["context"]["refused"]["guard"]["not_enabled"] >= 1, "nothing goes through before it is enabled"


def _sluggish(directory):
    """The shipped policy with displacements so small that no task is done in time, but not too small for the arm."""
    shutil.copytree(nano_policy(), directory)
    config = json.loads((directory / "config.json").read_text())
    for statistics in config["norm_stats"].values():
        action = statistics["action"]
        action["q01"], action["q99"] = [-1.5e-3] * 6 + action["q01"][6:], [1.5e-3] * 6 + action["q99"][6:]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@needs_gl
@pytest.mark.parametrize("loaded", ["", "_rclpy_pybind11"])
def test_nothing_outlives_a_demo_that_is_killed(tmp_path, loaded):
    """Its nodes may only just have been started, or be importing ROS."""
    demo = subprocess.Popen([*COMMAND, "--out", str(tmp_path)], stdout=subprocess.DEVNULL)
    children = wait_until(lambda: found if len(found := _children(demo.pid)) == 2 else [])
    wait_until(lambda: all(loaded in Path(f"/proc/{child}/maps").read_text() for child in children))
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
    monkeypatch.setattr("specvla_ros.lab.bundled.policies.__file__", str(tmp_path / "shipped.py"))
    with pytest.raises(UserError, match="name a checkpoint with --policy"):
        nano_policy()


@needs_gl
@pytest.mark.nightly
def test_a_policy_of_two_cameras_with_a_state_is_shown_all_of_it(tmp_path):
    run = subprocess.run(
        [*COMMAND, "--out", str(tmp_path / "out"), "--policy", "wrist", "--task", "lift_red"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
    )
    assert "the arm completed" in run.stdout, run.stdout + run.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["action_rate_hz"] > 1


def test_a_policy_of_more_cameras_than_the_robot_has_is_refused(tmp_path):
    copied = with_sensors(copy_checkpoint(nano_policy(), tmp_path / "three"))
    with pytest.raises(UserError, match="needs images of 3 cameras, but this robot has 2"):
        _senses(copied, read_config(copied))
