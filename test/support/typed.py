# SPDX-License-Identifier: Apache-2.0
"""A command as it is typed, in a process of its own that has its imports already."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

_LIMIT_S = 120.0
# Each process is forked from one that has imported these, which is most of what a short command takes.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["torch", "transformers", "rclpy", "rosbags.highlevel", "specvla_ros.lab.cli.app", "specvla_ros.policy", __name__]
)


def specvla(*arguments: object, lacking: str = "") -> "CompletedProcess[str]":
    """Runs `specvla` with arguments, and waits for it; as on a machine without a package, of those not named above."""
    return _typed(partial(_specvla, lacking), "specvla", *arguments)


def module(name: str, *arguments: object) -> "CompletedProcess[str]":
    """Runs `python -m` a module with arguments, and waits for it."""
    return _typed(_module, name, *arguments)


def _typed(main: Callable[[], object], *command: object) -> "CompletedProcess[str]":
    words = [*map(str, command)]
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / name for name in ("stdout", "stderr")]
        process = _PROCESSES.Process(target=_run, args=(main, words, outputs, dict(os.environ), Path.cwd()))
        process.start()
        process.join(_LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"{' '.join(words)} takes more than {_LIMIT_S:g} s")
        assert process.exitcode is not None
        return CompletedProcess(words, process.exitcode, *(path.read_text(encoding="utf-8") for path in outputs))


def _run(
    main: Callable[[], object],
    words: Sequence[str],
    outputs: Sequence[Path],
    environment: dict[str, str],
    directory: Path,
) -> None:
    for number, path in enumerate(outputs, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [*words]
    main()


def _specvla(lacking: str) -> None:
    if lacking:
        sys.modules[lacking] = None  # type: ignore[assignment]
    from specvla_ros.lab.cli.app import main

    main()


def _module() -> None:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
