# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes and on a Ray cluster: each once, whatever dies."""

import os
import re
import socket
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from support.gl import needs_gl
from support.jobs import Squares, ask_for_square, dead_squares, die, no_squares, refuse, square, unsendable
from support.patience import PATIENCE_S, wait_until

from specvla_ros import __version__
from specvla_ros.errors import UserError
from specvla_ros.lab.jobs.ray_cluster import ActorPlan, _check_listens, make_settled, plan_actors
from specvla_ros.lab.jobs.run import run_jobs
from specvla_ros.lab.jobs.workers import Holder, Shared
from specvla_ros.lab.plans import Spread

PROCESSES, CLUSTER = Spread(workers=2), Spread(workers=2, ray="local")


BY_NIGHT = pytest.param(CLUSTER, id="ray", marks=pytest.mark.nightly)


@pytest.fixture(params=(pytest.param(PROCESSES, id="processes"), BY_NIGHT))
def where(request):
    if request.param.ray:
        request.getfixturevalue("cluster")
    return request.param


def test_each_job_comes_back_once_in_this_process(tmp_path):
    jobs = [(number, str(tmp_path)) for number in (1, 2, 4, 5)]
    assert list(run_jobs(square, jobs)) == [(job, job[0] ** 2) for job in jobs]


@pytest.mark.parametrize("where", (PROCESSES, CLUSTER), ids=("processes", "ray"), indirect=True)
def test_the_job_of_a_killed_worker_is_done_again_and_counted_once(where, tmp_path):
    jobs = [(number, str(tmp_path)) for number in range(8)]
    results = list(run_jobs(square, jobs, where))
    assert sorted(results) == sorted((job, job[0] ** 2) for job in jobs)
    attempts = Counter(mark.name.partition("-")[0] for mark in tmp_path.iterdir())
    assert attempts == {str(number): 1 + (number == 3) for number in range(8)}


def test_a_job_that_kills_its_workers_is_named_when_the_others_are_done(where, tmp_path):
    jobs = [(number, str(tmp_path)) for number in (1, -7, 2, 4)]
    found = []
    with pytest.raises(UserError, match=r"1 of 4 .*: the job -7: its worker died 3 times.*Finished jobs are kept"):
        for job, result in run_jobs(square, jobs, where, name=lambda job: f"the job {job[0]}"):
            found.append((job[0], result))
    assert sorted(found) == [(1, 1), (2, 4), (4, 16)]
    stands_for_it = dict(run_jobs(square, jobs, where, lost=lambda job, why: why))
    assert [job[0] for job, result in stands_for_it.items() if "died 3 times" in str(result)] == [-7]


def test_where_every_worker_dies_not_every_job_is_tried(where):
    with pytest.raises(UserError, match=r"500 of 500 jobs failed: .*, …: .*fewer --workers"):
        list(run_jobs(die, range(500), where))


def test_what_a_job_raises_is_raised_and_not_tried_again(where, tmp_path):
    with pytest.raises(UserError, match="job 1 cannot be") as raised:
        list(run_jobs(refuse, [(1, str(tmp_path))], where))
    assert "in refuse" in str(raised.value.__cause__)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(RuntimeError, match="cannot be sent"):
        list(run_jobs(unsendable, [1], where))


def test_ray_that_is_missing_or_not_reached_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install -r requirements/ray.txt"):
        list(run_jobs(square, [], Spread(ray="local")))


def test_nobody_at_a_clusters_address_is_noticed_soon():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(UserError, match=rf"--ray {address}: nothing listens at this address"):
        _check_listens(address)
    for other in ("auto", "local", "ray://head:10001/x"):
        _check_listens(other)


def test_workers_share_what_is_made_once_and_again_when_it_dies(where, tmp_path):
    shared = Shared(partial(Squares, tmp_path), among=2)
    results = list(run_jobs(ask_for_square, range(9), where, shared=shared))
    assert sorted(job for job, _ in results) == [*range(9)]
    assert all(result[0] == job**2 for job, result in results)
    made = {mark.name for mark in tmp_path.glob("made-*")}
    assert made == {f"made-{result[1]}" for _, result in results} and len(made) <= 2
    assert (tmp_path / "killed").exists() and len(made) == 2
    assert {result[3] for _, result in results} <= {0, 1}, "a place of a worker that is gone is given to the next"
    asked = [(result[1], result[3], result[2]) for _, result in results]
    assert len({*asked}) == len(asked), "two workers had one place"


