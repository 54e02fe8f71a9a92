# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation of every kernel as the product launches it, for GPUs that are not there."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

with suppress(ImportError):
    import triton  # the operators take it where somebody has imported it

from benchmarks.decoder_shapes import DECODERS
from specvla_kernels import attention_plan, fused_linear, rounded_linear
from specvla_kernels.accept_tree import accept_tree_triton
from specvla_kernels.accept_within import Deferral, Within, accept_within_triton
from specvla_kernels.commit_kv import commit_kv_triton
from specvla_kernels.compare_drafts import Nodes, PackedTrees, Trees, compare_drafts_triton
from specvla_kernels.device import HAS_TRITON, Tile, try_product
from specvla_kernels.draft_rows import DraftSlots, beam_rows_triton, chain_rows_triton
from specvla_kernels.expand_tree import Beam, Candidates, Considered, Window, expand_tree_triton
from specvla_kernels.finish_tree import finish_tree_triton
from specvla_kernels.fused_linear import fused_linear_triton
from specvla_kernels.gated_unit import gated_unit_triton
from specvla_kernels.gather_rows import gather_rows_triton
from specvla_kernels.greedy_choice import greedy_choice_triton
from specvla_kernels.grow_tree import PathLogits, grow_tree_triton
from specvla_kernels.layernorm_residual import layernorm_residual_triton
from specvla_kernels.layout import Span
from specvla_kernels.packed_attention import packed_attention_triton
from specvla_kernels.patch_embedding import patch_embedding_triton
from specvla_kernels.repetition_penalty import EarlierIds, penalised_choice_triton
from specvla_kernels.rmsnorm_residual import RowNorm, rmsnorm_residual_triton, rmsnorm_triton
from specvla_kernels.rope_write_kv import rope_write_kv_triton
from specvla_kernels.rounded_linear import (
    LARGEST,
    Rounded,
    round_rows_triton,
    rounded_linear_triton,
)
from specvla_kernels.uncertainty import uncertainty_triton
from specvla_ros.lab.planning.cost import OPENVLA_7B
from specvla_ros.models.config import DecoderShape

_META = torch.device("meta")
_SLOT_ROWS = 320  # a prompt of 290, an answer and 16 nodes


@dataclass(frozen=True)
class _Shape:
    """A decoder in the dtype in which it runs; empty tensors of its shapes."""

    decoder: DecoderShape
    dtype: torch.dtype

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=_META)

    def rows(self, n_rows: int) -> Tensor:
        return self.empty(n_rows, self.decoder.hidden_size)

    def queries(self, n_rows: int) -> Tensor:
        return self.empty(n_rows, self.decoder.num_attention_heads, self.decoder.head_dim)

    def cache(self) -> Tensor:
        return self.empty(4, _SLOT_ROWS, self.decoder.num_key_value_heads, self.decoder.head_dim)

    def norm(self) -> RowNorm:
        return RowNorm(self.rows(1)[0], 1e-6, self.decoder.variant.unit_offset_norms)

    def widths(self) -> tuple[int, int]:
        """Of the queries alone, and with the keys and values."""
        queries = self.decoder.num_attention_heads * self.decoder.head_dim
        return queries, queries + 2 * self.decoder.num_key_value_heads * self.decoder.head_dim


_SHAPES = {f"{name} bf16": _Shape(decoder, torch.bfloat16) for name, decoder in DECODERS.items()} | {
    "openvla-7b fp16": _Shape(DECODERS["openvla-7b"], torch.float16),
    "nano fp32": _Shape(DECODERS["nano"], torch.float32),
}


def _whole(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=_META)


