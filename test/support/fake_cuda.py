# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that is not there: the engine runs on it, nothing is computed, and what it would launch is counted.

Tensors are torch's fake ones: they have shapes and a device, and no numbers. What a real device would be asked for is
patched: graphs record what they would replay, kernels written in Triton count as one launch each, and the tick's one
read-back gives the answers of a target that accepts some drafts.

An operator that is no view is counted as one launch, so as torch's fused operators run: some take two.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton  # noqa: F401  (before the kernels: they then are Triton's)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

COPY_IN, READ_BACK, REPLAY, WAIT = "copy to the device", "read-back", "graph", "wait for the device"

_VIEWS = frozenset(  # as they are named in torch's own schemas
    (
        *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "device", "expand", "lift_fresh"),
        *("narrow", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"),
        *("unflatten", "unsqueeze", "view", "view_as"),
    )
)
_MEMORY = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
_READS = frozenset(["_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero"])
_SMS = 132
_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32, torch.bool: np.bool_}


@dataclass
class Launches:
    """What the host asked the device for.

    Attributes:
        sections: by the part of the work that asked, launches by name.
        graphs: by the name of a captured graph, launches in it, by name.
        behind: launches since the last read-back; `copies_behind`: copies to the device since then.
    """

    sections: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    graphs: dict[str, Counter[str]] = field(default_factory=dict)
    section: str = "other"
    behind: int = 0
    copies_behind: int = 0

    def add(self, name: str) -> None:
        """Counts one."""
        self.sections[self.section][name] += 1
        if name == READ_BACK:
            self.behind = self.copies_behind = 0
        self.behind += name not in (READ_BACK, COPY_IN, WAIT)
        self.copies_behind += name == COPY_IN

    def clear(self) -> None:
        """Begins anew; the graphs stay."""
        self.sections.clear()
        self.behind = self.copies_behind = 0

    @contextmanager
    def within(self, section: str) -> Iterator[None]:
        """What is asked for meanwhile belongs to a part of the work."""
        before, self.section = self.section, section
        try:
            yield
        finally:
            self.section = before

    def total(self, *names: str) -> int:
        """Of all sections: those of some names, or all."""
        return sum(n for counts in self.sections.values() for name, n in counts.items() if not names or name in names)


class _Counting(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "prim" or name in _VIEWS or name in _MEMORY:
            return out
        devices = {each.device.type for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)}
        if "cuda" not in devices:
            return out
        if name in _READS:
            name = WAIT
        elif name in ("_to_copy", "copy_") and "cpu" in devices:
            to_device = (args[0] if name == "copy_" else out).device.type == "cuda"
            name = (COPY_IN if _non_blocking(args, kwargs) else WAIT) if to_device else READ_BACK
        self._launches.add(name)
        return out


def _non_blocking(args: Any, kwargs: Any) -> bool:
    return bool((kwargs or {}).get("non_blocking")) or (len(args) > 2 and args[2] is True)


@contextmanager
def fake_cuda(read_back: Callable[[tuple[int, ...]], list[Any]]) -> Iterator[Launches]:
    """A process in which a tensor may be on `cuda`, as long as this lasts.

    Args:
        read_back: what `tolist` of a tensor of a shape gives.
    """
    launches = Launches()
    with ExitStack() as stack:
        for each in _patches(launches, read_back):
            stack.enter_context(each)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Counting(launches))
        yield launches


def _patches(launches: Launches, read_back: Callable[[tuple[int, ...]], list[Any]]) -> Iterator[Any]:
    for name in ("tensor", "zeros", "empty"):
        yield patch.object(torch, name, _without_pinning(getattr(torch, name)))
    yield patch.object(torch.cuda, "get_device_properties", lambda _=None: SimpleNamespace(multi_processor_count=_SMS))
    yield patch.object(torch.cuda, "Event", _Event)
    yield patch.object(torch.cuda, "Stream", _Stream)
    yield patch.object(torch.cuda, "current_stream", _Stream)
    yield patch.object(torch.cuda, "stream", lambda _: nullcontext())
    yield patch.object(Tensor, "record_stream", lambda *_: None)
    yield patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
    # In inference mode operators arrive whole that are made of others.
    yield patch.object(torch.inference_mode, "__enter__", _enter)
    yield patch.object(torch.inference_mode, "__exit__", _exit)

    def run(kernel: Any, *_: Any, grid: Any = None, warmup: bool = False, **__: Any) -> None:
        launches.add(f"triton {kernel.__name__}")

    yield patch.object(JITFunction, "run", run)

    def tolist(tensor: Tensor) -> list[Any]:
        launches.add(READ_BACK)
        return read_back(tuple(tensor.shape))

    yield patch.object(FakeTensor, "tolist", tolist, create=True)
    yield patch.object(Tensor, "numpy", lambda tensor: np.zeros(tuple(tensor.shape), _NUMPY[tensor.dtype]))
    yield patch.object(Tensor, "__getitem__", _getitem(Tensor.__getitem__))
    yield patch.object(Tensor, "__setitem__", _setitem(Tensor.__setitem__))
    yield patch.object(FakeTensor, "__iter__", lambda tensor: iter(tensor.unbind(0)), create=True)
    yield patch.object(Tensor, "view", _view(Tensor.view))
    yield patch.object(Tensor, "__invert__", lambda tensor: torch.bitwise_not(tensor))
    yield patch.object(Tensor, "contiguous", _contiguous)
    yield patch.object(Tensor, "copy_", _copy(Tensor.copy_, launches))
    yield patch.object(torch, "index_select", _index_select(launches))
    fused = torch.nn.functional
    yield patch.object(fused, "rms_norm", _like_first("rms_norm", launches))
    yield patch.object(fused, "layer_norm", _like_first("layer_norm", launches))
    yield patch.object(fused, "scaled_dot_product_attention", _attention(launches))


