# SPDX-License-Identifier: Apache-2.0
"""How tests wait: for an event, on a machine however busy. The limit only ends a test that hangs."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

PATIENCE_S = 180.0

Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found], *, meanwhile: Callable[[], object] = lambda: time.sleep(0.02), failed: object = ""
) -> Found:
    """What the condition gives once it is true.

    Args:
        condition: the event. IndexError: a list that is empty yet.
        meanwhile: called between two looks, for instance to spin an executor.
        failed: message of a test that hangs; called first if it can be.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(IndexError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, failed() if callable(failed) else failed
        meanwhile()
