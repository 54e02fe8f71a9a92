# SPDX-License-Identifier: Apache-2.0
"""Ticks of a bundled policy on this CPU before and now: two git revisions take turns in one run, on the same images.

Each revision is a process with the code of that revision, from `git archive`; this one's is the working tree. Times are
CPU seconds of the thread that ticks, so that other processes of the machine weigh little, and wall seconds beside them.
The first tick of an answer computes image and prompt; every further one decodes.

    python -m benchmarks.speed.revisions --earlier 0dbb0d6
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, cast

import numpy as np
import typer

from benchmarks.harness import FRAMES_FIRST_SEED, Out, dtype_on, finish, of_weights, result_head
from benchmarks.results_page import ROOT
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import find_policy
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.models.checkpoint import load_target

MODES = ("ar", "spec")
_WORKER = Path(__file__).with_name("revision_ticks.py")
_PICTURES = 30
_WARM = 3  # actions before the first turn


def main(
    context: typer.Context,
    earlier: Annotated[str, typer.Option(help="The git revision to compare with.")] = "0dbb0d6",
    policy: Annotated[str, typer.Option(help="A bundled policy.")] = "nano",
    actions: Annotated[int, typer.Option(help="Actions per turn.", min=1)] = 10,
    turns: Annotated[int, typer.Option(help="Turns of each revision and mode.", min=1)] = 10,
    out: Out = None,
) -> None:
    """Times the ticks of plain decoding and of speculation at both revisions."""
    directory, _ = find_policy(Path(policy))
    with tempfile.TemporaryDirectory() as folder:
        images, tree = Path(folder, "images"), Path(folder, "earlier")
        images.write_bytes(pickle.dumps(_images(directory)))
        archive = subprocess.run(["git", "-C", ROOT, "archive", earlier], stdout=subprocess.PIPE, check=True)
        tree.mkdir()
        subprocess.run(["tar", "x", "-C", tree], input=archive.stdout, check=True)
        workers = {name: Worker(code, directory, images) for name, code in (("before", tree), ("now", ROOT))}
        modes = {mode: _compare(workers, mode, actions, turns) for mode in MODES}
        for worker in workers.values():
            worker.end()
    head = result_head(context, dtype_on("cpu", "")) | {"policy": policy} | of_weights(directory)
    finish(head | {"earlier": earlier, "modes": modes}, out)


class Worker:
    """A process with a revision's code, which decodes actions on demand."""

    def __init__(self, code: Path, policy: Path, images: Path) -> None:
        path = os.pathsep.join([str(code), str(code / "kernels")])
        command = [sys.executable, str(_WORKER), str(policy), str(images), ",".join(MODES)]
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, cwd=images.parent, **pipes)

    def turn(self, mode: str, actions: int) -> dict[str, Any]:
        """Decodes some actions; returns the tokens and each tick's times."""
        asked, answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        asked.write(f"{mode} {actions}\n")
        asked.flush()
        turn: dict[str, Any] = json.loads(answers.readline())
        return turn

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate()


def _images(policy: Path) -> list[dict[str, Any]]:
    """Images and instructions of the policy's own episodes, as plain values that every revision reads."""
    source = simulation_source(load_target(policy, device="cpu"), FRAMES_FIRST_SEED, engine=engine_settings_from())
    return [{"images": each.images, "instruction": each.instruction} for each in islice(source, _PICTURES)]


def _compare(workers: dict[str, Worker], mode: str, actions: int, turns: int) -> dict[str, Any]:
    for worker in workers.values():
        worker.turn(mode, _WARM)
    rounds = [{name: worker.turn(mode, actions) for name, worker in workers.items()} for _ in range(turns)]
    tokens = {name: [answer for each in rounds for answer in each[name]["tokens"]] for name in workers}
    ticks = {name: [answer for each in rounds for answer in each[name]["ticks"]] for name in workers}
    first = {name: [answer[0] for answer in ticks[name]] for name in workers}
    further = {name: [tick for answer in ticks[name] for tick in answer[1:]] for name in workers}
    whole = {name: [np.sum(answer, axis=0).tolist() for answer in ticks[name]] for name in workers}
    parts = {"first tick": first, "further ticks": further, "action": whole}
    return {
        "actions": len(tokens["now"]),
        "same_tokens": tokens["before"] == tokens["now"],
        "forwards_per_action": {name: float(np.mean([len(answer) for answer in ticks[name]])) for name in workers},
        "parts": {part: _before_and_now(times) for part, times in parts.items()},
    }


def _before_and_now(times: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Medians of [n, 2] CPU and wall seconds, and the ratio of those now to those before."""
    medians = {name: np.median(np.array(each), axis=0) for name, each in times.items()}
    return {
        kind: {name: float(median[i]) for name, median in medians.items()}
        | {"ratio": float(medians["now"][i] / medians["before"][i])}
        for i, kind in enumerate(("cpu_s", "wall_s"))
    }


if __name__ == "__main__":
    typer.run(main)
