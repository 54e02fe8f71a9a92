# SPDX-License-Identifier: Apache-2.0
"""A GPU on which Triton cannot run has its policies decoded on the references, and the reason is said. No GPU here."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from specvla_kernels import device as kernels
from specvla_kernels.device import build_fault, device_fault, operators_on, triton_fault, why_no_kernels

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU in name, with a Triton that may be tried on it."""
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(kernels, "_triton", type("Triton", (), {"__version__": "3.7.1"}), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: pytest.MonkeyPatch.context())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (13, 0))
    why_no_kernels.cache_clear()
    yield
    why_no_kernels.cache_clear()


def tried(monkeypatch: pytest.MonkeyPatch, result: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> str:
    monkeypatch.setattr(kernels, "try_product", lambda *_: result())
    return why_no_kernels(GPU, torch.bfloat16)


def fails() -> tuple[torch.Tensor, torch.Tensor]:
    raise RuntimeError("ptxas fatal: Value 'sm_130' is not defined for option 'gpu-name'\nmore of it")


def test_a_gpu_that_triton_knows_has_kernels(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, lambda: (torch.eye(2), torch.eye(2))) == ""
    assert operators_on(GPU, torch.bfloat16) == "Triton 3.7.1"
    assert why_no_kernels(GPU, torch.float64) == "there are no Triton kernels for float64"


def test_a_gpu_that_triton_does_not_know_has_references_and_says_so_once(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        why = tried(monkeypatch, fails)
        assert why_no_kernels(GPU, torch.bfloat16) == why
    assert why == (
        "Triton 3.7.1 fails on sm_130 in bfloat16: RuntimeError: ptxas fatal: Value 'sm_130' is not defined for option "
        "'gpu-name'"
    )
    assert len(caplog.records) == 1 and why in caplog.text
    assert operators_on(GPU, torch.bfloat16) == f"PyTorch references: {why}"


def test_a_wrong_product_is_no_kernel(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wrong product in bfloat16" in tried(monkeypatch, lambda: (torch.zeros(2, 2), torch.eye(2)))


def test_without_a_compiler_or_headers_nothing_is_tried(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert build_fault() == ""
    monkeypatch.setattr(kernels.sysconfig, "get_paths", lambda _: {"include": str(tmp_path)})
    assert tried(monkeypatch, fails).startswith(f"Triton finds no Python.h in {tmp_path}: apt install python3.")
    monkeypatch.setattr(kernels.shutil, "which", lambda _: None)
    why_no_kernels.cache_clear()
    assert tried(monkeypatch, fails) == "Triton finds no C compiler: apt install gcc, or set CC"
    monkeypatch.setenv("CC", "/not/there -O2")
    assert "no C compiler" in build_fault()


@pytest.mark.parametrize(("version", "good"), [("3.1.0", False), ("2.3", False), ("3.2.0", True), ("3.7.1+git", True)])
def test_an_older_triton_is_refused(version: str, good: bool) -> None:
    assert (triton_fault(version) == "") == good


OLD = """
import sys, types, logging
triton = types.ModuleType("triton")
triton.__version__ = "3.1.0"
sys.modules["triton"] = triton
import torch
import specvla_ros.engine.engine
from specvla_kernels.device import HAS_TRITON, operators_on
print(HAS_TRITON, operators_on(torch.device("cuda", 0), torch.bfloat16))
"""


def test_an_older_triton_is_no_fault_of_the_import() -> None:
    """Its `jit` does not take the kernels' options."""
    done = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False PyTorch references: Triton 3.1.0 is older than 3.2")
    assert "decoding with PyTorch references" in done.stderr


def test_on_a_cpu_nothing_is_said() -> None:
    assert operators_on(torch.device("cpu"), torch.float32) == "" == device_fault(torch.device("cpu"))


def test_a_gpu_that_computes_no_more_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert device_fault(GPU) == (
        "cuda:0 has failed (RuntimeError: CUDA error: an illegal memory access was encountered): restart this "
        "process; nvidia-smi and `dmesg | grep -i xid` show whether the GPU or its driver failed"
    )


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
    ids=["torch", "Jetson"],
)
def test_a_gpu_without_memory_is_not_lost(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "synchronize", full)
    assert device_fault(GPU) == ""
