# SPDX-License-Identifier: Apache-2.0
"""Runs tests again and again in a copy of the tree: what they import of others is loaded once, then this process forks.

python -m mutants.forked_tests    # a request a line on stdin, an answer a line on stdout; see `Tree` in mutants.py
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_LIBRARIES = ("numpy", "torch", "pytest", "hypothesis", "xdist", "ruckig", "mink", "mcap", "yaml", "PIL", "rclpy")
_FAILED, _NO_TESTS = 1, 5
_WAITING = 3.0  # tests that wait for one another, as for a message that never comes, use no processor


def serve() -> None:
    """Answers until stdin ends."""
    _load_libraries()
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), flush=True)


def _load_libraries() -> None:
    """Nothing of the package: each fork imports that anew, mutated."""
    import ctypes.util
    import importlib

    gpu = any(os.path.exists(device) for device in ("/dev/nvidia0", "/dev/dri"))
    libraries = [each for each in (("EGL", "OSMesa") if gpu else ("OSMesa", "EGL")) if ctypes.util.find_library(each)]
    if libraries:  # as specvla_ros.lab.simulation chooses it, before MuJoCo is imported
        os.environ.setdefault("MUJOCO_GL", libraries[0].lower())
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")  # before MuJoCo, too
    for name in _LIBRARIES:
        importlib.import_module(name)


def _answer(tests: list[str], options: list[str], timeout_s: float, output: str, caches: bool) -> dict[str, Any]:
    """`passed`, `failed`, `timeout` or `broken`, and how long it took.

    The timeout is of processor time, so that a busy machine does not decide, and of `_WAITING` times as long a wait.
    """
    began_s = time.monotonic()
    child = os.fork()
    if not child:
        _run(tests, options, output, caches)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if _processor_s(child) > timeout_s or time.monotonic() - began_s > _WAITING * timeout_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"outcome": "timeout", "took_s": time.monotonic() - began_s}
        time.sleep(0.1)
    code = os.waitstatus_to_exitcode(ended[1])
    outcome = {0: "passed", _NO_TESTS: "passed", _FAILED: "failed"}.get(code, "broken")  # a crash, too
    return {"outcome": outcome, "took_s": time.monotonic() - began_s}


def _processor_s(process: int) -> float:
    """Seconds of processor time of a process, its threads and its ended children (proc(5): fields 14 to 17)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _run(tests: list[str], options: list[str], output: str, caches: bool) -> None:
    os.setsid()
    sys.dont_write_bytecode = not caches
    if not caches:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with Path(output).open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import pytest

    code = 3
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *options, *tests], [_QuickFirst()]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _QuickFirst:
    """A plug-in of pytest: examples first, then properties, which take longer to notice something."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


if __name__ == "__main__":
    serve()
