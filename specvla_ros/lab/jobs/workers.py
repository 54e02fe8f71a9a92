# SPDX-License-Identifier: Apache-2.0
"""What workers are given and send back, whatever they are, and what several of them share."""

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol


class WorkerDied(Exception):
    """A worker is gone, with the job that it had."""


class HostDied(Exception):
    """What workers share is gone: their jobs cannot go on."""


@dataclass(frozen=True)
class Shared:
    """An object that several workers share, in a process of its own: an engine, with the model once in memory."""

    make: Callable[[], object]  # called there; can be pickled; what it raises ends the command
    among: int  # workers that share one


def share(make: Callable[[int], object], among: int) -> Shared | None:
    """What `make` gives for so many workers; 0: nothing is shared."""
    return Shared(partial(make, among), among) if among else None


class Host(Protocol):
    """The shared object, as one of the workers has it."""

    place: int  # this worker's among those that share it, from 0 on; that of a dead one is given to another

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls one of its methods, which several workers do at once.

        Raises:
            HostDied: it is gone.
        """

    def __hash__(self) -> int: ...


class HostProcess(Protocol):
    """Where the shared object lives, as the command has it.

    It is made with it: what `Shared.make` raises is raised then, and UserError where the process dies meanwhile.
    """

    def alive(self) -> bool: ...

    def host(self, place: int) -> Host: ...

    def end(self) -> None: ...


NOT_MADE = "the process died that loads what the workers share; out of memory?"


class Hosts:
    """The shared objects of a pool; one that has died is replaced when a worker needs it."""

    def __init__(self, start: Callable[[], HostProcess], among: int) -> None:
        self._start, self._among = start, among
        self._free: dict[HostProcess, list[int]] = {}

    def take(self) -> tuple[HostProcess, int]:
        """One that has room, and a place there."""
        self._free = {process: free for process, free in self._free.items() if process.alive()}
        for process, free in self._free.items():
            if free:
                return process, free.pop()
        process = self._start()
        self._free[process] = [*range(self._among)]
        return process, self._free[process].pop()

    def give_back(self, process: HostProcess, place: int) -> None:
        """Whoever had it is gone."""
        if process in self._free:
            self._free[process].append(place)

    def end(self) -> None:
        """Ends all of them."""
        for process in self._free:
            process.end()


def opened(succeeded: bool, result: Any) -> Any:
    """What `answer_of` packed: a job's result, or what it raised.

    Raises:
        WorkerDied: it cannot be done there any more.
    """
    if succeeded:
        return result
    error, trace = result
    if isinstance(error, HostDied):
        raise WorkerDied(f"what it shares with others died: {error}")
    raise error from _Elsewhere(trace)


class _Elsewhere(Exception):
    """The trace of what a worker raised, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def answer_of(work: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Whether a job succeeded, and its result, or what it raised with the trace; can be sent."""
    try:
        packed = True, work(*arguments)
    except Exception as error:
        packed = False, (error, traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(packed))
    except Exception as error:
        what = packed[1][1] if not packed[0] else f"the result {packed[1]!r:.200} cannot be sent: {error}"
        return False, (RuntimeError(str(what).strip().splitlines()[-1]), what)
    return packed
