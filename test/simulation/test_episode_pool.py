# SPDX-License-Identifier: Apache-2.0
"""Episodes in processes: each once, whatever dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.episode_jobs import die, refuse, square
from support.gl import needs_gl
from support.patience import PATIENCE_S, wait_until

from specvla_ros.errors import UserError
from specvla_ros.simulation.episode_pool import run_episodes


@pytest.mark.parametrize("workers", (0, 2))
def test_each_job_comes_back_once(workers, tmp_path):
    jobs = [(number, str(tmp_path)) for number in (1, 2, 4, 5)]
    results = list(run_episodes(square, jobs, workers=workers))
    assert sorted(results) == sorted((job, job[0] ** 2) for job in jobs)


def test_episodes_of_a_killed_worker_are_done_again_and_counted_once(tmp_path):
    jobs = [(number, str(tmp_path)) for number in range(8)]
    results = list(run_episodes(square, jobs, workers=2))
    assert sorted(job[0] for job, _ in results) == list(range(8))
    assert len(list(tmp_path.glob("3-*"))) == 2


def test_worker_that_dies_again_and_again_ends_with_advice():
    with pytest.raises(UserError, match=r"died 3 times.*fewer --workers"):
        list(run_episodes(die, [7], workers=1))


def test_error_of_the_user_reaches_the_user():
    with pytest.raises(UserError, match="episode 1 cannot be"):
        list(run_episodes(refuse, [1], workers=1))


def test_ray_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'ray>=2.9'"):
        list(run_episodes(square, [], workers=0, ray=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process of its parent's death")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    code = (
        "from support.episode_jobs import name_and_wait\n"
        "from specvla_ros.simulation.episode_pool import run_episodes\n"
        f"list(run_episodes(name_and_wait, [{str(tmp_path)!r}] * 2, workers=2))"
    )
    test = Path(__file__).resolve().parents[1]
    command = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(test)})

    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    command.kill()
    command.wait()
    wait_until(lambda: not any(Path("/proc", worker.name).exists() for worker in tmp_path.iterdir()))


@needs_gl
def test_a_policy_is_loaded_behind_the_renderer_whatever_brings_an_llvm(tmp_path):
    """As the command does it, without what the tests set for Triton."""
    command = [sys.executable, "-m", "specvla_ros.cli.app", "simulate", "--out", str(tmp_path), "--films", "0"]
    command += ["--task", "lift_red", "--episodes", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
