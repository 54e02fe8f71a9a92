"""A process that must not outlive the one that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, by: signal.Signals = signal.SIGINT) -> None:
    """Has the kernel signal this process when its parent dies, however that dies; only Linux can.

    Args:
        parent: its process id.
        by: the signal.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before it could be asked for
        sys.exit(1)
