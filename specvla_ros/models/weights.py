# SPDX-License-Identifier: Apache-2.0
"""Loads weights from safetensors or PyTorch files into a model's tensors, shard by shard."""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.config import ADAPTER_CONFIG, read_checkpoint_json
from specvla_ros.models.lora import LoraAdapter, adapter_of, bare_name, read_adapter
from specvla_ros.models.pickled_weights import read_pickled, tensors_in
from specvla_ros.settings.json_file import shown

_log = logging.getLogger(__name__)
Progress = Callable[[str, float], None]


def no_progress(what: str, fraction: float) -> None:
    """Ignores the progress of loading; the default."""


# File names in transformers' order of preference: the first that exists is read, all others are ignored.
_INDEX = ".index.json"
_CHOICE = ("model.safetensors", f"model.safetensors{_INDEX}", "pytorch_model.bin", f"pytorch_model.bin{_INDEX}")

# A shard is memory-mapped for reading, and mapped again after this many values to release the pages already copied: a
# single-file checkpoint would otherwise be in memory twice at the end of the load. 32 MiB in float32.
_REMAP_VALUES = 8 << 20

_LOOKED_AT = 8  # matrices compared to detect an adapter that was merged before
_FORMATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Formats that can be converted to the model's dtype. Integers, booleans and 8-bit floats are quantised weights: their
# values mean nothing without their scales, which are tensors of other names.
_FLOATS = tuple(_FORMATS.values())
# Names of a quantised weight's parts in bitsandbytes, GPTQ, AWQ, compressed-tensors and fp8 checkpoints.
_SCALES = re.compile(
    r"\.(SCB|weight_format|absmax|quant_map|nested_\w+|quant_state\.\w+|qweight|qzeros|scales|g_idx"
    r"|weight_packed|\w*_scale|\w*_scale_inv|\w*zero_point)\b"
)
_ORIGINAL = "use the original checkpoint; where the family supports it, model.quantization quantises it while loading"


@dataclass(frozen=True)
class Tables:
    """Relation of a checkpoint's output head and embeddings, including its adapter."""

    tied: bool  # they share one table
    stored: Mapping[str, str]  # one name of the two to the other one, under which the files store the same values


def read_tables(directory: Path, embeddings: str, head: str, *, tied: bool) -> Tables:
    """Determines if output head and embeddings are tied, as transformers does and as an adapter was trained.

    If config.json ties them, the files may lack either one. Two that differ are both kept nevertheless, and an adapter
    that changes one of them does not affect the other.

    Args:
        directory: as in `load_weights`.
        embeddings, head: their names in the files.
        tied: the value of config.json.
    """
    if not tied:
        return Tables(tied=False, stored={})
    there = {embeddings, head} & tensor_names(directory)
    if len(there) == 2 and not _same(*(_tensor(directory, name) for name in there)):
        return Tables(tied=False, stored={})
    adapter = read_adapter(directory)
    changed = adapter is not None and (adapter.changes(embeddings) or adapter.changes(head))
    return Tables(not changed, {embeddings: head} if there == {head} else {head: embeddings})


def _tensor(directory: Path, name: str) -> Tensor:
    (path,) = _files(directory, (name,), {})
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _same(one: Tensor, other: Tensor) -> bool:
    """True if both are equal bit for bit."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


def load_weights(
    directory: Path,
    tensors: Mapping[str, Tensor],
    progress: Progress = no_progress,
    *,
    stored: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Copies a checkpoint's tensors into the model's, converting dtype and moving to the model's device.

    Args:
        directory: contains model.safetensors, or shards with model.safetensors.index.json, or the pytorch_model.bin
            equivalents; an adapter next to them is merged. Or a single file of either kind.
        tensors: destinations by checkpoint name; other names in the files are not read.
        progress: called with the current file and the fraction of the tensors done.
        stored: see `Tables`.

    Raises UserError: a file or tensor is missing, truncated, or of another shape or number format. The destinations are
    then partly filled.
    """
    done, adapter = 0, read_adapter(directory)
    for path, names in _files(directory, tensors, stored).items():
        for chunk in _chunks(names, tensors):
            _copy(path, chunk, tensors, stored, adapter)
            done += len(chunk)
            progress(f"reading {path.name}", done / len(tensors))


