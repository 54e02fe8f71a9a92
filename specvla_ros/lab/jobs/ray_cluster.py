# SPDX-License-Identifier: Apache-2.0
"""Workers and their shared objects, each an actor of a Ray cluster."""

import math
import os
import pickle
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import specvla_ros
from specvla_ros.errors import UserError
from specvla_ros.lab.jobs.workers import Holder, Host, ProcessDied, opened

_LISTENS_WITHIN_S = 3.0
_CREATED_WITHIN_S = 60.0  # if the cluster has free resources
LOCAL = "local"  # the address that starts a Ray cluster on this machine for the command's duration


@dataclass(frozen=True)
class ActorPlan:
    """The resources to request from a cluster."""

    count: int  # workers
    takes: dict[str, float]  # by each worker
    host_takes: dict[str, float] = field(default_factory=dict)  # by each shared object


def plan_actors(resources: dict[str, float], workers: int, *, gpu: bool, among: int = 0) -> ActorPlan:
    """The number of actors and the resources of each.

    Args:
        resources: the cluster's, from `ray.cluster_resources`.
        workers: number requested; 0: one per GPU in use, else one per core.
        gpu: use GPUs if available; surplus workers share them.
        among: number of workers per shared object, which then needs the GPU; 0: each worker needs it.
    """
    gpus, cpus = int(resources.get("GPU", 0)) if gpu else 0, resources.get("CPU", 1)
    if among:
        count = workers or max(1, gpus) * among
        share = math.floor(min(1.0, cpus / count) * 100) / 100  # within the cluster's cores
        hosts = math.ceil(count / among)
        return ActorPlan(count, {"num_cpus": share}, {"num_cpus": 0} | _gpu_share(hosts, gpus))
    count = workers or gpus or max(1, int(cpus))
    return ActorPlan(count, {"num_cpus": 1} | _gpu_share(count, gpus))


def _gpu_share(count: int, gpus: int) -> dict[str, float]:
    return {"num_gpus": 1 / math.ceil(count / gpus)} if gpus else {}


class RayPool:
    """Actors of the cluster at an address, with `ProcessPool`'s interface; see `plan_actors`.

    Raises UserError if Ray is not installed or cannot connect to the cluster.
    """

    def __init__(self, address: str, workers: int, *, gpu: bool, among: int) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("--ray needs Ray: pip install -r requirements/ray.txt") from None
        self.ray: Any = ray
        self.begun = not ray.is_initialized()
        if self.begun:
            _begin_ray(ray, address)
        plan = plan_actors(ray.cluster_resources(), workers, gpu=gpu, among=among)
        self.size = plan.count
        actor = ray.remote(Holder)
        self._worker = actor.options(max_restarts=0, **plan.takes)
        # One call more than workers: the command checks that the host is alive.
        self._host = actor.options(max_restarts=0, max_concurrency=among + 1, **plan.host_takes)

    def start(self, work: Callable[..., Any], *host: Host) -> "Actor":
        return Actor(self, self._worker, partial(_Work, work), *host)

    def start_host(self, make: Callable[[], object]) -> "Actor":
        return Actor(self, self._host, make)

    def wait(self, busy: Collection[Any]) -> list[Any]:
        by_answer = {worker.answer: worker for worker in busy}
        finished, _ = self.ray.wait(list(by_answer), num_returns=1)
        return [by_answer[each] for each in finished]

    def close(self) -> None:
        if self.begun:
            self.ray.shutdown()


def _begin_ray(ray: Any, address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _check_listens(address)
    here = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **here)
    except (ConnectionError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(
            f"--ray {address}: cannot connect to a Ray cluster there ({str(error).strip().splitlines()[0]}); give "
            f"HOST:PORT as printed by `ray start --head`, auto for the one on this machine, or {LOCAL} to start one"
        ) from None


def _check_listens(address: str) -> None:
    """Raises UserError if nothing listens at HOST:PORT. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENS_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--ray {address}: nothing listens at this address ({error}); give HOST:PORT as printed by "
            f"`ray start --head`, auto for the one on this machine, or {LOCAL} to start one"
        ) from None


class Actor:
    """A worker or a host: an actor that holds the object created by `make` from the arguments."""

    def __init__(self, pool: RayPool, kind: Any, make: Callable[..., object], *arguments: Any) -> None:
        self._pool = pool
        here = specvla_ros.__version__, os.getcwd()
        self._actor = kind.remote(make_settled, *here, pickle.dumps(make), *arguments)
        self._created = self._actor.call.remote("")
        self.call = partial(_call, self._actor)
        self.answer: Any = None

    def give(self, job: Any) -> None:
        self.answer = self._actor.call.remote("do", pickle.dumps(job))

    def take(self) -> Any:
        return _answer(self.answer)

    def end(self) -> None:
        # An actor killed during its creation holds its cluster resources forever (seen with Ray 2.60). A cluster that
        # the pool started ends unfinished ones at shutdown, so only other clusters are waited for.
        timeout = 0.0 if self._pool.begun else _CREATED_WITHIN_S
        with suppress(Exception):  # its machine may be gone
            there, _ = self._pool.ray.wait([self._created], timeout=timeout)
            if there:
                self._pool.ray.kill(self._actor)


def _call(actor: Any, method: str, *arguments: Any) -> Any:
    return _answer(actor.call.remote(method, *arguments))


def _answer(reference: Any) -> Any:
    import ray

    try:
        answer = ray.get(reference)
    except ray.exceptions.RayTaskError:  # raised outside the job
        raise
    except ray.exceptions.RayError as error:
        raise ProcessDied(" ".join(str(error).split())[:200]) from None
    return opened(*answer)


class _Work:
    """The object in a worker's actor."""

    def __init__(self, work: Callable[..., Any], *host: Host) -> None:
        self._work, self._host = work, host

    def do(self, job: bytes) -> Any:
        return self._work(pickle.loads(job), *self._host)


def make_settled(version: str, directory: str, make: bytes, *arguments: Any) -> object:
    """Creates an object on a machine of the cluster, in the command's directory.

    Raises UserError if the machine has a different version of the package, or lacks the command's files.
    """
    machine = f"the machine {os.uname().nodename} of the Ray cluster"
    if specvla_ros.__version__ != version:
        raise UserError(
            f"{machine} has specvla_ros {specvla_ros.__version__}, this machine {version}: install the same one there"
        )
    try:
        os.chdir(directory)  # the command's paths are relative to it
    except OSError:
        raise UserError(
            f"{machine} has no directory {directory}: all machines must share the file system that holds the "
            "command's policy, data and results"
        ) from None
    return pickle.loads(make)(*arguments)
