# SPDX-License-Identifier: Apache-2.0
"""The steps of report.py, each run in a separate process; a step writes every figure to its file immediately."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata, util
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.acceptance_trace import Trace
from benchmarks.gpu import attention_contestants, kernels
from benchmarks.gpu.kernel_cases import batches, filled_cache, first_layer
from benchmarks.harness import ColdTimer, dtype_on, hardware, synchronise
from benchmarks.random_policy import SIZES, TOKENS, RandomPolicy, frame, quantized, random_decoder, random_policy
from benchmarks.saturated import Contestant, EngineTurns, Saturated, make_engine, mode_settings, weight_bytes
from specvla_kernels.device import has_kernels, operators_on, why_no_kernels
from specvla_kernels.fused_linear import fused_linear_triton
from specvla_kernels.int8_linear import int8_linear
from specvla_kernels.packed_attention import packed_attention
from specvla_kernels.rounded_linear import round_rows, round_weight, rounded_linear
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.lab.evaluation.run_directory import cpu_name, git_revision
from specvla_ros.lab.planning.limits import spec_vla_relaxed
from specvla_ros.models.quantization import QUANTIZATIONS
from specvla_ros.speculation.settings import DraftSettings

ROOT = Path(__file__).resolve().parents[2]
REFUSED = 3  # exit code: the figures would be those of the references
CHUNK = 35  # tokens of five actions
_GEMM_ROWS = (1, 8, 16, 64, 128, 192, 256, 320, 384)
_TESTS = {
    "captured": ("engine/test_captured_decoding.py", "engine/test_captured_vision.py",
                 "engine/test_captured_families.py", "engine/test_current_device.py", "engine/test_kernel_check.py"),
    "drafts": ("speculation/test_eagle_drafter.py",),
    "engine": ("engine/test_packed_forward.py", "engine/test_speculation.py", "engine/test_pipelining.py",
               "engine/test_verification_kernels.py"),
    "kernels": ("kernels",),
}  # fmt: skip
_FEW_TESTS = {"captured": ("kernels/test_graph_capture.py",)}
_LIBRARIES = ("torch", "triton", "numpy", "transformers", "accelerate", "torchao", "flash-attn", "pytest")
_SMI = (
    "name,driver_version,pstate,temperature.gpu,power.draw,power.limit,clocks.sm,clocks.mem,clocks.max.sm,"
    "clocks.max.mem,ecc.mode.current,persistence_mode,memory.total,memory.used"
)


@dataclass(frozen=True)
class Job:
    """The task of a step.

    Args:
        size: name of the shapes.
        short: use the minimum number of repetitions, to show that it runs.
        file: the file for the figures.
        found: figures that already exist.
        fake: the device is simulated, see test/support/gpu_dry_run.py.
    """

    device: str
    size: str
    dtype: torch.dtype
    short: bool
    file: Path
    found: dict[str, Any]
    fake: bool = False

    def lacks(self, name: str) -> bool:
        """True if a figure is missing."""
        return name not in self.found

    def put(self, name: str, figure: Any) -> None:
        """Adds a figure and writes the file immediately."""
        self.found[name] = figure
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps(self.found), encoding="utf-8")
        os.replace(part, self.file)

    def repeats(self, usual: int) -> int:
        """Number of repetitions of a timing."""
        if self.fake:
            return 1
        return min(2, usual) if self.short else usual


def environment(job: Job) -> None:
    """Records the environment: versions, driver, clocks, power."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {
        "hardware": hardware(job.device),
        "cpu": cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "git_revision": git_revision(ROOT),
        "dtype": str(job.dtype).removeprefix("torch."),
    }
    if job.device == "cuda":
        found |= {
            "kernels": operators_on(torch.device("cuda", 0), job.dtype),
            "cuda": torch.version.cuda,
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "nvidia_smi": smi(),
        }
    job.put("environment", found)


