# SPDX-License-Identifier: Apache-2.0
"""A decoder's layers compiled for this processor, for forwards of one small tree.

On a CPU such a forward spends more time on calling its operations than on computing them. torch.export and AOTInductor
compile the layer's own forward, once for one row and once for any number of rows; the weights are inputs, so that all
layers share both. Compiling takes about 15 s; the results are kept on disk.
"""

import copy
import hashlib
import inspect
import logging
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import specvla_kernels
from specvla_kernels.graph_capture import check_rows
from specvla_kernels.layout import MAX_TREE_NODES, Ancestry, PackedLayout, Span, pack_layout

_EXAMPLES = {"one_row": 1, "several_rows": 8}  # rows of the tree from which each is traced
_PREFIX = 24  # rows before an example
_LEAST_SEEN, _MOST_SEEN = 2, 1 << 16  # rows of a slot
_TURNS, _TIMING_S = 15, 0.1
_PATIENCE_S = 300
_PROCESSOR = re.compile(r"^(model name|flags|Features|CPU (?:implementer|part|variant))\s*:.*", re.MULTILINE)
_log = logging.getLogger(__name__)

Run = Callable[[list[Tensor]], list[Tensor]]
LayerForward = Callable[[int, Tensor], Tensor]
"""Maps a layer's index and rows [n, hidden] to the layer's result."""


def are_compilable(layers: Sequence[nn.Module]) -> bool:
    """True for layers on a CPU that have the same shapes, and whose products are all of plain matrices."""
    shapes = {tuple((name, each.shape, each.dtype) for name, each in layer.named_parameters()) for layer in layers}
    matrices = [part for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)]
    return len(shapes) == 1 and all(type(each) is nn.Linear and each.weight.device.type == "cpu" for each in matrices)


@dataclass(frozen=True)
class CompiledLayers:
    """The layers of one decoder, compiled."""

    one_row: Run
    several_rows: Run
    weights: Sequence[list[Tensor]]  # of each layer
    most_rows: int = MAX_TREE_NODES  # of the largest tree that they are faster for
    compile_s: float = 0.0  # 0: they were on disk

    def forward_of(
        self, layout: PackedLayout, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor
    ) -> LayerForward | None:
        """The layers' forward of a layout; None if it is not one tree, or one that is too large.

        For the arguments see `PackedDecoder.forward` and `rotation`.
        """
        span = layout.spans[0]
        seen = span.prefix_len + span.length
        is_small = span.is_tree and span.length <= self.most_rows and _LEAST_SEEN <= seen <= _MOST_SEEN
        if len(layout.spans) > 1 or not is_small:
            return None
        run = self.one_row if span.length == 1 else self.several_rows
        rows = [cos, sin, layout.kv_rows - span.slot * keys.shape[2]]
        there = slice(span.slot, span.slot + 1)
        kept = [*zip(keys[:, there, :seen].unbind(), values[:, there, :seen].unbind(), strict=True)]
        mask = [each for each in layout.masks if each is not None]
        # Compiled code takes rows as contiguous and checks nothing: those with DeepStack features beside are not.
        return lambda i, x: run([x.contiguous(), *rows, *kept[i], *mask, *self.weights[i]])[0]


def compile_layers(layers: Sequence[nn.Module]) -> CompiledLayers:
    """Compiles the layers of a decoder, or takes the results from the disk.

    Raises RuntimeError with the reason if they cannot be compiled, or compute something else then.
    """
    kept = cache_folder() / _key(layers[0])
    if kept.exists():
        with suppress(Exception):  # cut off by a full disk, say: compiled again
            return _loaded(kept, layers)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        _compile_apart(layers[0], Path(folder))
        made = _loaded(Path(folder), layers)
        _keep(Path(folder), kept)
    return replace(made, compile_s=time.perf_counter() - started)


def _loaded(folder: Path, layers: Sequence[nn.Module]) -> CompiledLayers:
    one_row, several_rows = (_checked(folder / f"{name}.pt2", layers[0], rows) for name, rows in _EXAMPLES.items())
    made = CompiledLayers(one_row, several_rows, [_weights(each) for each in layers])
    return replace(made, most_rows=_most_rows(made, layers[0]))


def _weights(layer: nn.Module) -> list[Tensor]:
    return [each.detach() for each in layer.parameters()]


