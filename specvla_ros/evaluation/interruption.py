"""Ctrl-C and SIGTERM as a wish to stop after the work in hand."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interruption() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether somebody asked to stop.

    The first signal is only noted, so that nothing is left half written; a second one acts as ever. Signals reach the
    main thread only: elsewhere they are left alone.
    """
    asked: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: bool(asked)
    finally:
        restore()