def _rope(shape: _Shape) -> None:
    n_rows, decoder = 300, shape.decoder
    kv_heads = decoder.num_key_value_heads
    qkv = shape.empty(n_rows, decoder.num_attention_heads + 2 * kv_heads, decoder.head_dim)
    q, k, v = qkv.split((decoder.num_attention_heads, kv_heads, kv_heads), dim=1)
    angles = torch.empty(n_rows, decoder.head_dim // 2, device=_META)
    rope_write_kv_triton(q, k, v, angles, angles, _whole(n_rows), shape.cache(), shape.cache())


def _attention(shape: _Shape, rows: int, programs: int) -> None:
    """Of a tree that fills a tile of so many rows, on a device that runs so many programs at a time."""
    kv_heads = shape.decoder.num_key_value_heads
    group = shape.decoder.num_attention_heads // kv_heads
    nodes = rows // group
    spans = (Span(0, 0, nodes, 1, True),)
    with patch.object(attention_plan, "_programs_of", lambda _: programs):
        plan = attention_plan.plan_attention(spans, group=group, kv_heads=kv_heads, slot_rows=_SLOT_ROWS, device=_META)
    packed_attention_triton(shape.queries(nodes), shape.cache(), shape.cache(), _whole(nodes), plan)


def _commit(shape: _Shape, places: int) -> None:
    caches = shape.empty(2, 32, *shape.cache().shape)
    commit_kv_triton(caches[0], caches[1], _whole(4), _whole(4), _whole(4, places))


def _pointwise(shape: _Shape) -> None:
    x, norm = shape.rows(300), shape.norm()
    rmsnorm_triton(x, norm)
    rmsnorm_residual_triton(x, x, norm)
    gated_unit_triton(shape.empty(300, 2 * shape.decoder.intermediate_size), shape.decoder.variant.gate)


def _with_every_tile(launch: Callable[..., None], *arguments: Any) -> None:
    """A product's tile depends on the GPU's number of multiprocessors, of which a device by name has none."""
    for place in range(3):

        def chosen(tiles: Sequence[Tile], *_: object, place: int = place) -> Tile:
            return tiles[min(place, len(tiles) - 1)]

        with patch.object(fused_linear, "widest", chosen), patch.object(rounded_linear, "widest", chosen):
            launch(*arguments)


def _layer_products(shape: _Shape, n_rows: int) -> None:
    """Of a layer with few rows: with the norm in front, behind the attention, and the MLP's two."""
    x, norm, decoder = shape.rows(n_rows), shape.norm(), shape.decoder
    hidden, width = decoder.hidden_size, decoder.intermediate_size
    of_queries, of_all = shape.widths()
    bias = shape.empty(of_all) if decoder.variant.qkv_bias else None
    fused_linear_triton(x, shape.empty(of_all, hidden), norm=norm, bias=bias)
    fused_linear_triton(shape.empty(n_rows, of_queries), shape.empty(hidden, of_queries), residual=x)
    gated = fused_linear_triton(x, shape.empty(2 * width, hidden), norm=norm, activation=decoder.variant.gate)
    fused_linear_triton(gated, shape.empty(hidden, width), residual=x)


def _vision(dtype: torch.dtype) -> None:
    """The patches and blocks of OpenVLA's towers: with prefix tokens and LayerScale, and without."""
    empty = partial(torch.empty, dtype=dtype, device=_META)
    for tower in OPENVLA_7B.towers:
        dim, side, patch = tower.embed_dim, tower.image_size, tower.patch_size
        x = empty(tower.patches + tower.register_tokens + int(tower.class_token), dim)
        column, scale = empty(dim), empty(dim) if tower.layer_scale else None
        patch_embedding_triton(empty(3, side, side), empty(dim, 3, patch, patch), column, empty(tower.patches, dim))
        layernorm_residual_triton(x, x, scale, column, column, 1e-6)
        gelu = fused_linear_triton(x, empty(tower.mlp_dim, dim), bias=empty(tower.mlp_dim), activation="gelu")
        fused_linear_triton(gelu, empty(dim, tower.mlp_dim), bias=column, scale=scale, residual=x)


def _rounded(shape: _Shape, dtype: torch.dtype, n_rows: int) -> None:
    """A layer's roundings and its four products in 8 bits."""
    x, decoder = shape.rows(n_rows), shape.decoder
    hidden, width = decoder.hidden_size, decoder.intermediate_size
    of_queries, of_all = shape.widths()

    def weight(out_features: int, in_features: int) -> Rounded:
        steps = torch.empty(out_features, device=_META)
        return Rounded(torch.empty(out_features, in_features, dtype=dtype, device=_META), steps)

    normed = round_rows_triton(x, dtype, norm=shape.norm())
    bias = shape.empty(of_all) if decoder.variant.qkv_bias else None
    rounded_linear_triton(normed, weight(of_all, hidden), shape.dtype, bias=bias)
    attended = round_rows_triton(shape.empty(n_rows, of_queries), dtype)
    rounded_linear_triton(attended, weight(hidden, of_queries), shape.dtype, residual=x)
    gate_up = rounded_linear_triton(normed, weight(2 * width, hidden), shape.dtype)
    gated = round_rows_triton(gate_up, dtype, gate=decoder.variant.gate)
    rounded_linear_triton(gated, weight(hidden, width), shape.dtype, residual=x)


def _accept(n: int, depth: int, *, loose: bool = False) -> None:
    """The comparison and the walk; the mask of a loose rule depends on the path, that of others does not."""
    whole, flags = _whole(4, n), torch.empty(4, n, dtype=torch.bool, device=_META)
    log_probs = torch.empty(4, n, device=_META)
    trees = Trees(whole, whole, whole, whole, log_probs, flags, flags, whole, _whole(4))
    comparison = compare_drafts_triton(trees, 31744, 32000, 255)
    mask = torch.empty(4, n if loose else 1, n, dtype=torch.bool, device=_META)
    accept_tree_triton(trees, comparison, mask, whole, depth)


def _within(n: int, depth: int, requests: int) -> None:
    whole, flags, log_probs = _whole(64), torch.empty(64, dtype=torch.bool, device=_META), torch.empty(64, device=_META)
    columns = (whole, whole, whole, whole, log_probs, flags, flags)
    trees = PackedTrees(
        Nodes(*(column[:n] for column in columns)),
        choices=whole[:n],
        positions=_whole(requests),
        rows=_whole(requests, n) if requests > 1 else None,
    )
    ids, unsure = (31744, 32000, 255), torch.empty(64, device=_META)
    for tolerances in (None, _whole(9)):
        accept_within_triton(trees, Within(tolerances, 0, 1), ids, depth)
    accept_within_triton(trees, Within(None, 0, 1, Deferral(0.3, 2, 2, terms=0)), ids, depth, unsure)


def _greedy() -> None:
    greedy_choice_triton(torch.empty(16, 32064, device=_META))


def _uncertainty() -> None:
    for terms in (0, 3):
        uncertainty_triton(torch.empty(64, 151936, device=_META), terms)


def _penalty() -> None:
    ids = _whole(64)
    earlier = EarlierIds(_whole(512), _whole(3, 64))
    for excluded in (None, torch.empty(151936, dtype=torch.bool, device=_META)):
        penalised_choice_triton(torch.empty(64, 151936, device=_META), 1.05, ids, ids, earlier, excluded)


def _expand(k: int, *, window: bool = False, chosen: bool = False, rows: bool = True) -> None:
    """A level in the middle of a tree, and the first."""
    scores = torch.empty(4, 5 * k * k, device=_META)
    considered = Considered(_whole(*scores.shape), scores, _whole(*scores.shape))
    for beam in (None, Beam(_whole(4, k), _whole(4, k), torch.empty(4, k, device=_META), _whole(4, k), _whole(4, k))):
        width = 1 if beam is None else k
        candidates = Candidates(
            _whole(4),
            torch.empty(4, width, 256, device=_META) if rows else None,
            normalised=chosen,
            window=Window(255, _whole(8)) if window else None,
            chosen=(_whole(4, width, k), torch.empty(4, width, k, device=_META)) if chosen else None,
        )
        expand_tree_triton(candidates, beam, considered, _whole(4), k=k, level=1, offset=k)


def _draft_rows(shape: _Shape) -> None:
    """The committed rows, and the second beam after them."""
    hidden = shape.decoder.hidden_size
    angles, tiles = torch.empty(512, shape.decoder.head_dim // 2, device=_META), _whole(4, 6).to(torch.int32)
    states = shape.empty(4, 8, hidden)
    where = DraftSlots(_whole(4), _whole(4), _whole(4), _whole(4), _SLOT_ROWS, angles, angles, states[0], 1.0)
    chain_rows_triton(where, states, states, tiles)
    beam = Beam(_whole(4, 8), _whole(4, 8), angles[:4, :8], _whole(4, 8), _whole(4, 16))
    before = shape.empty(4, 8, 2 * hidden)
    beam_rows_triton(where, beam, states, before, tiles)
    gather_rows_triton(states[0], _whole(4), states[1, :4], (states[2], states[3]), (states[2], states[3]))


def _finish(k: int, levels: int, nodes: int) -> None:
    scores = torch.empty(4, k + (levels - 1) * k * k, device=_META)
    considered = Considered(_whole(*scores.shape), scores, _whole(*scores.shape))
    finish_tree_triton(considered, _whole(4), _whole(4), k=k, levels=levels, max_nodes=nodes)


def _grow(k: int, levels: int, ids: int, *, window: bool = False) -> None:
    states, tokens = (torch.empty(shape, device=_META) for shape in ((4, levels, levels, ids), (levels, ids, ids)))
    logits = PathLogits(states, tokens, _whole(4), window=Window(255, _whole(8)) if window else None)
    grow_tree_triton(logits, _whole(4), _whole(4), _whole(4), k=k, max_nodes=64)


LAUNCHES: dict[str, Callable[[], object]] = {
    "the trial, bf16": partial(try_product, _META, torch.bfloat16),
    "the trial, fp32": partial(try_product, _META, torch.float32),
    "greedy_choice": _greedy,
    "repetition_penalty": _penalty,
    "uncertainty": _uncertainty,
    "accept_within, one node": partial(_within, 1, 0, 1),
    "accept_within, 16 nodes": partial(_within, 16, 7, 1),
    "accept_within, 16 nodes, packed": partial(_within, 16, 7, 4),
    "accept_within, 64 nodes, packed": partial(_within, 64, 7, 4),
    "accept_within, a chain of 64": partial(_within, 64, 63, 1),
    "expand_tree, likeliest 8 of 256": partial(_expand, 8),
    "expand_tree, likeliest 64 of 256": partial(_expand, 64),
    "expand_tree, window mass": partial(_expand, 8, window=True),
    "expand_tree, window mass, 64 children": partial(_expand, 64, window=True),
    "expand_tree, window mass or text": partial(_expand, 8, window=True, chosen=True),
    "expand_tree, chosen": partial(_expand, 8, chosen=True, rows=False),
    "finish_tree, 16 nodes": partial(_finish, 8, 5, 16),
    "finish_tree, 64 nodes": partial(_finish, 8, 5, 64),
    "finish_tree, a chain": partial(_finish, 1, 63, 64),
    "finish_tree, 64 children": partial(_finish, 64, 2, 64),
    "grow_tree, likeliest 8 of 256": partial(_grow, 8, 5, 256),
    "grow_tree, likeliest 8 of 1024": partial(_grow, 8, 5, 1024),
    "grow_tree, likeliest 64 of 256": partial(_grow, 64, 2, 256),
    "grow_tree, a chain": partial(_grow, 1, 63, 256),
    "grow_tree, window mass": partial(_grow, 8, 5, 256, window=True),
    "accept_tree, one node": partial(_accept, 1, 0),
    "accept_tree, 16 nodes": partial(_accept, 16, 7),
    "accept_tree, 64 nodes": partial(_accept, 64, 7),
    "accept_tree, a chain of 64": partial(_accept, 64, 63),
    "vision bf16": partial(_with_every_tile, _vision, torch.bfloat16),
    "vision fp16": partial(_with_every_tile, _vision, torch.float16),
}
for _name, _shape in _SHAPES.items():
    LAUNCHES[f"rope_write_kv, {_name}"] = partial(_rope, _shape)
    for _rows in (16, 32, 64):
        LAUNCHES[f"packed_attention, {_name}, {_rows} rows"] = partial(_attention, _shape, _rows, 1)
        LAUNCHES[f"packed_attention, {_name}, {_rows} rows, split"] = partial(_attention, _shape, _rows, 264)
    LAUNCHES[f"draft_rows, {_name}"] = partial(_draft_rows, _shape)
    LAUNCHES[f"norm and gate, {_name}"] = partial(_pointwise, _shape)
    if _shape.dtype.itemsize == 2:
        for _rows in (1, 32, 64):  # of which a tile has 16, 32 and 64, as it has of a prompt
            LAUNCHES[f"products of {_rows} rows, {_name}"] = partial(_with_every_tile, _layer_products, _shape, _rows)
            for _format in LARGEST:
                _kind = str(_format).removeprefix("torch.")
                _launch = partial(_with_every_tile, _rounded, _shape, _format, _rows)
                LAUNCHES[f"{_kind}, {_rows} rows, {_name}"] = _launch
    LAUNCHES[f"commit_kv, {_name}, action"] = partial(_commit, _shape, 8)
    LAUNCHES[f"commit_kv, {_name}, text"] = partial(_commit, _shape, 64)


_LONGEST = max(map(len, LAUNCHES)) + 2
# Compute capability: a name, and shared memory per block in bytes (CUDA C++ programming guide, technical specifications
# per compute capability).
DEVICES = {
    87: ("AGX Orin", 163 << 10),
    90: ("H100, H200", 227 << 10),
    110: ("Jetson Thor", 227 << 10),  # also CUTLASS, SMEM_CAPACITY_MAP
    120: ("RTX 5090", 99 << 10),
}
# Of a program's registers some may be stored before a loop and loaded behind it, once each: Triton 3.6 has two to four
# of them in attention, eight on Thor. In a loop they would be moved for every tile.
_MOST_PARKED = {capability: 32 if capability == 110 else 16 for capability in DEVICES}


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes of a device.

    Args:
        registers: per thread.
        spilled: bytes of the thread's stack and local memory: registers that did not fit.
        looped: whether a loop stores or loads any of them.
        shared: bytes of shared memory per block.
    """

    registers: int
    spilled: int
    looped: bool
    shared: int

    def fault(self, capability: int) -> str:
        """What is wrong with it on a device; empty where nothing is."""
        limit = DEVICES[capability][1]
        faults = []
        if self.looped or self.spilled > _MOST_PARKED[capability]:
            faults.append(f"{self.spilled} bytes spilled{' in a loop' if self.looped else ''}")
        if self.shared > limit:
            faults.append(f"{self.shared} bytes of shared memory, the device has {limit}")
        return ", ".join(faults)


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled as one launch asks for it.

    Args:
        launch: what was launched.
        kernel: its function.
        hash: of what it was compiled from; launches that ask for the same kernel share it.
        capability: of the device, as in sm_90.
        usage: of the device.
    """

    launch: str
    kernel: str
    hash: str
    capability: int
    usage: Usage

    def __str__(self) -> str:
        """A row of the table."""
        place = f"{self.launch:<{_LONGEST}}{self.kernel.lstrip('_'):<18}sm_{self.capability:<5}"
        usage = f"{self.usage.registers:>10}{self.usage.spilled:>9}{self.usage.shared:>8}"
        return f"{place}{usage}  {self.usage.fault(self.capability)}".rstrip()


class _NoDevice:
    """A driver that names a target and has no device; one device number per target keeps their caches apart."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compiling_for(capability: int) -> Iterator[list[Any]]:
    """Launches inside compile, and nothing runs; yields what they compiled.

    It reaches into Triton, whose version requirements/test.txt pins; `triton.compile` would need every kernel's
    signature and alignment written down a second time.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, **(kwargs | {"warmup": True})))
        return compiled[-1]

    JITFunction.run = compile_only
    driver.set_active(_NoDevice(capability))
    try:
        yield compiled
    finally:
        JITFunction.run = run


