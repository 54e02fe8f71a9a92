# SPDX-License-Identifier: Apache-2.0
"""Jobs on worker processes or a Ray cluster: each job counts once, even if workers die."""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from specvla_ros.errors import UserError
from specvla_ros.lab.jobs.ray_cluster import Actor, RayPool
from specvla_ros.lab.jobs.workers import Host, HostProcess, Process, ProcessDied, ProcessPool, Shared
from specvla_ros.lab.plans import THIS_PROCESS, Spread

_MAX_LOSSES = 3  # worker deaths per job before it is given up
_NAMED = 5  # jobs listed in a message

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
    """Yields each job with its result, exactly once, as it finishes.

    A worker runs one job at a time. If it dies (killed, out of memory, machine lost), its job goes to the end of the
    queue and another worker runs it. A job that killed `_MAX_LOSSES` workers is given up and the other jobs continue.
    A job's exception is raised here and the job is not repeated.

    Args:
        work: a function at a module's top level; it may keep state in its process.
        jobs: must be picklable.
        spread: where jobs run. 0 workers: this process, or as many actors as the cluster has resources for, or as many
            as share one object. All machines need this version of the package and the same files at the same paths.
        gpu: use the cluster's GPUs if available; see `plan_actors`.
        shared: an object shared by several workers; `work` gets a `Host` after the job. If it dies, its workers' jobs
            are repeated.
        name: a job's name in messages.
        lost: the result of a job that was given up, from the job and the reason.

    Raises:
        UserError: jobs were given up without `lost`, or Ray is missing or unreachable.
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
            f"{len(given_up)} of {len(jobs)} jobs failed: {names}{more}: {given_up[0][1]}; out of memory? Finished "
            "jobs are kept: run the same command again with fewer --workers"
        )


class _Crew:
    """A pool's workers, each with a place at a shared object, which is recreated if it dies."""

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
        """Ends a worker and keeps its place for the next one."""
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
            raise UserError(
                "the process that loads the workers' shared model died; out of memory? Run it with fewer --workers"
            )
        return host, self._free[host].pop()


def _lives(host: SharedHost) -> bool:
    try:
        host.call("")
    except ProcessDied:
        return False
    return True


def _spread(crew: _Crew, pool: Pool, jobs: Sequence[Job]) -> Iterator[tuple[Job, Any, str]]:
    """Yields each job with its result, or with the reason why it was given up."""
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
            while idle:  # no jobs are left, and other users may wait for the resources
                crew.dismiss(idle.pop())
            for worker in pool.wait(busy):
                index, job = busy.pop(worker)
                try:
                    result = worker.take()
                except ProcessDied as death:
                    crew.dismiss(worker)
                    losses[index] += 1
                    died_in_a_row += 1
                    # Workers die at every job: trying each three times would take too long.
                    all_workers_die = died_in_a_row > _MAX_LOSSES * pool.size
                    if losses[index] < _MAX_LOSSES and not all_workers_die:
                        waiting.append((index, job))
                    else:
                        yield job, None, f"its worker died {losses[index]} times ({death})"
                    while all_workers_die and waiting:
                        yield waiting.popleft()[1], None, "workers died at every job"
                else:
                    died_in_a_row = 0
                    idle.append(worker)
                    yield job, result, ""
    finally:
        for worker in (*busy, *idle):
            worker.end()
