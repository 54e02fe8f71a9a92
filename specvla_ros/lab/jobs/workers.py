# SPDX-License-Identifier: Apache-2.0
"""Workers and their shared objects, each in its own process on this machine."""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.managers import BaseManager
from typing import Any

_PR_SET_PDEATHSIG = 1
_ENDS_WITHIN_S = 5.0
# Spawned, since OpenGL contexts and torch's threads do not survive a fork.
_SPAWN = multiprocessing.get_context("spawn")


class ProcessDied(Exception):
    """A process died, and the object that it held is lost."""


@dataclass(frozen=True)
class Shared:
    """An object in its own process, shared by several workers: an engine, so that the model is in memory once."""

    make: Callable[[], object]  # called in that process; must be picklable; its exceptions end the command
    among: int  # workers per object


def share(make: Callable[[int], object], among: int) -> Shared | None:
    """The object that `make` creates for `among` workers; None if `among` is 0."""
    return Shared(partial(make, among), among) if among else None


@dataclass(frozen=True)
class Host:
    """A worker's access to the shared object."""

    place: int  # this worker's index at the object, from 0; a dead worker's index is reused
    call: Callable[..., Any]  # calls a method by its name, concurrently with other workers; raises ProcessDied


class Holder:
    """Holds the object in a host's process, created at the first call. A failure to create it answers every call."""

    def __init__(self, make: Callable[..., object], *arguments: Any) -> None:
        self._make = partial(make, *arguments)
        self._made: tuple[bool, Any] | None = None

    def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        if self._made is None:
            self._made = answer_of(self._hold)
        return answer_of(getattr(self._held, method), *arguments) if method and self._made[0] else self._made

    def _hold(self) -> None:
        self._held = self._make()


def answer_of(work: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Runs a job: returns True and its result, or False and its exception with the trace. Always picklable."""
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
    """Unpacks `answer_of`: returns the result or raises the exception; ProcessDied if the shared object died."""
    if succeeded:
        return result
    error, trace = result
    if isinstance(error, ProcessDied):
        raise ProcessDied(f"the shared object's process died: {error}")
    raise error from _Elsewhere(trace)


class _Elsewhere(Exception):
    """The trace of a worker's exception, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def end_with_parent(parent: int) -> None:
    """Has the kernel terminate this process when its parent dies, for whatever reason. Linux only.

    By SIGTERM: Python turns SIGINT into an exception, which is lost where exceptions are ignored, as in the callback
    of a weak reference during an import.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died earlier
        sys.exit(1)


class ProcessPool:
    """Worker and host processes of this machine."""

    def __init__(self, workers: int) -> None:
        self.size = workers  # maximum number of concurrent workers

    def start(self, work: Callable[..., Any], *host: Host) -> "Process":
        """Starts a worker, which calls `work` with each job and the host."""
        return Process(work, self.size, *host)

    def start_host(self, make: Callable[[], object]) -> "HostProcess":
        return HostProcess(make)

    def wait(self, busy: Collection[Any]) -> list[Any]:
        """Waits for and returns the workers whose `take` is due, at least one."""
        by_connection = {worker.connection: worker for worker in busy}
        return [by_connection[each] for each in multiprocessing.connection.wait(by_connection)]

    def close(self) -> None:
        """Does nothing: workers and hosts are ended one by one."""


class Process:
    """A worker process; `workers` of them share this machine's cores."""

    def __init__(self, work: Callable[..., Any], workers: int, *host: Host) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        arguments = theirs, work, workers, os.getpid(), *host
        self._process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # so that our end closes when the process ends

    def give(self, job: Any) -> None:
        """Starts a job."""
        with suppress(BrokenPipeError, ConnectionResetError):  # the process died: `take` reports it
            self.connection.send(job)

    def take(self) -> Any:
        """Returns the finished job's result; raises the job's exception or ProcessDied."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(_ENDS_WITHIN_S)
            code = self._process.exitcode
            raise ProcessDied(signal.Signals(-code).name if code and code < 0 else f"exit code {code}") from None
        return opened(*answer)

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join(_ENDS_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, work: Callable[..., Any], workers: int, parent: int, *host: Host) -> None:
    """Main loop of a worker's process: runs jobs until the command ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    end_with_parent(parent)
    # More threads than cores slow all workers down.
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers))))
    if torch := sys.modules.get("torch"):  # already imported by the worker's script, with its threads set
        torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(answer_of(work, connection.recv(), *host))


class _Manager(BaseManager):
    """The process of a shared object, with one thread per worker."""


_Manager.register("hold", Holder, exposed=("call",))


class HostProcess:
    """A shared object, created by the first call."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._manager = _Manager(ctx=_SPAWN)
        self._manager.start(end_with_parent, (os.getpid(),))
        # See `Host.call`. An empty name only creates the object.
        self.call = partial(_call, self._manager.hold(make))  # type: ignore[attr-defined]

    def end(self) -> None:
        self._manager.shutdown()


def _call(holder: Any, method: str, *arguments: Any) -> Any:
    try:
        answer = holder.call(method, *arguments)
    except (EOFError, ConnectionError) as error:
        raise ProcessDied(str(error) or type(error).__name__) from None
    return opened(*answer)