def _enter(mode: Any) -> None:
    mode.no_grad = torch.no_grad()
    mode.no_grad.__enter__()


def _exit(mode: Any, *error: Any) -> None:
    mode.no_grad.__exit__(*error)


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "_Event") -> float:
        return 1.0


class _Stream:
    def __init__(self, _: Any = None) -> None:
        pass

    def wait_event(self, _: _Event) -> None:
        pass

    def wait_stream(self, _: "_Stream") -> None:
        pass


def _without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A build without CUDA pins no memory."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return make(*args, **kwargs)

    return made


def _like_first(name: str, launches: Launches) -> Callable[..., Tensor]:
    """A fused operator whose result has the shape of what goes in."""

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        launches.add(name)
        return torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)

    return run


def _attention(launches: Launches) -> Callable[..., Tensor]:
    def run(query: Tensor, *_: Any, **__: Any) -> Tensor:
        launches.add("attention")
        batch, heads, rows, dim = query.shape  # laid out as flash attention leaves it
        return torch.empty((batch, rows, heads, dim), dtype=query.dtype, device=query.device).transpose(1, 2)

    return run


# A build without CUDA has no guard for its device: these methods are done without one.


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else torch.clone(tensor, memory_format=torch.contiguous_format)


def _split(tensor: Tensor, index: Any) -> tuple[Tensor, dict[int, Tensor]]:
    """A tensor behind slices and numbers, and what else it is indexed with, by dimension."""
    index = index if isinstance(index, tuple) else (index,)
    given = sum(each is not None and each is not Ellipsis for each in index)
    whole: list[Any] = []
    for each in index:
        whole += [slice(None)] * (tensor.dim() - given) if each is Ellipsis else [each]
    place, tensors = 0, {}
    for each in whole:
        if each is None:
            tensor = tensor.unsqueeze(place)
        elif isinstance(each, int):
            tensor = torch.ops.aten.select.int(tensor, place, each)
            continue
        elif isinstance(each, slice):
            if each != slice(None):
                tensor = torch.ops.aten.slice.Tensor(tensor, place, each.start, each.stop, each.step or 1)
        else:
            tensors[place] = each if isinstance(each, Tensor) else torch.tensor(each)
        place += 1
    return tensor, tensors


def _places(tensors: dict[int, Tensor]) -> list[Tensor | None]:
    return [tensors.get(i) for i in range(max(tensors) + 1)]


def _getitem(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def getitem(tensor: Tensor, index: Any) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return real(tensor, index)
        tensor, tensors = _split(tensor, index)
        return torch.ops.aten.index.Tensor(tensor, _places(tensors)) if tensors else tensor

    return getitem


def _setitem(real: Callable[..., None]) -> Callable[..., None]:
    def setitem(tensor: Tensor, index: Any, value: Any) -> None:
        if not isinstance(tensor, FakeTensor):
            real(tensor, index, value)
            return
        tensor, tensors = _split(tensor, index)
        if tensors:
            torch.ops.aten.index_put_(tensor, _places(tensors), value)
        elif isinstance(value, Tensor):
            tensor.copy_(value)
        else:
            tensor.fill_(value)

    return setitem


def _view(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def view(tensor: Tensor, *shape: Any) -> Tensor:
        dtype = shape[0] if len(shape) == 1 else None
        if not isinstance(tensor, FakeTensor) or not isinstance(dtype, torch.dtype) or dtype == tensor.dtype:
            return real(tensor, *shape)
        last = tensor.shape[-1] * tensor.element_size() // dtype.itemsize
        return torch.empty((*tensor.shape[:-1], last), dtype=dtype, device=tensor.device)

    return view


def _copy(real: Callable[..., Tensor], launches: Launches) -> Callable[..., Tensor]:
    def copy(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not isinstance(tensor, FakeTensor) or tensor.device.type == source.device.type == "cpu":
            return real(tensor, source, non_blocking)
        if source.device.type == "cpu":
            launches.add(COPY_IN if non_blocking else WAIT)
        elif not _same_memory(tensor, source):  # torch leaves a copy onto itself out, as `x[i] += y` makes one
            launches.add("copy_")
        return tensor

    return copy


def _index_select(launches: Launches) -> Callable[..., Tensor]:
    """Into memory that is given, which fake tensors do in two steps."""

    def index_select(_: Tensor, __: int, ___: Tensor, *, out: Tensor) -> Tensor:
        launches.add("index_select")
        return out

    return index_select


def _same_memory(one: Tensor, other: Tensor) -> bool:
    places = [(each.untyped_storage()._cdata, each.storage_offset(), each.stride()) for each in (one, other)]
    return places[0] == places[1]
