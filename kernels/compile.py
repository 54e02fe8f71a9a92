"""Compiles every kernel ahead of time, without a GPU, and fails on spilled registers or too much shared memory.

Each launch of the product is made over tensors without memory, and Triton is told to compile only: so the types,
their alignment and the sizes of blocks are those of the launch itself.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

with suppress(ImportError):
    import triton  # noqa: F401  (the operators take it where somebody has imported it)

from specvla_kernels.jit import HAS_TRITON
from specvla_kernels.launches import LAUNCHES

# Compute capability: a name, and shared memory per block in bytes (CUDA C++ programming guide, technical specifications
# per compute capability).
DEVICES = {87: ("AGX Orin", 163 << 10), 90: ("H100, H200", 227 << 10), 120: ("RTX 5090", 99 << 10)}


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled as one launch asks for it.

    Args:
        launch: what was launched.
        kernel: its function.
        capability: of the device, as in sm_90.
        registers: per thread.
        spilled: bytes of the thread's stack and local memory: registers that did not fit.
        shared: bytes of shared memory per block.
    """

    launch: str
    kernel: str
    capability: int
    registers: int
    spilled: int
    shared: int

    @property
    def fault(self) -> str:
        """What is wrong with it; empty where nothing is."""
        limit = DEVICES[self.capability][1]
        faults = [f"{self.spilled} bytes spilled"] if self.spilled else []
        if self.shared > limit:
            faults.append(f"{self.shared} bytes of shared memory, the device has {limit}")
        return ", ".join(faults)


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


def compile_launch(name: str, launch: Callable[[], object], capability: int) -> list[Compiled]:
    """Compiles the kernels of one launch for one device, with the arguments that the launch gives them."""
    with _compiling_for(capability) as kernels:
        launch()
    return [_examined(name, kernel, capability) for kernel in kernels]


def _examined(launch: str, kernel: Any, capability: int) -> Compiled:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    spilled = found["STACK"] + found["LOCAL"]
    return Compiled(launch, kernel.metadata.name, capability, found["REG"], spilled, kernel.metadata.shared)


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; 1 where a kernel does not fit its device."""
    parser = argparse.ArgumentParser(prog="make kernels", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words that a launch's name with its sm_ must hold")
    words = parser.parse_args(arguments).only
    if not HAS_TRITON:
        sys.exit("compile: Triton is not installed, see requirements/test.txt")
    if "TRITON_INTERPRET" in os.environ:
        sys.exit("compile: unset TRITON_INTERPRET, an interpreted kernel cannot be compiled")
    print(f"{'launch':<44}{'kernel':<18}{'device':<8}{'registers':>10}{'spilled':>9}{'shared':>8}")
    faults = kernels = 0
    for capability in DEVICES:
        for name, launch in LAUNCHES.items():
            if all(word in f"{name} sm_{capability}" for word in words):
                for made in compile_launch(name, launch, capability):
                    print(_line(made), flush=True)
                    kernels += 1
                    faults += bool(made.fault)
    print(f"{kernels} kernels compiled, {faults} do not fit")
    return 1 if faults else 0


def _line(made: Compiled) -> str:
    place = f"{made.launch:<44}{made.kernel.lstrip('_'):<18}sm_{made.capability:<5}"
    return f"{place}{made.registers:>10}{made.spilled:>9}{made.shared:>8}  {made.fault}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