def test_what_the_shared_raises_and_its_making_is_raised(where, tmp_path):
    (tmp_path / "killed").touch()
    with pytest.raises(UserError, match="-2 is not squared"):
        list(run_jobs(ask_for_square, [1, -2], where, shared=Shared(partial(Squares, tmp_path), among=2)))
    with pytest.raises(UserError, match="no squares today"):
        list(run_jobs(ask_for_square, [1], where, shared=Shared(no_squares, among=2)))
    with pytest.raises(UserError, match="the process that loads the workers' shared model died"):
        list(run_jobs(ask_for_square, [1], where, shared=Shared(dead_squares, among=2)))


@pytest.mark.parametrize(
    ("resources", "workers", "gpu", "plan"),
    [
        ({"CPU": 8.0}, 0, True, ActorPlan(8, {"num_cpus": 1})),
        ({"CPU": 8.0, "GPU": 2.0}, 0, False, ActorPlan(8, {"num_cpus": 1})),
        ({"CPU": 8.0, "GPU": 2.0}, 0, True, ActorPlan(2, {"num_cpus": 1, "num_gpus": 1.0})),
        ({"CPU": 8.0, "GPU": 2.0}, 5, True, ActorPlan(5, {"num_cpus": 1, "num_gpus": 1 / 3})),
        ({}, 0, True, ActorPlan(1, {"num_cpus": 1})),
    ],
)
def test_actors_share_the_gpus_of_a_cluster(resources, workers, gpu, plan):
    assert plan_actors(resources, workers, gpu=gpu) == plan


@pytest.mark.parametrize(
    ("resources", "workers", "gpu", "plan"),
    [
        ({"CPU": 64.0, "GPU": 2.0}, 0, True, ActorPlan(16, {"num_cpus": 1.0}, {"num_cpus": 0, "num_gpus": 1.0})),
        ({"CPU": 4.0, "GPU": 1.0}, 12, True, ActorPlan(12, {"num_cpus": 0.33}, {"num_cpus": 0, "num_gpus": 0.5})),
        ({"CPU": 2.0}, 0, True, ActorPlan(8, {"num_cpus": 0.25}, {"num_cpus": 0})),
    ],
)
def test_what_actors_share_takes_the_gpus(resources, workers, gpu, plan):
    assert plan_actors(resources, workers, gpu=gpu, among=8) == plan


def test_a_machine_of_the_cluster_that_is_another_is_named(tmp_path):
    succeeded, (error, _) = Holder(make_settled, "0.0.1", str(tmp_path), b"").call("")
    assert not succeeded and re.search(r"the machine .* has specvla_ros .*, this machine 0\.0\.1", str(error))
    succeeded, (error, _) = Holder(make_settled, __version__, str(tmp_path / "no"), b"").call("")
    assert not succeeded and "must share the file system" in str(error)


tells_of_death = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a process of its parent's death"
)


@tells_of_death
def test_workers_end_with_the_process_that_started_them(tmp_path):
    code = (
        "from support.jobs import name_and_wait\n"
        "from specvla_ros.lab.jobs.run import run_jobs\n"
        "from specvla_ros.lab.plans import Spread\n"
        f"list(run_jobs(name_and_wait, [{str(tmp_path)!r}] * 2, Spread(workers=2)))"
    )
    test = Path(__file__).resolve().parents[2]
    command = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(test)})

    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    command.kill()
    command.wait()
    wait_until(lambda: not any(Path("/proc", worker.name).exists() for worker in tmp_path.iterdir()))


@tells_of_death
def test_a_process_ends_with_its_parent_even_where_an_exception_would_be_ignored(tmp_path):
    child = (
        "import contextlib, os, sys, time\n"
        "from pathlib import Path\n"
        "from specvla_ros.lab.jobs.workers import end_with_parent\n"
        "end_with_parent(int(sys.argv[1]))\n"
        "Path(sys.argv[2], str(os.getpid())).touch()\n"
        f"until = time.monotonic() + {2 * PATIENCE_S}\n"
        "while time.monotonic() < until:\n"
        "    with contextlib.suppress(BaseException):\n"
        "        time.sleep(0.02)"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {child!r}, str(os.getpid()), {str(tmp_path)!r}])"
    )
    command = subprocess.Popen([sys.executable, "-c", parent])

    (process,) = wait_until(lambda: list(tmp_path.iterdir()))
    command.kill()
    command.wait()
    wait_until(lambda: not Path("/proc", process.name).exists())


@pytest.mark.nightly
@needs_gl
def test_a_policy_is_loaded_behind_the_renderer_whatever_brings_an_llvm(tmp_path):
    """As the command does it, without what the tests set for Triton."""
    command = [sys.executable, "-m", "specvla_ros.cli", "simulate", "--out", str(tmp_path), "--films", "0"]
    command += ["--task", "lift_red", "--episodes", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
