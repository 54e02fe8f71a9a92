# SPDX-License-Identifier: Apache-2.0
"""Jobs on worker processes of this machine, or on a Ray cluster: each counted once, whatever dies."""

import ctypes
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import specvla_ros
from specvla_ros.errors import UserError

_PR_SET_PDEATHSIG = 1
_MAX_LOSSES = 3  # workers that a job may cost
_ENDS_WITHIN_S = 5.0
_CREATED_WITHIN_S = 60.0  # where the cluster has room
_NAMED = 5  # jobs that a message lists

LOCAL = "local"
"""The address that starts a Ray cluster on this machine, for as long as the command runs."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    workers: int = 0,
    ray: str = "",
    gpu: bool = False,
    name: Callable[[Job], str] = str,
    lost: Callable[[Job, str], Result] | None = None,
) -> Generator[tuple[Job, Result], None, None]:
    """Yields each job with its result, once, as it is finished.

    A worker does one job at a time. Where it dies (killed, out of memory, its machine gone) its job is done again by
    another one, behind all that wait; a job that cost `_MAX_LOSSES` workers is given up and the others go on. What a
    job raises is raised here: it is not done again.

    Args:
        work: a function at a module's top level; what it needs again it may keep in its process.
        jobs: can be pickled.
        workers: processes, or Ray actors; 0: this process, or as many actors as the cluster has room for.
        ray: the cluster's address, `auto` for the one that runs on this machine, `local` to start one; empty: none.
            All its machines have this version of the package, and the same files under the same paths.
        gpu: whether a worker computes on a GPU where a machine of the cluster has one; see `actors_of`.
        name: what a job is called in messages.
        lost: stands for the result of a job that was given up, from the job and the reason.

    Raises:
        UserError: jobs were given up and there is no `lost`; Ray is missing or not to be reached.
    """
    if ray:
        pool: _Pool = _RayPool(work, ray, workers, gpu)
    elif workers:
        pool = _ProcessPool(work, workers)
    else:
        for job in jobs:
            yield job, work(job)
        return
    given_up: list[tuple[Job, str]] = []
    try:
        for job, result, why in _spread(pool, jobs):
            if not why:
                yield job, result
            elif lost is not None:
                yield job, lost(job, why)
            else:
                given_up.append((job, why))
    finally:
        pool.close()
    if given_up:
        names = ", ".join(name(job) for job, _ in given_up[:_NAMED])
        more = ", …" if len(given_up) > _NAMED else ""
        raise UserError(
            f"{len(given_up)} of {len(jobs)} could not be done: {names}{more}: {given_up[0][1]}; out of memory? What "
            "is finished is kept: run the same command again, with fewer --workers"
        )


class _WorkerDied(Exception):
    """A worker is gone, with the job that it had."""


class _Worker(Protocol):
    def give(self, job: Any) -> None:
        """Begins a job."""

    def take(self) -> Any:
        """The result of the job that ended, or what it raised.

        Raises:
            _WorkerDied: there is none, nor will be.
        """

    def end(self) -> None:
        """Ends it, whatever it does."""


class _Pool(Protocol):
    size: int

    def start(self) -> Any: ...

    def wait(self, busy: Collection[Any]) -> list[Any]:
        """Those of the workers whose `take` is due, at least one."""

    def close(self) -> None: ...


def _spread(pool: _Pool, jobs: Sequence[Job]) -> Iterator[tuple[Job, Any, str]]:
    """Each job with its result, or with why it was given up."""
    waiting = deque(enumerate(jobs))
    losses: Counter[int] = Counter()
    died_in_a_row = 0
    busy: dict[_Worker, tuple[int, Job]] = {}
    idle: list[_Worker] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < pool.size:
                worker = idle.pop() if idle else pool.start()
                busy[worker] = waiting.popleft()
                worker.give(busy[worker][1])
            while idle:  # nothing is left for them, and what they hold others may wait for
                idle.pop().end()
            for worker in pool.wait(busy):
                index, job = busy.pop(worker)
                try:
                    result = worker.take()
                except _WorkerDied as death:
                    worker.end()
                    losses[index] += 1
                    died_in_a_row += 1
                    # Whatever they are given, they die: trying every job three times would take very long.
                    hopeless = died_in_a_row > _MAX_LOSSES * pool.size
                    if not hopeless and losses[index] < _MAX_LOSSES:
                        waiting.append((index, job))
                    else:
                        yield job, None, f"a worker died {losses[index]} times at it ({death})"
                    while hopeless and waiting:
                        yield waiting.popleft()[1], None, "the workers died at all that they were given"
                else:
                    died_in_a_row = 0
                    idle.append(worker)
                    yield job, result, ""
    finally:
        for worker in (*busy, *idle):
            worker.end()


# Processes of this machine


def end_with_parent(parent: int, by: signal.Signals = signal.SIGINT) -> None:
    """Has the kernel signal this process when its parent dies, however that dies; only Linux can."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before
        sys.exit(1)


class _ProcessPool:
    def __init__(self, work: Callable[[Any], Any], workers: int) -> None:
        self._work, self.size = work, workers

    def start(self) -> "_Process":
        return _Process(self._work, self.size)

    def wait(self, busy: Collection["_Process"]) -> list["_Process"]:
        by_connection = {worker.connection: worker for worker in busy}
        return [by_connection[each] for each in multiprocessing.connection.wait(by_connection)]  # type: ignore[index]

    def close(self) -> None:
        """There is nothing beside the workers."""


