# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes and on a Ray cluster: each once, whatever dies."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.gl import needs_gl
from support.jobs import die, refuse, square, unsendable
from support.patience import PATIENCE_S, wait_until

from specvla_ros import __version__
from specvla_ros.errors import UserError
from specvla_ros.jobs import _Actor, actors_of, run_jobs

PROCESSES, CLUSTER = {"workers": 2}, {"workers": 2, "ray": "local"}


@pytest.fixture(params=(PROCESSES, CLUSTER), ids=("processes", "ray"))
def where(request):
    if "ray" in request.param:
        request.getfixturevalue("cluster")
    return request.param


def test_each_job_comes_back_once_in_this_process(tmp_path):
    jobs = [(number, str(tmp_path)) for number in (1, 2, 4, 5)]
    assert list(run_jobs(square, jobs)) == [(job, job[0] ** 2) for job in jobs]


def test_the_job_of_a_killed_worker_is_done_again_and_counted_once(where, tmp_path):
    jobs = [(number, str(tmp_path)) for number in range(8)]
    results = list(run_jobs(square, jobs, **where))
    assert sorted(results) == sorted((job, job[0] ** 2) for job in jobs)
    attempts = Counter(mark.name.partition("-")[0] for mark in tmp_path.iterdir())
    assert attempts == {str(number): 1 + (number == 3) for number in range(8)}


def test_a_job_that_kills_its_workers_is_named_when_the_others_are_done(where, tmp_path):
    jobs = [(number, str(tmp_path)) for number in (1, -7, 2, 4)]
    found = []
    with pytest.raises(UserError, match=r"1 of 4 .*: the job -7: a worker died 3 times.*What is finished is kept"):
        for job, result in run_jobs(square, jobs, **where, name=lambda job: f"the job {job[0]}"):
            found.append((job[0], result))
    assert sorted(found) == [(1, 1), (2, 4), (4, 16)]
    stands_for_it = dict(run_jobs(square, jobs, **where, lost=lambda job, why: why))
    assert [job[0] for job, result in stands_for_it.items() if "died 3 times" in str(result)] == [-7]


def test_where_every_worker_dies_not_every_job_is_tried(where):
    with pytest.raises(UserError, match=r"500 of 500 could not be done: .*, …: .*fewer --workers"):
        list(run_jobs(die, range(500), **where))


def test_what_a_job_raises_is_raised_and_not_tried_again(where, tmp_path):
    with pytest.raises(UserError, match="job 1 cannot be") as raised:
        list(run_jobs(refuse, [(1, str(tmp_path))], **where))
    assert "in refuse" in str(raised.value.__cause__)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(RuntimeError, match="cannot be sent"):
        list(run_jobs(unsendable, [1], **where))


def test_ray_that_is_missing_or_not_reached_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install -r requirements/ray.txt"):
        list(run_jobs(square, [], ray="local"))


@pytest.mark.parametrize(
    ("resources", "workers", "gpu", "count", "takes"),
    [
        ({"CPU": 8.0}, 0, True, 8, {"num_cpus": 1}),
        ({"CPU": 8.0, "GPU": 2.0}, 0, False, 8, {"num_cpus": 1}),
        ({"CPU": 8.0, "GPU": 2.0}, 0, True, 2, {"num_cpus": 1, "num_gpus": 1.0}),
        ({"CPU": 8.0, "GPU": 2.0}, 5, True, 5, {"num_cpus": 1, "num_gpus": 1 / 3}),
        ({}, 0, True, 1, {"num_cpus": 1}),
    ],
)
def test_actors_share_the_gpus_of_a_cluster(resources, workers, gpu, count, takes):
    assert actors_of(resources, workers, gpu=gpu) == (count, takes)


def test_a_machine_of_the_cluster_that_is_another_is_named(tmp_path):
    succeeded, (error, _) = _Actor().run("0.0.1", str(tmp_path), b"", b"")
    assert not succeeded and re.search(r"the machine .* has specvla_ros .*, this one 0\.0\.1", str(error))
    succeeded, (error, _) = _Actor().run(__version__, str(tmp_path / "no"), b"", b"")
    assert not succeeded and "must share the file system" in str(error)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process of its parent's death")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    code = (
        "from support.jobs import name_and_wait\n"
        "from specvla_ros.jobs import run_jobs\n"
        f"list(run_jobs(name_and_wait, [{str(tmp_path)!r}] * 2, workers=2))"
    )
    test = Path(__file__).resolve().parent
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
