# SPDX-License-Identifier: Apache-2.0
"""Workers that are actors of a Ray cluster."""

import math
import os
import pickle
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import specvla_ros
from specvla_ros.errors import UserError
from specvla_ros.lab.jobs.workers import NOT_MADE, Host, HostDied, Hosts, Shared, WorkerDied, answer_of, opened

_CREATED_WITHIN_S = 60.0  # where the cluster has room

LOCAL = "local"
"""The address that starts a Ray cluster on this machine, for as long as the command runs."""


@dataclass(frozen=True)
class ActorPlan:
    """What a cluster is asked for."""

    count: int  # workers
    takes: dict[str, float]  # by each of them
    host_takes: dict[str, float] = field(default_factory=dict)  # by each of what they share


def plan_actors(resources: dict[str, float], workers: int, *, gpu: bool, among: int = 0) -> ActorPlan:
    """How many actors a cluster is asked for, and what each takes of it.

    Args:
        resources: of the cluster, as `ray.cluster_resources` gives them.
        workers: wanted; 0: one for each GPU that is used, else one for each core.
        gpu: whether a GPU computes where there is one; more than GPUs share them.
        among: how many workers share what needs the GPU; 0: each of them needs it.
    """
    gpus, cpus = int(resources.get("GPU", 0)) if gpu else 0, resources.get("CPU", 1)
    if among:
        count = workers or max(1, gpus) * among
        share = math.floor(min(1.0, cpus / count) * 100) / 100  # they get no more cores than there are
        hosts = math.ceil(count / among)
        return ActorPlan(count, {"num_cpus": share}, {"num_cpus": 0} | _gpu_share(hosts, gpus))
    count = workers or gpus or max(1, int(cpus))
    return ActorPlan(count, {"num_cpus": 1} | _gpu_share(count, gpus))


def _gpu_share(count: int, gpus: int) -> dict[str, float]:
    return {"num_gpus": 1 / math.ceil(count / gpus)} if gpus else {}


class RayPool:
    """Actors, and those that hold what they share; see `run_jobs`."""

    def __init__(
        self, work: Callable[..., Any], address: str, workers: int, *, gpu: bool, shared: Shared | None
    ) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("--ray needs Ray: pip install -r requirements/ray.txt") from None
        self.ray: Any = ray
        self.begun = not ray.is_initialized()
        if self.begun:
            _begin_ray(ray, address)
        among = shared.among if shared is not None else 0
        plan = plan_actors(ray.cluster_resources(), workers, gpu=gpu, among=among)
        self.size = plan.count
        self._actors = self.ray.remote(_Actor).options(max_restarts=0, **plan.takes)
        self.place = specvla_ros.__version__, os.getcwd()
        self.work = pickle.dumps(work)
        self._hosts: Hosts | None = None
        if shared is not None:
            # One call more than there are workers: to ask whether it is there.
            hosted = self.ray.remote(_Hosted).options(max_restarts=0, max_concurrency=among + 1, **plan.host_takes)
            self._hosts = Hosts(lambda: _Server(self, hosted, shared.make), among)

    def start(self) -> "_RayWorker":
        if self._hosts is None:
            return _RayWorker(self, self._actors.remote(None))
        server, place = self._hosts.take()
        actor = self._actors.remote(server.host(place))
        return _RayWorker(self, actor, partial(self._hosts.give_back, server, place))

    def wait(self, busy: Collection["_RayWorker"]) -> list["_RayWorker"]:
        by_answer = {worker.answer: worker for worker in busy}
        finished, _ = self.ray.wait(list(by_answer), num_returns=1)
        return [by_answer[each] for each in finished]

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.end()
        if self.begun:
            self.ray.shutdown()


