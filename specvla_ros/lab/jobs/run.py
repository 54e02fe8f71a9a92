# SPDX-License-Identifier: Apache-2.0
"""Jobs on worker processes of this machine, or on a Ray cluster: each counted once, whatever dies."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from specvla_ros.errors import UserError
from specvla_ros.lab.jobs.processes import ProcessPool
from specvla_ros.lab.jobs.ray_cluster import RayPool
from specvla_ros.lab.jobs.workers import Shared, WorkerDied

_MAX_LOSSES = 3  # workers that a job may cost
_NAMED = 5  # jobs that a message lists

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    work: Callable[..., Result],
    jobs: Sequence[Job],
    *,
    workers: int = 0,
    ray: str = "",
    gpu: bool = False,
    shared: Shared | None = None,
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
        workers: processes, or Ray actors; 0: this process, or as many actors as the cluster has room for, or as many
            as share something.
        ray: the cluster's address, `auto` for the one that runs on this machine, `local` to start one; empty: none.
            All its machines have this version of the package, and the same files under the same paths.
        gpu: whether a GPU computes where a machine of the cluster has one; see `plan_actors`.
        shared: what several workers share; `work` is given a `Host` behind the job. Where it dies, the jobs of its
            workers are done again.
        name: what a job is called in messages.
        lost: stands for the result of a job that was given up, from the job and the reason.

    Raises:
        UserError: jobs were given up and there is no `lost`; Ray is missing or not to be reached.
    """
    if ray:
        pool: _Pool = RayPool(work, ray, workers, gpu=gpu, shared=shared)
    elif workers or shared is not None:
        pool = ProcessPool(work, workers or (shared.among if shared is not None else 1), shared)
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


class _Worker(Protocol):
    def give(self, job: Any) -> None:
        """Begins a job."""

    def take(self) -> Any:
        """The result of the job that ended, or what it raised.

        Raises:
            WorkerDied: there is none, nor will be.
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
                except WorkerDied as death:
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
