# SPDX-License-Identifier: Apache-2.0
"""Common parts of the benchmarks: options, result header, timing in turns, and the JSON file."""

import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.random_policy import SIZES
from benchmarks.results_page import ROOT, section, weights_digest
from specvla_kernels.graph_capture import capture_on
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.paired import Z_95
from specvla_ros.lab.evaluation.run_directory import cpu_name, git_revision
from specvla_ros.lab.planning.device import read_device
from specvla_ros.lab.planning.stage_times import stage_times
from specvla_ros.models.checkpoint import DTYPES

Sizes = Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(SIZES)}.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16. Default: float32 on a CPU, else bfloat16.")]
Out = Annotated[Path | None, typer.Option(help="JSON file for the figures.")]
Episodes = Annotated[int, typer.Option(help="Simulated episodes per task.", min=0)]
Seed = Annotated[int, typer.Option(help="Seed of the first start; training starts from 1000000.", min=0)]
Workers = Annotated[int, typer.Option(help="Number of simulation processes.", min=1)]
Work = Annotated[Path, typer.Option(help="Directory of the episodes; an interrupted run resumes.")]

Call = Callable[[], object]
FRAMES_FIRST_SEED = 500_000  # of the images for the engine alone; no model was trained on them
_FLUSHED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # larger than the caches; on a GPU also slower than a launch
_WARM_UPS = 3
_WIDTH = 120  # of the terminal output: tables are wide
_WHERE = ("out", "work")  # options for file locations, which do not affect the figures
_REVISION = git_revision(ROOT)  # of the code that is measured: another may be there when a long run ends


def dtype_on(device: str, dtype: str) -> torch.dtype:
    """Returns the dtype that `Dtype` selects."""
    return DTYPES[dtype or ("float32" if device == "cpu" else "bfloat16")]


def result_head(context: typer.Context, dtype: torch.dtype | None = None, **versions: str) -> dict[str, Any]:
    """Returns benchmark, command, date, revision and hardware, with `versions` of libraries other than torch."""
    module = (context.info_name or "").rpartition(" ")[2]
    given = {
        option.name: (context.params[option.name], option.default) for option in context.command.params if option.name
    }
    options = {name: value for name, (value, usual) in given.items() if not isinstance(value, bool) or value != usual}
    head = {
        "benchmark": module.rpartition(".")[2],
        "command": command(module, {name: value for name, value in options.items() if name not in _WHERE}),
        "date": date.today().isoformat(),
        "git_revision": _REVISION,
        "hardware": hardware(options.get("device", "cpu")),
        "versions": {"torch": torch.__version__, **versions},
    }
    return head if dtype is None else head | {"dtype": str(dtype).removeprefix("torch.")}


def kept_before(out: Path | None, figures: str) -> dict[str, Any] | None:
    """Returns the reference for a file about to be overwritten: the file's own reference, else its figures."""
    if out is None or not out.exists():
        return None
    old = json.loads(out.read_text(encoding="utf-8"))
    return old.get("before") or {"git_revision": old["git_revision"], figures: old[figures]}


def of_weights(policy: Path) -> dict[str, str]:
    """Returns the digest of the measured weights."""
    return {"policy_weights": weights_digest(policy)}


def of_devices(names: Iterable[str]) -> dict[str, Any]:
    """Returns the stage times of the emulated devices."""
    return {"emulated": {name: stage_times(read_device(name)).as_json() for name in names}}


def command(module: str, options: Mapping[str, object]) -> str:
    """Returns the command line that reproduces the figures.

    Args:
        module: the script's module, with its package.
        options: values by name; empty and None are omitted, true becomes `--…` and false `--no-…`.
    """
    words = [f"python -m {module}" if module.startswith("benchmarks.") else f"PYTHONPATH=test python -m {module}"]
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value not in ("", None):
            words.append(f"--{option} {shlex.quote(str(value))}")
    return " ".join(words)


def hardware(device: str) -> str:
    """Returns the device's name."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def finish(result: dict[str, Any], out: Path | None) -> None:
    """Writes a result's JSON file atomically, if `out` is given, and prints the results page's section for it."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f"{out.name}.part")
        part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        os.replace(part, out)
    # Printed last, so that a failure here does not lose hours of measurements.
    Console(width=max(_WIDTH, Console().width)).print(Markdown(section(result)))


def chosen_names(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Returns the names listed by a comma-separated option, all if it is empty; UserError for an unknown name."""
    names = text.split(",") if text else list(known)
    for name in names:
        if name not in known:
            raise UserError(f"{option}: unknown name '{name}'; known: {', '.join(known)}")
    return names


def mean_ratio(ratios: Sequence[float]) -> dict[str, float]:
    """Returns the geometric mean of paired ratios with its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    middle, half = statistics.fmean(logs), Z_95 * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": math.exp(middle), "low": math.exp(middle - half), "high": math.exp(middle + half)}


def show_progress(name: str, _: object, done: int, wanted: int) -> None:
    """Prints a setting's number of finished episodes from time to time."""
    if done % 50 == 0:
        print(f"{name}: {done} of {wanted}", file=sys.stderr, flush=True)


def take_turns(contestants: Mapping[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, float]:
    """Returns median seconds; contestants run in turns, so that machine drift affects all. One warm-up turn."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, run in contestants.items():
            synchronise(device)
            started = time.perf_counter()
            run()
            synchronise(device)
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronise(device: str) -> None:
    """Waits until a GPU has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class ColdTimer:
    """Times calls with operands in memory, not in a cache.

    A buffer larger than the caches is overwritten before each call, so that the bandwidth bound holds. On a GPU a call
    is captured in a CUDA graph and timed between two events while the GPU is busy, which excludes Python's launch.
    """

    def __init__(self, device: str, repeats: int) -> None:
        self._on_gpu = device.startswith("cuda")
        self._flushed = torch.empty(_FLUSHED_BYTES[device.partition(":")[0]], dtype=torch.uint8, device=device)
        self._repeats = repeats

    def seconds(self, contestants: Mapping[str, Call]) -> dict[str, float | str]:
        """Returns the contestants' median seconds, taking turns, or the reason why one failed."""
        found: dict[str, float | str] = {}
        ready: dict[str, Call] = {}
        for name, call in contestants.items():
            try:
                ready[name] = self._captured(call) if self._on_gpu else _warm(call)
            except Exception as error:  # a compiler error must not end the comparison
                found[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(self._repeats):
            for name, call in ready.items():
                times[name].append(self._gpu_seconds(call) if self._on_gpu else self._cpu_seconds(call))
        return found | {name: statistics.median(values) for name, values in times.items()}

    def _captured(self, call: Call) -> Call:
        for _ in range(_WARM_UPS):  # for compilers and caches
            call()
        capture = capture_on(torch.empty(1, device=self._flushed.device))
        assert capture is not None, "captured on a GPU only"
        return capture(call)

    def _cpu_seconds(self, call: Call) -> float:
        self._flushed.zero_()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def _gpu_seconds(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3


def _warm(call: Call) -> Call:
    call()
    return call
