# SPDX-License-Identifier: Apache-2.0
"""Episodes in worker processes, which end with the one that started them."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from specvla_ros.errors import UserError

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, by: signal.Signals = signal.SIGINT) -> None:
    """Has the kernel signal this process when its parent dies, however that dies; only Linux can."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before
        sys.exit(1)


Job = TypeVar("Job")
Result = TypeVar("Result")

_AHEAD = 2  # episodes handed out per worker: enough to keep it busy, few to do again when it dies
_MAX_LOSSES = 3


def run_episodes(
    work: Callable[[Job], Result], jobs: Sequence[Job], *, workers: int, ray: bool = False
) -> Iterator[tuple[Job, Result]]:
    """Yields each job with its result, once, as it is finished.

    Args:
        work: a function at a module's top level; what it needs again it may keep in its process.
        jobs: can be pickled.
        workers: processes; 0: this one.
        ray: on the Ray cluster that RAY_ADDRESS names, or on a new local one; then `workers` episodes at a time, 0: as
            many as the cluster has cores.

    Raises:
        UserError: a worker died on the same episode again and again, or Ray is missing.
    """
    if ray:
        yield from _on_ray(work, jobs, workers)
    elif workers == 0:
        for job in jobs:
            yield job, work(job)
    else:
        yield from _in_processes(work, list(jobs), workers)


def _in_processes(work: Callable[[Job], Result], jobs: list[Job], workers: int) -> Iterator[tuple[Job, Result]]:
    left = list(enumerate(jobs))
    losses: dict[int, int] = {}
    while left:
        pending: dict[Future[Result], tuple[int, Job]] = {}
        waiting = list(reversed(left))
        # Not forked: OpenGL contexts and torch's threads do not survive a fork.
        pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(workers, os.getpid()),
        )
        try:
            while waiting or pending:
                while waiting and len(pending) < _AHEAD * workers:
                    index, job = waiting.pop()
                    pending[pool.submit(work, job)] = (index, job)
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    result = future.result()
                    index, job = pending.pop(future)
                    left.remove((index, job))
                    yield job, result
        except BrokenProcessPool:
            # Only the pool knows which worker died: all that were handed out are suspects.
            for index, job in pending.values():
                losses[index] = losses.get(index, 0) + 1
                if losses[index] >= _MAX_LOSSES:
                    raise UserError(
                        f"a worker process died {_MAX_LOSSES} times, the last time at episode {job}; out of memory? "
                        "Run the same command again with fewer --workers: what is finished is kept"
                    ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker(workers: int, parent: int) -> None:
    """Shares the cores among the workers: more threads than cores would slow all of them down."""
    end_with_parent(parent, signal.SIGTERM)
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers))))
    torch = sys.modules.get("torch")
    if torch is not None:  # the script that a worker imports again has brought it: it has counted the cores already
        torch.set_num_threads(threads)


def _on_ray(work: Callable[[Job], Result], jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Result]]:
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs Ray: pip install 'ray>=2.9'") from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    # Ray runs a task again whose worker died.
    remote = ray.remote(num_cpus=1, max_retries=_MAX_LOSSES)(work)
    limit = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = list(reversed(jobs))
    pending: dict[Any, Job] = {}
    while waiting or pending:
        while waiting and len(pending) < _AHEAD * limit:
            job = waiting.pop()
            pending[remote.remote(job)] = job
        finished, _ = ray.wait(list(pending), num_returns=1)
        for reference in finished:
            yield pending.pop(reference), ray.get(reference)