def _begin_ray(ray: Any, address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    here = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **here)
    except (ConnectionError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(
            f"--ray {address}: no cluster is to be reached there ({str(error).strip().splitlines()[0]}); give "
            f"HOST:PORT as `ray start --head` says it, auto for the one on this machine, or {LOCAL} to start one"
        ) from None


class _RayWorker:
    """A worker.

    Args:
        pool: whose it is.
        actor: the actor.
        on_end: gives its place at what it shares back.
    """

    def __init__(self, pool: RayPool, actor: Any, on_end: Callable[[], None] = lambda: None) -> None:
        self._pool, self._actor, self._on_end = pool, actor, on_end
        self.answer: Any = None
        self._created = actor.wake.remote()

    def give(self, job: Any) -> None:
        self.answer = self._actor.run.remote(*self._pool.place, self._pool.work, pickle.dumps(job))

    def take(self) -> Any:
        errors = self._pool.ray.exceptions
        try:
            succeeded, result = self._pool.ray.get(self.answer)
        except errors.RayTaskError:  # of the lines around the job
            raise
        except errors.RayError as error:
            raise WorkerDied(" ".join(str(error).split())[:200]) from None
        return opened(succeeded, result)

    def end(self) -> None:
        _end(self._pool, self._actor, self._created)
        self._on_end()


def _end(pool: RayPool, actor: Any, created: Any) -> None:
    # One that is killed while it is being created keeps its place in the cluster for ever (seen with Ray 2.60).
    # A cluster that the pool leaves ends those that were not created in time.
    timeout = 0.0 if pool.begun else _CREATED_WITHIN_S
    with suppress(Exception):  # its machine may be gone
        there, _ = pool.ray.wait([created], timeout=timeout)
        if there:
            pool.ray.kill(actor)


class _Actor:
    """A worker on a machine of the cluster, with what it shares with others."""

    def __init__(self, host: Host | None) -> None:
        self._host = () if host is None else (host,)

    def wake(self) -> None:
        """Is answered as soon as it is there."""

    def run(self, version: str, directory: str, work: bytes, job: bytes) -> tuple[bool, Any]:
        return answer_of(self._run, version, directory, work, job)

    def _run(self, version: str, directory: str, work: bytes, job: bytes) -> Any:
        _settle(version, directory)
        return pickle.loads(work)(pickle.loads(job), *self._host)


def _settle(version: str, directory: str) -> None:
    """Makes a machine of the cluster as the command's, or says why it cannot be."""
    machine = f"the machine {os.uname().nodename} of the Ray cluster"
    if specvla_ros.__version__ != version:
        raise UserError(
            f"{machine} has specvla_ros {specvla_ros.__version__}, this one {version}: install the same there"
        )
    try:
        os.chdir(directory)  # the paths of a command are relative to it
    except OSError:
        raise UserError(
            f"{machine} has no directory {directory}: all machines must share the file system that holds the "
            "command's policy, data and results"
        ) from None


class _Hosted:
    """On a machine of the cluster: what workers share."""

    def make(self, version: str, directory: str, make: bytes) -> tuple[bool, Any]:
        return answer_of(self._make, version, directory, make)

    def _make(self, version: str, directory: str, make: bytes) -> None:
        _settle(version, directory)
        self._shared = pickle.loads(make)()

    def ping(self) -> None:
        """Is answered while it lives."""

    def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        return answer_of(getattr(self._shared, method), *arguments)


class _Server:
    """That actor, as the command has it; see `HostProcess`."""

    def __init__(self, pool: RayPool, hosted: Any, make: Callable[[], object]) -> None:
        self._pool, self._actor = pool, hosted.remote()
        self._created = self._actor.ping.remote()
        errors = pool.ray.exceptions
        try:
            opened(*pool.ray.get(self._actor.make.remote(*pool.place, pickle.dumps(make))))
        except errors.RayTaskError:
            raise
        except errors.RayError:
            raise UserError(NOT_MADE) from None

    def alive(self) -> bool:
        try:
            self._pool.ray.get(self._actor.ping.remote())
        except self._pool.ray.exceptions.RayError:
            return False
        return True

    def host(self, place: int) -> "_Guest":
        return _Guest(self._actor, place)

    def end(self) -> None:
        _end(self._pool, self._actor, self._created)


class _Guest:
    """A worker's; see `Host`."""

    def __init__(self, actor: Any, place: int) -> None:
        self.place, self._actor = place, actor

    def call(self, method: str, *arguments: Any) -> Any:
        import ray

        try:
            packed = ray.get(self._actor.call.remote(method, *arguments))
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            raise HostDied(" ".join(str(error).split())[:200]) from None
        return opened(*packed)