def compile_launch(name: str, capability: int) -> list[Compiled]:
    """Compiles the kernels of one of `LAUNCHES` for one device, with the arguments that the launch gives them."""
    with _compiling_for(capability) as kernels:
        LAUNCHES[name]()
    distinct = {kernel.hash: kernel for kernel in kernels}.values()
    return [Compiled(name, kernel.metadata.name, kernel.hash, capability, _usage(kernel)) for kernel in distinct]


_usages: dict[str, Usage] = {}  # by the kernel's hash


def _usage(kernel: Any) -> Usage:
    if kernel.hash not in _usages:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(kernel.asm["cubin"])
            cubin.flush()
            told = _told("cuobjdump", "-res-usage", cubin.name)
            found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
            spilled = found["STACK"] + found["LOCAL"]
            looped = bool(spilled) and spills_in_loop(_told("nvdisasm", "-c", cubin.name))
        _usages[kernel.hash] = Usage(found["REG"], spilled, looped, kernel.metadata.shared)
    return _usages[kernel.hash]


def _told(tool: str, *arguments: str) -> str:
    """By a program of CUDA's that Triton brings."""
    return subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=True).stdout


def _tool(name: str) -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def spills_in_loop(listing: str) -> bool:
    """Whether an instruction that touches local memory can be reached from itself.

    A branch backwards alone is no loop: waits stand behind the program's end and jump back into it.

    Args:
        listing: of the machine's instructions, as nvdisasm writes it.
    """
    lines = listing.splitlines()
    labels = {line.strip()[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\s*\.L\w+:", line)}

    def following(at: int) -> list[int]:
        target = re.search(r"\b(?:BRA|CALL)\b.*?(\.L\w+)", lines[at])
        places = [labels[target[1]]] if target and target[1] in labels else []
        ends = re.search(r"\*/\s+(EXIT|RET|BRA\s+`)", lines[at])  # without a predicate
        return places if ends or at + 1 == len(lines) else [*places, at + 1]

    def reaches_itself(at: int) -> bool:
        seen, waiting = set[int](), following(at)
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                waiting += following(place)
        return at in seen

    return any(reaches_itself(at) for at, line in enumerate(lines) if re.search(r"\b(STL|LDL)\b", line))


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; 1 where a kernel does not fit its device."""
    parser = argparse.ArgumentParser(prog="make kernels", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words that a launch's name with its sm_ must hold")
    parser.add_argument("--models", nargs="*", default=[*DECODERS], choices=[*DECODERS], help="all unless given")
    given = parser.parse_args(arguments)
    words, left_out = given.only, {*DECODERS} - {*given.models}
    if not HAS_TRITON:
        sys.exit("compile: Triton is not installed, see requirements/test.txt")
    if "TRITON_INTERPRET" in os.environ:
        sys.exit("compile: unset TRITON_INTERPRET, an interpreted kernel cannot be compiled")
    print(f"Triton {triton.__version__}")
    print(f"{'launch':<{_LONGEST}}{'kernel':<18}{'device':<8}{'registers':>10}{'spilled':>9}{'shared':>8}")
    chosen = [
        (name, capability)
        for capability in _known_devices()
        for name in LAUNCHES
        if all(word in f"{name} sm_{capability}" for word in words)
        and not any(model in name for model in left_out)
        and ("float8" not in name or capability >= 89)  # Ada's
    ]
    made: list[Compiled] = []
    with ProcessPoolExecutor() as pool:
        for kernels in pool.map(compile_launch, *zip(*chosen, strict=True)):
            made += kernels
            print(*kernels, sep="\n", flush=True)
    distinct = {kernel.hash: kernel for kernel in made}.values()
    if parked := sum(bool(kernel.usage.spilled) for kernel in distinct):
        print(f"{parked} kernels have registers in memory; a few outside of loops may be")
    faults = sum(bool(kernel.usage.fault(kernel.capability)) for kernel in distinct)
    print(f"{len(distinct)} kernels compiled, for {len(made)} of launches; {faults} do not fit")
    return 1 if faults else 0


def _known_devices() -> Iterator[int]:
    for capability in DEVICES:
        assembler = "ptxas-blackwell" if capability >= 100 and _tool("ptxas-blackwell").exists() else "ptxas"
        if f"'sm_{capability}'" in _told(assembler, "--help"):
            yield capability
        else:
            print(f"sm_{capability} is left out: the {assembler} of Triton {triton.__version__} does not know it")


if __name__ == "__main__":
    sys.exit(main())
