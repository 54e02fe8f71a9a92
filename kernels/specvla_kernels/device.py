# SPDX-License-Identifier: Apache-2.0
"""Selection of Triton or PyTorch for the operators, and copies from host to device."""

import logging
import os
import re
import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

LEAST_TRITON = (3, 2)  # the first whose `jit` accepts the kernels' options
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the kernels hold no float64 arithmetic


Tile = tuple[int, int, int, int]


class _Annotations:
    """Enough of Triton's language to read a kernel's signature."""

    constexpr = int


def _left_alone(kernel: Any = None, **options: Any) -> Any:
    """Replaces `triton.jit`, which is also called with only options."""
    return kernel if kernel is not None else _left_alone


def _wanted() -> bool:
    interprets = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return interprets or "triton" in sys.modules or torch.cuda.is_available()


def triton_fault(version: str) -> str:
    """Reason why a version of Triton cannot be used; empty if it can."""
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if found >= LEAST_TRITON:
        return ""
    return f"Triton {version} is older than {'.'.join(map(str, LEAST_TRITON))}: install that of torch 2.6 or later"


def build_fault() -> str:
    """Reason why Triton cannot build its kernels' launchers on this machine; empty if it can."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not shutil.which(compiler.split()[0]):
        return "Triton finds no C compiler: apt install gcc, or set CC"
    scheme = sysconfig.get_default_scheme()
    # This scheme does not give the location of Debian's Python headers.
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not (Path(include) / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"Triton finds no Python.h in {include}: apt install python{version}-dev"
    return ""


tl: Any = _Annotations
jit: Any = _left_alone
HAS_TRITON = False
_fault = "Triton is not installed: pip install triton"
if _wanted():
    try:
        _triton = import_module("triton")
        _fault = triton_fault(_triton.__version__)
        if not _fault:
            tl, jit = import_module("triton.language"), _triton.jit
            HAS_TRITON = True
    except Exception as error:  # a broken installation may raise anything
        if not isinstance(error, ModuleNotFoundError) or error.name != "triton":
            _fault = f"Triton cannot be imported: {type(error).__name__}: {error}"


_wanted_here = threading.local()
_distrusted: dict[torch.device, str] = {}


@contextmanager
def references() -> Iterator[None]:
    """Runs the operators of this thread as their PyTorch references, to compare the kernels with them."""
    _wanted_here.references = True
    try:
        yield
    finally:
        _wanted_here.references = False


def distrust_kernels(device: torch.device, fault: str) -> None:
    """Runs a device's operators as their references from now on, because of a fault of its kernels."""
    _distrusted[device] = fault
    why_no_kernels.cache_clear()


def has_kernels(x: Tensor) -> bool:
    """True if the operators run as Triton kernels on such a tensor."""
    if not HAS_TRITON or not x.is_cuda or getattr(_wanted_here, "references", False):
        return False
    return not why_no_kernels(x.device, x.dtype)


@lru_cache
def why_no_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Reason why the operators run as PyTorch references on a device; empty if they run as kernels.

    The first call on a GPU compiles and runs a small kernel: Triton may not support the GPU, or lack a compiler.
    """
    if device.type != "cuda":
        return "kernels run on a GPU"
    if device in _distrusted:
        return _said(_distrusted[device])
    if not HAS_TRITON:
        return _said(_fault)
    if dtype not in _DTYPES:
        return f"there are no Triton kernels for {_name(dtype)}"
    if not torch.cuda.is_available():  # a device in name only: nothing can be tried
        return ""
    return _said(build_fault() or _trial_fault(device, dtype))


def operators_on(device: torch.device, dtype: torch.dtype) -> str:
    """Names the implementation of the operators on a GPU; empty on a CPU."""
    if device.type != "cuda":
        return ""
    why = why_no_kernels(device, dtype)
    return f"PyTorch references: {why}" if why else f"Triton {_triton.__version__}"


def _said(fault: str) -> str:
    if fault:
        _log.warning("decoding with PyTorch references, several times slower than with Triton kernels: %s", fault)
    return fault


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@jit
def _multiply(x, out, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, SIDE)
    places = rows[:, None] * SIDE + rows[None, :]
    tile = tl.load(x + places)
    tl.store(out + places, tl.dot(tile, tile).to(out.dtype.element_ty))


_SIDE = 16


def try_product(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A product on matrix cores, by Triton and by torch."""
    x = torch.eye(_SIDE, dtype=dtype, device=device).flip(0)
    out = torch.zeros_like(x)
    _multiply[(1,)](x, out, SIDE=_SIDE)
    return out, x @ x