def check_weights(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    unused: str = "",
    stored: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Checks that the files hold exactly these tensors and an adapter changes no others; reads little but headers.

    Args:
        directory: as in `load_weights`.
        tensors: the model's, by checkpoint name; they may be on the meta device.
        unused: regular expression of other names that the files may contain; the model never uses them.
        stored: see `Tables`.

    Logs that an adapter will be merged, and if the weights seem to contain it already.

    Raises UserError: a tensor is missing, damaged, of another shape or number format, or not in the model described by
    config.json, for instance because that has fewer layers; or the adapter belongs to another model.
    """
    may_be = re.compile(unused or r"(?!)")
    known = {*tensors, *stored, *stored.values()}

    def refuse_others(path: Path, names: Iterable[str]) -> None:
        extra = sorted(name for name in names if name not in known and not may_be.fullmatch(name))
        if any(map(_SCALES.search, extra)):
            raise UserError(f"{path} contains {_some(extra)}: quantised weights are not supported; {_ORIGINAL}")
        if extra:
            raise UserError(
                f"{path} contains {_some(extra)}, which the model of config.json does not have: weights and "
                "config.json belong to different checkpoints; copy both from the same one"
            )

    index = _index(directory)
    files = _files(directory, tensors, stored)
    if index is not None:
        refuse_others(index, _weight_map(index))
    for path, names in files.items():
        with _opened(path) as file:
            refuse_others(path, file.keys())
            _check_tensors(path, file, names, tensors, stored)
    adapter = read_adapter(directory)
    if adapter is not None:
        adapter.check(tensors, may_be)
        _log.warning("%s has an adapter: %s", directory, adapter_of(directory))
        changed = [name for name in tensors if bare_name(name) in adapter.factors][:_LOOKED_AT]
        if adapter.contained_in({name: _tensor(directory, stored.get(name, name)) for name in changed}) > 0.5:
            hint = "%s: its weights seem to have been merged with this adapter before: if so, remove %s and %s"
            _log.warning(hint, directory, ADAPTER_CONFIG, adapter.path.name)


def tensor_names(directory: Path) -> frozenset[str]:
    """The names of all tensors in a checkpoint; reads only headers."""
    return frozenset(tensor_shapes(directory))


def tensor_sizes(directory: Path) -> dict[str, int]:
    """Number of values of each tensor of a checkpoint; reads only headers."""
    return {name: math.prod(shape) for name, shape in tensor_shapes(directory).items()}


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a checkpoint; reads only headers."""
    index = _index(directory)
    files = _files(directory, ("",) if index is None else _weight_map(index), {})
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with _opened(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _files(directory: Path, names: Iterable[str], stored: Mapping[str, str]) -> dict[Path, list[str]]:
    """The names in each file."""
    names = list(names)
    if directory.is_file():
        return {directory: names}
    index = _index(directory)
    if index is None:
        single = _chosen(directory)
        if single is None:
            raise UserError(f"{directory} holds neither {' nor '.join(_CHOICE)}")
        return {single: names}
    weight_map = _weight_map(index)
    missing = [name for name in names if stored.get(name, name) not in weight_map]
    if missing:
        raise UserError(f"{index} does not list {_some(missing)}: the checkpoint does not fit its config.json")
    files: dict[Path, list[str]] = defaultdict(list)
    for name in names:
        files[directory / weight_map[stored.get(name, name)]].append(name)
    absent = sorted(path.name for path in files if not path.exists())
    if absent:
        raise UserError(f"{directory} is incomplete: {_some(absent)} missing, of {len(files)} shards; download again")
    return dict(sorted(files.items()))


def _index(directory: Path) -> Path | None:
    """The index file, which maps tensors to shards; None: there is a single file."""
    chosen = _chosen(directory)
    return chosen if chosen is not None and chosen.name.endswith(_INDEX) else None


def _chosen(directory: Path) -> Path | None:
    return next((directory / name for name in _CHOICE if (directory / name).exists()), None)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_checkpoint_json(index).inner("weight_map").raw
    strange = [file for file in weight_map.values() if not isinstance(file, str) or not _is_file_name(file)]
    if strange:
        raise UserError(f"{index}: weight_map names {shown(strange[0])}, which is not a file next to it; copy it again")
    return weight_map


def _is_file_name(name: str) -> bool:
    """True if a name is a plain file name, not a path, and valid in any file system."""
    return PurePath(name).name == name and len(name) < 256 and name.isprintable()


def _chunks(names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for name in names:
        chunk.append(name)
        size += tensors[name].numel()
        if size >= _REMAP_VALUES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _copy(
    path: Path,
    names: list[str],
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, str],
    adapter: LoraAdapter | None,
) -> None:
    with _opened(path) as file:
        _check_tensors(path, file, names, tensors, stored)
        for name in names:
            weight = file.get_tensor(stored.get(name, name))
            tensors[name].copy_(weight if adapter is None else adapter.merged(name, weight))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if path.suffix in (".bin", ".pt"):
        yield _Pickled(tensors_in(read_pickled(path), path))
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or cut off ({error}); download this file again") from None


@dataclass(frozen=True)
class _Pickled:
    """A PyTorch file with the interface of a safetensors file."""

    tensors: Mapping[str, Tensor]

    def keys(self) -> Iterable[str]:
        return self.tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self.tensors[name])


@dataclass(frozen=True)
class _Slice:
    tensor: Tensor

    def get_shape(self) -> Sequence[int]:
        return self.tensor.shape

    def get_dtype(self) -> str:
        return _FORMATS.get(self.tensor.dtype, str(self.tensor.dtype))


def _check_tensors(
    path: Path, file: Any, names: list[str], tensors: Mapping[str, Tensor], stored: Mapping[str, str]
) -> None:
    present = set(file.keys())
    missing = [name for name in names if stored.get(name, name) not in present]
    if missing:
        raise UserError(f"{path} lacks {_some(missing)}: the checkpoint is incomplete or of another model")
    for name in names:
        found = file.get_slice(stored.get(name, name))
        shape, dtype = list(found.get_shape()), str(found.get_dtype())
        if dtype not in _FLOATS:
            raise UserError(
                f"{path}: tensor {name} has values of format {dtype}, but only {', '.join(_FLOATS)} can be read: they "
                f"are quantised weights or not weights at all; {_ORIGINAL}"
            )
        if shape != list(tensors[name].shape):
            raise UserError(
                f"{path}: tensor {name} has shape {shape}, but config.json implies {list(tensors[name].shape)}; "
                "weights and config.json belong to different checkpoints; copy both from the same one"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