class _Process:
    def __init__(self, work: Callable[[Any], Any], workers: int) -> None:
        # Not forked: OpenGL contexts and torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work, workers, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()  # so that ours is at its end when the process is

    def give(self, job: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is gone: `take` says so
            self.connection.send(job)

    def take(self) -> Any:
        try:
            succeeded, result = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(_ENDS_WITHIN_S)
            code = self._process.exitcode
            raise _WorkerDied(signal.Signals(-code).name if code and code < 0 else f"exit code {code}") from None
        return _opened(succeeded, result)

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join(_ENDS_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _opened(succeeded: bool, result: Any) -> Any:
    """What `_answer` packed: a job's result, or what it raised."""
    if succeeded:
        return result
    error, trace = result
    raise error from _Elsewhere(trace)


class _Elsewhere(Exception):
    """The trace of what a worker raised, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _serve(connection: Connection, work: Callable[[Any], Any], workers: int, parent: int) -> None:
    """What a worker process does until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this one
    end_with_parent(parent, signal.SIGTERM)
    _share_cores(workers)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(_answer(work, connection.recv()))


def _answer(work: Callable[[Any], Any], job: Any) -> tuple[bool, Any]:
    """Whether a job succeeded, and its result, or what it raised with the trace; can be sent."""
    try:
        answer = True, work(job)
    except Exception as error:
        answer = False, (error, traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(answer))
    except Exception as error:
        what = answer[1][1] if not answer[0] else f"the result {answer[1]!r:.200} cannot be sent: {error}"
        return False, (RuntimeError(str(what).strip().splitlines()[-1]), what)
    return answer


def _share_cores(workers: int) -> None:
    """Shares the cores among the workers: more threads than cores would slow all of them down."""
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers))))
    torch = sys.modules.get("torch")
    if torch is not None:  # the script that a worker imports again has brought it: it has counted the cores already
        torch.set_num_threads(threads)


# A Ray cluster


def actors_of(resources: dict[str, float], workers: int, *, gpu: bool) -> tuple[int, dict[str, float]]:
    """How many actors a cluster is asked for, and what each takes of it.

    Args:
        resources: of the cluster, as `ray.cluster_resources` gives them.
        workers: wanted; 0: one for each GPU that is used, else one for each core.
        gpu: whether they compute on GPUs where there are any; more workers than GPUs share them.
    """
    gpus = int(resources.get("GPU", 0)) if gpu else 0
    if not gpus:
        return workers or max(1, int(resources.get("CPU", 1))), {"num_cpus": 1}
    count = workers or gpus
    return count, {"num_cpus": 1, "num_gpus": 1 / math.ceil(count / gpus)}


class _RayPool:
    def __init__(self, work: Callable[[Any], Any], address: str, workers: int, gpu: bool) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("--ray needs Ray: pip install -r requirements/ray.txt") from None
        self.ray: Any = ray
        self.begun = not ray.is_initialized()
        if self.begun:
            _begin_ray(ray, address)
        self.size, takes = actors_of(ray.cluster_resources(), workers, gpu=gpu)
        self._actors = self.ray.remote(_Actor).options(max_restarts=0, **takes)
        self.setting = specvla_ros.__version__, os.getcwd(), pickle.dumps(work)

    def start(self) -> "_RayWorker":
        return _RayWorker(self, self._actors.remote())

    def wait(self, busy: Collection["_RayWorker"]) -> list["_RayWorker"]:
        by_answer = {worker.answer: worker for worker in busy}
        finished, _ = self.ray.wait(list(by_answer), num_returns=1)
        return [by_answer[each] for each in finished]

    def close(self) -> None:
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
    def __init__(self, pool: _RayPool, actor: Any) -> None:
        self._pool, self._actor = pool, actor
        self.answer: Any = None
        self._created = actor.wake.remote()

    def give(self, job: Any) -> None:
        self.answer = self._actor.run.remote(*self._pool.setting, pickle.dumps(job))

    def take(self) -> Any:
        errors = self._pool.ray.exceptions
        try:
            succeeded, result = self._pool.ray.get(self.answer)
        except errors.RayTaskError:  # of the lines around the job
            raise
        except errors.RayError as error:
            raise _WorkerDied(" ".join(str(error).split())[:200]) from None
        return _opened(succeeded, result)

    def end(self) -> None:
        # One that is killed while it is being created keeps its place in the cluster for ever (seen with Ray 2.60).
        # A cluster that the pool leaves ends those that were not created in time.
        timeout = 0.0 if self._pool.begun else _CREATED_WITHIN_S
        with suppress(Exception):  # its machine may be gone
            created, _ = self._pool.ray.wait([self._created], timeout=timeout)
            if created:
                self._pool.ray.kill(self._actor)


class _Actor:
    """A worker on a machine of the cluster."""

    def wake(self) -> None:
        """Is answered as soon as it is there."""

    def run(self, version: str, directory: str, work: bytes, job: bytes) -> tuple[bool, Any]:
        return _answer(lambda _: self._run(version, directory, work, job), None)

    def _run(self, version: str, directory: str, work: bytes, job: bytes) -> Any:
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
        return pickle.loads(work)(pickle.loads(job))