def _trial_fault(device: torch.device, dtype: torch.dtype) -> str:
    try:
        with on_device(device):
            found, expected = try_product(device, dtype)
            if torch.equal(found, expected):
                return ""
    except Exception as error:  # from a compiler that does not support the GPU, a linker, or the driver
        major, minor = torch.cuda.get_device_capability(device)
        what = f"Triton {_triton.__version__} fails on sm_{major}{minor} in {_name(dtype)}"
        return f"{what}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return f"Triton {_triton.__version__} computes a wrong product in {_name(dtype)}"


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the calling thread's current device, where Triton launches kernels wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" and torch.cuda.is_available() else nullcontext()


def multiprocessors(device: torch.device) -> int:
    """Number of a GPU's multiprocessors; 1 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def widest(tiles: Sequence[Tile], row_tiles: int, width: int, device: torch.device) -> Tile:
    """The widest tile of a product that leaves no multiprocessor idle; the narrowest if all do.

    Args:
        tiles: the narrowest first, each by columns, depth, stages and warps.
        row_tiles: number of tiles over the rows.
        width: columns of the result.
    """
    least = multiprocessors(device)
    busy = [tile for tile in tiles if row_tiles * -(-width // tile[0]) >= least]
    return busy[-1] if busy else tiles[0]


def device_fault(device: torch.device) -> str:
    """Reason why a device has failed, with a remedy; empty if it works. Waits for the device.

    After an illegal access, a driver time-out or the loss of the GPU, CUDA does not work again in this process.
    """
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).tolist()
    except Exception as error:
        if lacks_memory(error):
            return ""
        reason = (str(error).strip().splitlines() or [""])[0]
        return (
            f"{device} has failed ({type(error).__name__}: {reason}): restart this process; nvidia-smi and "
            "`dmesg | grep -i xid` show whether the GPU or its driver failed"
        )
    return ""


def lacks_memory(error: Exception) -> bool:
    """True for a device that is full, also a Jetson, whose allocator raises another class than torch's own."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def blocks(least: int, most: int) -> list[int]:
    """Block sizes, powers of two, from `least` to the first that is not below `most`."""
    return [1 << bits for bits in range(least.bit_length() - 1, power_of_two(most, least).bit_length())]


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`, for the sides of a kernel's blocks."""
    return max(least, 1 << max(0, n - 1).bit_length())


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copies host numbers, nested as for `torch.tensor`, to a device.

    The memory is pinned: a copy from other memory makes the host wait until the GPU has done all its queued work.
    """
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


_WORD = 8  # bytes


def copy_together(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors to contiguous destinations of their shapes, on one device, in one launch if the dtypes match.

    PyTorch needs a launch for each dtype; viewed as words or bytes, all have the same.
    """
    if not destinations:
        return
    whole = [source.to(to.dtype).contiguous() for to, source in zip(destinations, sources, strict=True)]
    unit = torch.int64 if all(map(_of_words, (*destinations, *whole))) else torch.uint8
    of_unit = [[each.view(-1).view(unit) for each in tensors] for tensors in (destinations, whole)]
    torch._foreach_copy_(of_unit[0], of_unit[1])


def _of_words(tensor: Tensor) -> bool:
    size = tensor.element_size()
    return not (tensor.numel() * size % _WORD or tensor.storage_offset() * size % _WORD)