def _compile_apart(layer: nn.Module, folder: Path) -> None:
    """Compiles in a process of its own: the compiler takes memory, starts processes that stay, and may crash."""
    weightless = folder / "layer.pt"
    torch.save(copy.deepcopy(layer).to("meta"), weightless)
    command = [sys.executable, "-m", __name__, str(folder), str(torch.get_num_threads())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the compiler takes longer than {_PATIENCE_S} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        hint = "; apt install g++, or set CXX" if "CxxCompiler" in last else ""
        raise RuntimeError(f"{last}{hint}")


def _main(folder: Path, threads: int) -> None:
    """Compiles the layer of `_compile_apart`."""
    torch.set_num_threads(threads)
    layer = torch.load(folder / "layer.pt", weights_only=False).to_empty(device="cpu")
    with torch.no_grad():
        for each in layer.parameters():
            each.normal_()
    for name, rows in _EXAMPLES.items():
        _compile(layer, rows, folder / f"{name}.pt2")


def _compile(layer: nn.Module, rows: int, package: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    x, cos, sin, layout, keys, values = _example(layer, rows)
    weights = tuple(_weights(layer))
    masks = tuple(each for each in layout.masks if each is not None)
    n = {0: torch.export.Dim("rows", min=2, max=MAX_TREE_NODES)} if rows > 1 else {}
    seen = torch.export.Dim("seen", min=_LEAST_SEEN, max=_MOST_SEEN)
    of_masks: tuple[Any, ...] = tuple({**n, 1: seen} for _ in masks)
    shapes: tuple[Any, ...] = (n, n, n, n, {1: seen}, {1: seen}, of_masks, ({},) * len(weights))
    given = (x, cos, sin, layout.kv_rows, keys, values, masks, weights)
    program = torch.export.export(_Traced(layer), given, dynamic_shapes=shapes, strict=False)
    aoti_compile_and_package(program, package_path=str(package))


class _Traced(nn.Module):
    """A layer's forward of one tree as a function of tensors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # not a part: its weights are inputs

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_rows: Tensor,
        keys: Tensor,
        values: Tensor,
        masks: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        (layer,) = self._layer
        n = x.shape[0]
        span = Span(0, 0, n, keys.shape[1] - n, is_tree=True)
        layout = _TreeLayout((span,), masks or (None,), kv_rows)
        named = {name: weight for (name, _), weight in zip(layer.named_parameters(), weights, strict=True)}
        out: Tensor = functional_call(layer, named, (x, cos, sin, layout, keys, values))
        return out


@dataclass(frozen=True)
class _TreeLayout:
    """The parts of a `PackedLayout` that a layer reads on a CPU."""

    spans: tuple[Span, ...]
    masks: tuple[Tensor | None, ...]
    kv_rows: Tensor


def _example(layer: Any, rows: int) -> tuple[Tensor, Tensor, Tensor, PackedLayout, Tensor, Tensor]:
    """The arguments of a layer's forward for a tree whose nodes alternate between two branches."""
    generator = torch.Generator().manual_seed(rows)
    dtype, hidden, seen = layer.qkv.weight.dtype, layer.qkv.weight.shape[1], _PREFIX + rows
    ancestry = Ancestry.from_parents([max(-1, node - 2) if node else -1 for node in range(rows)])
    layout = pack_layout([(Span(0, 0, rows, _PREFIX, is_tree=True), ancestry)], seen, torch.device("cpu"))
    angles = layout.positions[:, None] * torch.rand(layer.head_dim // 2, generator=generator)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    keys, values = torch.randn(2, 1, seen, layer.kv_heads, layer.head_dim, generator=generator).to(dtype)
    return x, angles.cos(), angles.sin(), layout, keys, values


@torch.no_grad()
def _checked(package: Path, layer: nn.Module, rows: int) -> Run:
    """Loads a package; raises RuntimeError if it computes something else than the layer, also for fewer rows."""
    # The loader alone: that of torch._inductor imports the compiler, which takes 2 s.
    run: Run = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, -1).boxed_run
    compiled = CompiledLayers(run, run, [_weights(layer)])
    for each in {rows, min(rows, 3)}:
        ours, theirs = _both(compiled, layer, each)
        check_rows(ours(), theirs(), what="the compiled layer")
    return run


def _both(compiled: CompiledLayers, layer: nn.Module, rows: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """An example's forward by the first compiled layer, and by the layer itself."""
    x, cos, sin, layout, keys, values = _example(layer, rows)
    forward = compiled.forward_of(layout, cos, sin, keys[None], values[None])
    assert forward is not None
    return partial(forward, 0, x), partial(layer, x, cos, sin, layout, keys, values)


@torch.no_grad()
def _most_rows(compiled: CompiledLayers, layer: nn.Module) -> int:
    """The most rows up to which the compiled layer is faster, of powers of two; 0: of none."""
    found, rows = 0, 1
    while rows <= MAX_TREE_NODES:
        ours, theirs = _seconds(_both(compiled, layer, rows))
        if ours >= theirs:
            break
        found, rows = rows, 2 * rows
    return found


def _seconds(calls: Sequence[Callable[[], Tensor]]) -> list[float]:
    """Each call's median seconds, in turns."""
    turns: list[list[float]] = []
    until_s = time.perf_counter() + _TIMING_S
    while len(turns) < 3 or (len(turns) < _TURNS and time.perf_counter() < until_s):
        times = []
        for call in calls:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        turns.append(times)
    return [statistics.median(each) for each in zip(*turns, strict=True)]


def cache_folder() -> Path:
    """The folder of compiled layers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specvla_ros" / "layers"


def _keep(made: Path, kept: Path) -> None:
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for package in made.glob("*.pt2"):
            beside = kept / f"{package.name}.{os.getpid()}"
            shutil.copy(package, beside)
            beside.replace(kept / package.name)
    except OSError as error:
        _log.warning("the compiled layers cannot be kept, so each start compiles them again: %s", error)


def _key(layer: nn.Module) -> str:
    """Names everything that compiled layers depend on: shapes and numbers, sources, torch and the processor."""
    shapes = [(name, tuple(each.shape), each.dtype) for name, each in layer.named_parameters()]
    said = [item for part in layer.modules() for item in vars(part).items() if isinstance(item[1], int | float | str)]
    made_for = repr((shapes, said, torch.get_num_threads(), torch.__version__))
    return _digest(made_for, _sources(type(layer)), _processor())


def _sources(layer_class: type) -> str:
    files = [*Path(specvla_kernels.__path__[0]).glob("*.py"), Path(inspect.getfile(layer_class)), Path(__file__)]
    # Builds with symbolic links leave those of removed files.
    return _digest(*(file.read_text() for file in sorted(files) if file.is_file()))


def _processor() -> str:
    """A stale result of another machine could hold instructions that this processor lacks."""
    with suppress(OSError):
        first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
        return platform.machine() + "\n".join(match[0] for match in _PROCESSOR.finditer(first))
    return platform.machine() + platform.processor() + torch.backends.cpu.get_cpu_capability()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
