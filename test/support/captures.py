# SPDX-License-Identifier: Apache-2.0
"""Captures on a CPU, good ones and bad ones."""

from collections.abc import Callable
from typing import Any

import pytest
from support.static_forwards import recorded, use_table

from specvla_kernels.graph_capture import Capture
from specvla_ros.engine import runner

Run = Callable[[], Any]


def capture_with(monkeypatch: pytest.MonkeyPatch, capture: Capture = recorded, *, of: type = object) -> None:
    """Has engines capture; what is not the work of the given class is recorded.

    Args:
        capture: how.
        of: whose work.
    """

    def chosen(run: Run) -> Run:
        return (capture if isinstance(getattr(run, "__self__", None), of) else recorded)(run)

    use_table(monkeypatch)
    monkeypatch.setattr(runner, "capture_on", lambda _: chosen)


def refuses(run: Run) -> Run:
    """As torch does: the error that matters, and behind it that of the capture's end."""
    try:
        raise RuntimeError("an operation that a capture does not permit\nmore of it")
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def stands_still(run: Run) -> Run:
    """Gives what was there when it was captured."""
    result = run()
    return lambda: result


def ends_as(change: Callable[[Any], Any]) -> Capture:
    """Gives something else than was computed."""
    return lambda run: lambda: change(run())
