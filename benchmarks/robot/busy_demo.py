# SPDX-License-Identifier: Apache-2.0
"""The demo beside processes that take all the CPU time they get.

    python -m benchmarks.robot.busy_demo --robot panda --loops 10

Each task once, in real time, by policy, driver, guard, simulated arm and operator as processes. The loops have the
usual priority. A machine without other work shows what they cost.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import Out, Work, finish, result_head
from benchmarks.results_page import RESULTS

_SETTLES_S = 120.0  # until the load average of a minute says so


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        time.sleep(_SETTLES_S if loops else 0.0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(
    context: typer.Context,
    robot: Annotated[str, typer.Option(help="The simulated arm, moved through driver and guard.")] = "panda",
    loops: Annotated[int, typer.Option(help="Busy processes.", min=0)] = 10,
    work: Work = Path("busy-demo-benchmark"),
    out: Out = RESULTS / "busy_demo.json",
) -> None:
    """Runs the demo once."""
    with _busy(loops):
        before = os.getloadavg()[0]
        command = [str(Path(sys.executable).with_name("specvla")), "demo", "--robot", robot, "--out", str(work)]
        subprocess.run(command, check=False)  # it fails where no task is done
        after = os.getloadavg()[0]
    summary = json.loads((work / "summary.json").read_text(encoding="utf-8"))
    result = {
        "robot": robot,
        "loops": loops,
        "load": [before, after],
        "success": summary["success"],
        "latency_s": summary["latency_s"],
        "refused": summary["context"].get("refused", {}),
    }
    finish(result_head(context) | result, out)


if __name__ == "__main__":
    typer.run(main)