def smi() -> dict[str, str] | str:
    """The driver's current values for the measured GPU, or why there are none."""
    # The driver counts in the order of the slots, and all GPUs; torch's first may be another one.
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    command = ["nvidia-smi", f"--id=GPU-{uuid}" if uuid else "--id=0", f"--query-gpu={_SMI}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    values = [value.strip() for value in done.stdout.split(",")]
    names = _SMI.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else (done.stdout + done.stderr).strip()


def tests(job: Job) -> None:
    """Runs the repository's tests of kernels, captures and engine on the device, with a fixed seed."""
    if util.find_spec("pytest") is None or util.find_spec("hypothesis") is None:
        job.put("skipped", "pytest and hypothesis are missing: pip install pytest pytest-xdist hypothesis")
        return
    workers = ["-n", str(max(2, (os.cpu_count() or 2) - 2))] if util.find_spec("xdist") and not job.short else []
    for group, paths in (_FEW_TESTS if job.short else _TESTS).items():
        if job.lacks(group):
            job.put(group, _tested([str(ROOT / "test" / path) for path in paths], workers))


def _tested(paths: list[str], workers: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        junit = Path(directory) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *workers]
        command += ["--continue-on-collection-errors", f"--junitxml={junit}", *paths]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        seconds = time.perf_counter() - started
        if not junit.exists():
            return {"error": done.stdout[-2000:] + done.stderr[-2000:]}
        suite = next(ElementTree.parse(junit).iter("testsuite"))
        failed = {
            f"{case.get('classname')}::{case.get('name')}": (fault.get("message") or "")[:300]
            for case in suite.iter("testcase")
            for fault in [*case.iter("failure"), *case.iter("error")]
        }
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        return {**counts, "seconds": seconds, "failed": failed}


@torch.inference_mode()
def gemm(job: Job) -> None:
    """Times a layer's four products by rows and format, launched from a graph, with operands in memory."""
    timer = ColdTimer(job.device, job.repeats(21))
    layer = first_layer(_decoder(job, layers=1))
    for name in ("qkv", "out", "gate_up", "down"):
        weight = getattr(layer, name).weight
        for rows in _GEMM_ROWS[:: 4 if job.short else 1]:
            key = f"{name} {rows}"
            if job.lacks(key):
                x = torch.randn(rows, weight.shape[1], dtype=job.dtype, device=job.device)
                calls = _products(x, weight)
                job.put(
                    key,
                    {
                        "matrix": name,
                        "shape": list(weight.shape),
                        "rows": rows,
                        "seconds": timer.seconds(calls),
                    },
                )


def _products(x: Tensor, weight: Tensor) -> dict[str, Callable[[], object]]:
    """The product in each format; one that the device does not support fails when called."""
    device, (columns, depth) = x.device, weight.shape
    whole = torch.randint(-127, 128, (columns, depth), dtype=torch.int8, device=device)
    scales = torch.ones(columns, device=device)

    def fp8() -> Tensor:
        return torch._scaled_mm(x8, weight8.t(), rows8, columns8, out_dtype=torch.bfloat16)

    calls: dict[str, Callable[[], object]] = {
        str(weight.dtype).removeprefix("torch."): lambda: F.linear(x, weight),
        "w8a8, int8_linear": lambda: int8_linear(x, whole, scales),
    }
    if has_kernels(x):
        calls[f"{str(weight.dtype).removeprefix('torch.')}, fused_linear"] = lambda: fused_linear_triton(x, weight)
        # Rounded in the first call: the kernel compiles for no float8 before sm_89.
        rounded = cache(lambda dtype: (round_rows(x, dtype), round_weight(weight, dtype)))
        calls["int8, rounded_linear alone"] = lambda: rounded_linear(*rounded(torch.int8), x.dtype)
        calls["fp8, rounded_linear alone"] = lambda: rounded_linear(*rounded(torch.float8_e4m3fn), x.dtype)
    if x.is_cuda:
        x8, weight8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        rows8, columns8 = torch.ones(len(x), 1, device=device), torch.ones(1, columns, device=device)
        calls["fp8, torch's product alone"] = fp8
        padded = torch.zeros(max(32, -(-len(x) // 8) * 8), depth, dtype=torch.int8, device=device)
        calls["int8, torch's product alone"] = lambda: torch._int_mm(padded, whole.t())
    return calls


@torch.inference_mode()
def operators(job: Job) -> None:
    """Times every kernel and stage, with its reference and the measured roofline."""
    timer, decoder = ColdTimer(job.device, job.repeats(15)), _decoder(job)
    limits = kernels.limits(decoder, job.device)
    job.put("limits", limits.as_json())
    for kind, case in kernels.cases(decoder):
        if job.lacks(key := f"{case.name}, {case.batch}"):
            job.put(key, kernels.row(kind, case, limits, timer))


@torch.inference_mode()
def attention(job: Job) -> None:
    """Times packed attention and its alternatives."""
    timer, decoder = ColdTimer(job.device, job.repeats(21)), _decoder(job, layers=1)
    cache = filled_cache(decoder)
    for batch in batches(decoder):
        if not job.lacks(batch.name):
            continue
        q = torch.randn(batch.rows, decoder.config.num_attention_heads, decoder.config.head_dim,
                        dtype=job.dtype, device=job.device)  # fmt: skip
        ours = partial(packed_attention, q, cache.keys[0], cache.values[0], batch.layout)
        made = {"ours": ours, **attention_contestants.contestants(batch, q, cache)}
        found = timer.seconds({name: call for name, call in made.items() if not isinstance(call, str)})
        found |= {name: why for name, why in made.items() if isinstance(why, str)}
        off = {
            name: float((cast(Tensor, call()).double() - ours().double()).abs().max())
            for name, call in made.items()
            if not isinstance(call, str) and not isinstance(found[name], str) and name != "ours" and not job.fake
        }
        job.put(batch.name, {"rows": batch.rows, "seconds": found, "largest_difference": off})


def modes(job: Job) -> None:
    """Times every mode on 640 x 480 images and transformers' generate, taking turns; one engine per mode."""
    with _policy(job) as policy:
        contestants: dict[str, Contestant] = {}
        if job.fake:
            job.put("transformers", {"skipped": "its answers are read from tensors, which hold no values in a dry run"})
        else:
            contestants |= _generates(policy)
        for name, settings in _modes(job).items():
            contestants[name] = _engine(job, policy, settings)
        _compete(job, contestants)


def chunks(job: Job) -> None:
    """Times answers of five actions, sequential and overlapping."""
    with _policy(job, CHUNK) as policy:
        chosen = {name: each for name, each in _modes(job, CHUNK).items() if name in ("ar", "spec", "specpipe", "auto")}
        _compete(job, {name: _engine(job, policy, settings) for name, settings in chosen.items()})


def graphs(job: Job) -> None:
    """Times modes with and without CUDA graphs, taking turns."""
    with _policy(job) as policy:
        chosen = {name: settings for name, settings in _modes(job).items() if name in ("ar", "spec", "specpipe")}
        contestants: dict[str, Contestant] = {}
        for name, settings in chosen.items():
            contestants[f"{name}, graphs"] = _engine(job, policy, settings)
            contestants[f"{name}, eager"] = _engine(job, policy, settings, graphs=False)
        _compete(job, contestants)


def formats(job: Job) -> None:
    """Times modes on quantised and unquantised weights."""
    with _policy(job) as policy:
        contestants: dict[str, Contestant] = {}
        for kind in QUANTIZATIONS:
            try:
                mine = policy if kind == "none" else quantized(policy, kind)
                tried = _engine(job, mine, _modes(job)["ar"])
                tried.add_turn(1)  # some formats fail only when they multiply
            except Exception as error:
                job.put(kind, {"skipped": str(error) or type(error).__name__})
                continue
            job.put(kind, {"layer_bytes": weight_bytes(mine.decoder.layers)})
            contestants |= {
                f"{kind}, {name}": _engine(job, mine, settings)
                for name, settings in _modes(job).items()
                if name in ("ar", "spec", "specpipe")
            }
        _compete(job, contestants)


def ticks(job: Job) -> None:
    """Times vision, forward, verification and draft inside a tick by events, and the device's wait for the host."""
    chosen = _modes(job)
    for name in ("spec", "specpipe"):  # with the drafts of the shipped profiles
        chosen[f"{name}, temporal"] = replace(chosen[name], draft=_temporal(chosen[name].draft))
    with _policy(job) as policy:
        for name, settings in chosen.items():
            if job.lacks(name):
                engine = make_engine(policy, settings, None if job.fake else Trace(spec_vla_relaxed("goal")))
                job.put(name, _stages(engine, job))
                del engine


class _Marks:
    """Time spans on a device: events on a GPU, the clock on a CPU."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        """Returns a time mark."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two past marks."""
        return float(start.elapsed_time(end)) * 1e-3 if self._on_gpu else end - start

    def spanning(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a call so that its span is recorded."""

        def run(*arguments: Any, **options: Any) -> Any:
            start = self.now()
            result = call(*arguments, **options)
            self.spans.append((stage, start, self.now()))
            return result

        return run


def _stages(engine: Engine, job: Job) -> dict[str, Any]:
    marks = _Marks(job.device)
    stages: tuple[tuple[str, Any, str], ...] = (
        ("vision and prompt", engine.runner, "embed"),
        ("forward", engine.runner, "run"),
        ("verification", engine.verifier, "verify"),
        ("draft", engine.drafter, "draft"),
    )
    for stage, owner, method in stages:
        setattr(owner, method, marks.spanning(stage, getattr(owner, method)))
    run = Saturated(engine, (frame(stamp) for stamp in range(1, 1 << 30)))
    warm, counted = (4, 8) if job.short else (40, 200)
    for _ in range(warm):
        run.tick()
    synchronise(job.device)
    marks.spans.clear()
    starts = []
    for _ in range(counted):
        starts.append(marks.now())
        run.tick()
    end = marks.now()
    synchronise(job.device)
    whole_s = marks.seconds(starts[0], end)
    per_tick = {
        stage: sum(marks.seconds(start, stop) for name, start, stop in marks.spans if name == stage) / counted
        for stage, *_ in stages
    }
    return {
        "ticks": counted,
        "tick_s": whole_s / counted,
        "stages_s": per_tick,
        "host_gap_s": whole_s / counted - sum(per_tick.values()),
        "cuda_graphs": str(engine.describe().get("cuda_graphs", "")),
    }


def soak(job: Job) -> None:
    """Soaks every mode and random switching: frames end once, no slot leaks, tokens equal plain decoding's."""
    if job.fake:
        job.put("skipped", "its checks need numbers, which a dry run does not have")
        return
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "soak.json"
        command = [sys.executable, "-m", "faults.soak", "--device", job.device, "--dtype", "float32"]
        command += ["--ticks", "20" if job.short else "1500", "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": _PATH})
        if not out.exists():
            raise RuntimeError(done.stderr[-2000:])
        result = json.loads(out.read_text(encoding="utf-8"))
        job.put("soak", {"passed": result["passed"], "ticks": result["ticks"], "phases": result["phases"]})


STEPS: dict[str, Callable[[Job], None]] = {
    each.__name__: each
    for each in (environment, tests, modes, chunks, ticks, gemm, attention, operators, graphs, formats, soak)
}
_PATH = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "test"))


def _decoder(job: Job, layers: int = 0) -> Any:
    shape = SIZES[job.size].llama
    shape = replace(shape, num_hidden_layers=layers) if layers else shape
    return random_decoder(shape, dtype=job.dtype, device=job.device)


def _policy(job: Job, tokens: int = TOKENS) -> AbstractContextManager[RandomPolicy]:
    """A policy with vision, whose image processor resizes the images."""
    return random_policy(SIZES[job.size], tokens=tokens, dtype=job.dtype, device=job.device)


def _modes(job: Job, tokens: int = TOKENS) -> dict[str, EngineSettings]:
    lengths, draft = spec_vla_relaxed("goal"), DraftSettings(nodes=16)
    chosen: dict[str, EngineSettings] = {
        "ar": mode_settings("ar", lengths, tokens=tokens, draft=draft),
        "spec": mode_settings("spec", lengths, tokens=tokens, draft=draft),
        "pipeline": mode_settings("pipeline", lengths, tokens=tokens, draft=draft),
        "specpipe": mode_settings("specpipe", lengths, tokens=tokens, draft=draft),
        "specpipe, 2 chunks": mode_settings("specpipe", lengths, tokens=tokens, draft=draft, chunks=2),
        "auto": mode_settings("auto", lengths, tokens=tokens, draft=draft),
    }
    spec = chosen["spec"]
    chosen["spec, window mass"] = replace(spec, draft=replace(spec.draft, children="window_mass"))
    return chosen


def _temporal(draft: DraftSettings) -> DraftSettings:
    """Drafts of the last action beside the head's."""
    return engine_settings_from(values={"draft.nodes": draft.nodes, "draft.temporal": True}).draft


def _engine(job: Job, policy: RandomPolicy, settings: EngineSettings, *, graphs: bool = True) -> EngineTurns:
    return EngineTurns(policy, settings, spec_vla_relaxed("goal"), graphs=graphs, keep=True)


def _generates(policy: RandomPolicy) -> dict[str, Contestant]:
    if util.find_spec("transformers") is None or util.find_spec("accelerate") is None:
        return {}
    from benchmarks.transformers_baseline import GenerateTurns

    return {
        "transformers": GenerateTurns(policy, compiled=False),
        "transformers, compiled": GenerateTurns(policy, compiled=True),
    }


def _compete(job: Job, contestants: Mapping[str, Contestant]) -> None:
    """Lets all take turns and records after each turn; a step that is cut off has fewer turns."""
    actions = 1 if job.fake else 2 if job.short else 20
    for _ in range(job.repeats(5)):
        for name, contestant in list(contestants.items()):
            contestant.add_turn(actions)
            figures = contestant.summary()
            plain = contestants.get("transformers")
            if plain is not None and name in ("ar", "pipeline") and contestant is not plain:
                figures["same_tokens"] = contestant.tokens == plain.tokens  # type: ignore[attr-defined]
            job.put(name, figures)


def _refuse(why: str) -> None:
    print(f"gpu_report: {why}", file=sys.stderr)
    raise SystemExit(REFUSED)


def check(device: str, dtype: torch.dtype) -> None:
    """Ends the process if a GPU was requested but the figures would not be a GPU's."""
    if device != "cuda":
        return
    if not torch.cuda.is_available():
        _refuse("no CUDA GPU found; --device cpu shows that the report works, on the references")
    why = why_no_kernels(torch.device("cuda", 0), dtype)
    if why:
        _refuse(f"references are not timed on a GPU: {why}")


def main(*, fake: bool = False) -> None:
    """Runs one step; `fake`: the device is simulated, see test/support/gpu_dry_run.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--sizes", choices=SIZES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    dtype = dtype_on(given.device, "")
    if not fake:
        check(given.device, dtype)
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    STEPS[given.step](Job(given.device, given.sizes, dtype, given.sizes == "tiny" or fake, given.out, found, fake))


if __name__ == "__main__":
    main()
