# SPDX-License-Identifier: Apache-2.0
"""The DDS domains of a process of the tests, which no other one uses meanwhile."""

import fcntl
import os
import tempfile
from pathlib import Path

OWN_DOMAINS = 5  # a test takes the next one where a node that was killed is still remembered, for 20 s
_BLOCKS = 100 // OWN_DOMAINS  # domains over 101 share ports with outgoing connections


def own_domains() -> int:
    """The first of `OWN_DOMAINS` domains, reserved until this process ends by a lock on a temporary file.

    Raises:
        RuntimeError: every domain is in use.
    """
    for offset in range(_BLOCKS):
        block = (os.getpid() + offset) % _BLOCKS  # not always the first: what was left behind may be on it
        path = Path(tempfile.gettempdir(), f"specvla_ros_test_domains_{os.getuid()}_{block}.lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return 1 + OWN_DOMAINS * block
    raise RuntimeError(f"{_BLOCKS} processes of the tests run already: end them")
