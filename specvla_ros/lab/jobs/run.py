# SPDX-License-Identifier: Apache-2.0
"""Jobs on worker processes of this machine, or on a Ray cluster: each counted once, whatever dies."""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from specvla_ros.errors import UserError
from specvla_ros.lab.jobs.ray_cluster import Actor, RayPool
from specvla_ros.lab.jobs.workers import Host, HostProcess, Process, ProcessDied, ProcessPool, Shared
from specvla_ros.lab.plans import THIS_PROCESS, Spread

_MAX_LOSSES = 3  # workers that a job may cost
_NAMED = 5  # jobs that a message lists

Pool = ProcessPool | RayPool
Worker = Process | Actor
SharedHost = HostProcess | Actor
Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    work: Callable[..., Result],
    jobs: Sequence[Job],
    spread: Spread = THIS_PROCESS,
    *,
    gpu: bool = False,
    shared: Shared | None = None,
    name: Callable[[Job], str] = str,
    lost: Callable[[Job, str], Result] | None = None,
) -> Generator[tuple[Job, Result], None, None]:
    """Yields each job with its result, once, as it is finished.

    A worker does one job at a time. Where it dies (killed, out of memory, its machine gone) another one does its job
    again, after all that wait; a job that cost `_MAX_LOSSES` workers is given up and the others go on. A job's
    exception is raised here, and the job is not done again.

    Args:
        work: a function at a module's top level; it may keep things in its process.
        jobs: can be pickled.
        spread: where; 0 workers: this process, or as many actors as the cluster has room for, or as many as share
            something. All machines have this version of the package, and the same files under the same paths.
        gpu: whether a GPU computes where a machine of the cluster has one; see `plan_actors`.
        shared: by several workers; `work` is given a `Host` after the job. Where it dies, the jobs of its workers are
            done again.
        name: of a job in messages.
        lost: the result of a job that was given up, from the job and the reason.

    Raises:
        UserError: jobs were given up and there is no `lost`; Ray is missing or cannot be reached.
    """
    among = shared.among if shared is not None else 0
    if spread.ray:
        pool: Pool = RayPool(spread.ray, spread.workers, gpu=gpu, among=among)
    elif spread.workers or among:
        pool = ProcessPool(spread.workers or among)
    else:
        for job in jobs:
            yield job, work(job)
        return
    given_up: list[tuple[Job, str]] = []
    crew = _Crew(pool, work, shared)
    try:
        for job, result, why in _spread(crew, pool, jobs):
            if not why:
                yield job, result
            elif lost is not None:
                yield job, lost(job, why)
            else:
                given_up.append((job, why))
    finally:
        crew.end()
        pool.close()
    if given_up:
        names = ", ".join(name(job) for job, _ in given_up[:_NAMED])
        more = ", …" if len(given_up) > _NAMED else ""
        raise UserError(
            f"{len(given_up)} of {len(jobs)} could not be done: {names}{more}: {given_up[0][1]}; out of memory? What "
            "is finished is kept: run the same command again, with fewer --workers"
        )


class _Crew:
    """The workers of a pool, each with its place at a shared object, which is made again when it dies."""

    def __init__(self, pool: Pool, work: Callable[..., Any], shared: Shared | None) -> None:
        self._pool, self._work, self._shared = pool, work, shared
        self._free: dict[SharedHost, list[int]] = {}  # places
        self._places: dict[Worker, tuple[SharedHost, int]] = {}

    def start(self) -> Worker:
        if self._shared is None:
            return self._pool.start(self._work)
        host, place = self._place(self._shared)
        worker = self._pool.start(self._work, Host(place, host.call))
        self._places[worker] = host, place
        return worker

    def dismiss(self, worker: Worker) -> None:
        """Ends a worker, and keeps its place for the next."""
        worker.end()
        host, place = self._places.pop(worker, (None, 0))
        if host in self._free:
            self._free[host].append(place)

    def end(self) -> None:
        for host in self._free:
            host.end()

    def _place(self, shared: Shared) -> tuple[SharedHost, int]:
        self._free = {host: free for host, free in self._free.items() if _lives(host)}
        for host, free in self._free.items():
            if free:
                return host, free.pop()
        host = self._pool.start_host(shared.make)
        self._free[host] = [*range(shared.among)]
        if not _lives(host):
            raise UserError("the process died that loads what the workers share; out of memory?")
        return host, self._free[host].pop()


def _lives(host: SharedHost) -> bool:
    try:
        host.call("")
    except ProcessDied:
        return False
    return True


def _spread(crew: _Crew, pool: Pool, jobs: Sequence[Job]) -> Iterator[tuple[Job, Any, str]]:
    """Each job with its result, or with the reason why it was given up."""
    waiting = deque(enumerate(jobs))
    losses: Counter[int] = Counter()
    died_in_a_row = 0
    busy: dict[Worker, tuple[int, Job]] = {}
    idle: list[Worker] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < pool.size:
                worker = idle.pop() if idle else crew.start()
                busy[worker] = waiting.popleft()
                worker.give(busy[worker][1])
            while idle:  # nothing is left for them, and others may wait for their resources
                crew.dismiss(idle.pop())
            for worker in pool.wait(busy):
                index, job = busy.pop(worker)
                try:
                    result = worker.take()
                except ProcessDied as death:
                    crew.dismiss(worker)
                    losses[index] += 1
                    died_in_a_row += 1
                    # They die at every job: trying each three times would take very long.
                    all_workers_die = died_in_a_row > _MAX_LOSSES * pool.size
                    if losses[index] < _MAX_LOSSES and not all_workers_die:
                        waiting.append((index, job))
                    else:
                        yield job, None, f"a worker died {losses[index]} times at it ({death})"
                    while all_workers_die and waiting:
                        yield waiting.popleft()[1], None, "the workers died at all that they were given"
                else:
                    died_in_a_row = 0
                    idle.append(worker)
                    yield job, result, ""
    finally:
        for worker in (*busy, *idle):
            worker.end()
