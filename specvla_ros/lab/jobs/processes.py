# SPDX-License-Identifier: Apache-2.0
"""Workers that are processes of this machine."""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.managers import BaseManager
from typing import Any

from specvla_ros.errors import UserError
from specvla_ros.lab.jobs.workers import NOT_MADE, Host, HostDied, Hosts, Shared, WorkerDied, answer_of, opened

_PR_SET_PDEATHSIG = 1
_ENDS_WITHIN_S = 5.0
# Not forked: OpenGL contexts and torch's threads do not survive a fork.
_SPAWN = multiprocessing.get_context("spawn")


def end_with_parent(parent: int, by: signal.Signals = signal.SIGINT) -> None:
    """Has the kernel signal this process when its parent dies, however that dies; only Linux can."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before
        sys.exit(1)


class ProcessPool:
    """Processes, and those that hold what they share; see `run_jobs`."""

    def __init__(self, work: Callable[..., Any], workers: int, shared: Shared | None) -> None:
        self._work, self.size = work, workers
        self._hosts = Hosts(lambda: _Server(shared.make), shared.among) if shared is not None else None

    def start(self) -> "_Process":
        if self._hosts is None:
            return _Process(self._work, self.size)
        server, place = self._hosts.take()
        return _Process(self._work, self.size, server.host(place), partial(self._hosts.give_back, server, place))

    def wait(self, busy: Collection["_Process"]) -> list["_Process"]:
        by_connection = {worker.connection: worker for worker in busy}
        return [by_connection[each] for each in multiprocessing.connection.wait(by_connection)]  # type: ignore[index]

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.end()


class _Process:
    """A worker.

    Args:
        work: what it does.
        workers: how many share this machine.
        host: what it shares with others; None: nothing.
        on_end: gives its place there back.
    """

    def __init__(
        self,
        work: Callable[..., Any],
        workers: int,
        host: Host | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_end = on_end
        self.connection, theirs = _SPAWN.Pipe()
        arguments = theirs, work, workers, os.getpid(), host
        self._process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
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
            raise WorkerDied(signal.Signals(-code).name if code and code < 0 else f"exit code {code}") from None
        return opened(succeeded, result)

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join(_ENDS_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._on_end()


def _serve(connection: Connection, work: Callable[..., Any], workers: int, parent: int, host: Host | None) -> None:
    """What a worker does until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this one
    end_with_parent(parent, signal.SIGTERM)
    _share_cores(workers)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            job = connection.recv()
            connection.send(answer_of(work, job) if host is None else answer_of(work, job, host))


def _share_cores(workers: int) -> None:
    """Shares the cores among the workers: more threads than cores would slow all of them down."""
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers))))
    torch = sys.modules.get("torch")
    if torch is not None:  # the script that a worker imports again has brought it: it has counted the cores already
        torch.set_num_threads(threads)


class _Hosted:
    """In a process of its own: what workers share."""

    def make(self, make: Callable[[], object]) -> None:
        self._shared = make()

    def ping(self) -> None:
        """Is answered while it lives."""

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._shared, method)(*arguments)


class _Manager(BaseManager):
    """Starts that process; a thread of it answers each worker."""


_Manager.register("hosted", _Hosted, exposed=("make", "ping", "call"))


class _Server:
    """That process, as the command has it; see `HostProcess`."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._manager = _Manager(ctx=_SPAWN)
        self._manager.start(end_with_parent, (os.getpid(), signal.SIGTERM))
        self._hosted = self._manager.hosted()  # type: ignore[attr-defined]
        try:
            self._hosted.make(make)
        except (EOFError, ConnectionError):
            self.end()
            raise UserError(NOT_MADE) from None
        except BaseException:
            self.end()
            raise

    def alive(self) -> bool:
        try:
            self._hosted.ping()
        except (EOFError, OSError):
            return False
        return True

    def host(self, place: int) -> "_Guest":
        return _Guest(self._hosted, place)

    def end(self) -> None:
        self._manager.shutdown()


class _Guest:
    """A worker's; see `Host`."""

    def __init__(self, hosted: Any, place: int) -> None:
        self.place, self._hosted = place, hosted

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return self._hosted.call(method, arguments)
        except (EOFError, ConnectionError) as error:
            raise HostDied(str(error) or type(error).__name__) from None
