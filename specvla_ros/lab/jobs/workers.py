# SPDX-License-Identifier: Apache-2.0
"""Objects in processes of their own, on this machine or in a cluster: workers, and what several of them share."""

import pickle
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol


class ProcessDied(Exception):
    """A process is gone, with the object that it held."""


@dataclass(frozen=True)
class Shared:
    """An object that several workers share, in a process of its own: an engine, with the model once in memory."""

    make: Callable[[], object]  # called there; can be pickled; what it raises ends the command
    among: int  # workers that share one


def share(make: Callable[[int], object], among: int) -> Shared | None:
    """What `make` gives for so many workers; 0: nothing is shared."""
    return Shared(partial(make, among), among) if among else None


@dataclass(frozen=True)
class Host:
    """The shared object, as one of the workers has it."""

    place: int  # this worker's among those that share it, from 0 on; that of a dead one is given to another
    call: Callable[..., Any]  # calls a method by its name, which several workers do at once; raises ProcessDied


class WorkerProcess(Protocol):
    """A worker, as the command has it."""

    def give(self, job: Any) -> None:
        """Begins a job."""

    def take(self) -> Any:
        """The result of the job that ended, or what it raised.

        Raises:
            ProcessDied: there is none, nor will be.
        """

    def end(self) -> None:
        """Ends it, whatever it does."""


class HostProcess(Protocol):
    """Where the shared object lives, as the command has it. The first call makes it."""

    @property
    def call(self) -> Callable[..., Any]:
        """See `Host.call`; of the empty name: only whether the object could be made."""

    def end(self) -> None: ...

    def __hash__(self) -> int: ...


class Pool(Protocol):
    """Where processes are started: this machine, or a cluster."""

    size: int  # workers that it has room for

    def start(self, work: Callable[..., Any], *host: Host) -> Any:
        """Starts a `WorkerProcess` whose jobs are given to `work`, with what it shares with others behind them."""

    def start_host(self, make: Callable[[], object]) -> HostProcess: ...

    def wait(self, busy: Collection[Any]) -> list[Any]:
        """Those of the workers whose `take` is due, at least one."""

    def close(self) -> None: ...


class Holder:
    """In a host's process: the object, made at the first call. What its making raised is the answer to all calls."""

    def __init__(self, make: Callable[..., object], *arguments: Any) -> None:
        self._make = partial(make, *arguments)
        self._made: tuple[bool, Any] | None = None

    def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Calls a method of the object; see `answer_of`."""
        if self._made is None:
            self._made = answer_of(self._hold)
        return answer_of(getattr(self._held, method), *arguments) if method and self._made[0] else self._made

    def _hold(self) -> None:
        self._held = self._make()


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


def opened(succeeded: bool, result: Any) -> Any:
    """What `answer_of` packed: a job's result, or what it raised.

    Raises:
        ProcessDied: what it shares with others is gone, so that it cannot be done there any more.
    """
    if succeeded:
        return result
    error, trace = result
    if isinstance(error, ProcessDied):
        raise ProcessDied(f"what it shares with others died: {error}")
    raise error from _Elsewhere(trace)


class _Elsewhere(Exception):
    """The trace of what a worker raised, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
