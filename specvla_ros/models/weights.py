# SPDX-License-Identifier: Apache-2.0
"""Weights between safetensors files and a model's tensors, shard by shard."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.config import read_json

Progress = Callable[[str, float], None]

# A shard is mapped into memory to be read. It is mapped anew after this many values, so that pages already copied are
# given back: a single-file checkpoint would otherwise be in memory twice at the end of the load. 32 MiB in float32.
_REMAP_VALUES = 8 << 20


def load_weights(directory: Path, tensors: Mapping[str, Tensor], progress: Progress | None = None) -> None:
    """Copies a checkpoint's tensors into the model's, converting dtype and moving to the model's device.

    Args:
        directory: holds model.safetensors, or shards with model.safetensors.index.json.
        tensors: destinations by checkpoint name; names in the files that are not here are not read.
        progress: called with what is read and the fraction of the tensors done.

    Raises:
        UserError: a file or tensor is missing, truncated or of another shape. The destinations are then half-filled.
    """
    done = 0
    for path, names in _files(directory, tensors).items():
        for chunk in _chunks(names, tensors):
            _copy(path, chunk, tensors)
            done += len(chunk)
            if progress is not None:
                progress(f"reading {path.name}", done / len(tensors))


def check_files(directory: Path, names: Iterable[str]) -> None:
    """Whether the files that shall hold these tensors are there; reads none of them.

    Raises:
        UserError: one is missing, or the index does not list a tensor.
    """
    _files(directory, names)


def save_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors to one safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _files(directory: Path, names: Iterable[str]) -> dict[Path, list[str]]:
    """Which file holds each tensor."""
    names = list(names)
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if single.exists() and not index.exists():
        return {single: names}
    if not index.exists():
        hint = ""
        if list(directory.glob("*.bin")):
            hint = "; it has .bin weights, which are not supported: convert them to safetensors"
        raise UserError(f"{directory} holds neither model.safetensors nor model.safetensors.index.json{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} has no weight_map; copy the file again")
    missing = [name for name in names if name not in weight_map]
    if missing:
        raise UserError(f"{index} does not list {_some(missing)}: the checkpoint does not fit its config.json")
    files: dict[Path, list[str]] = defaultdict(list)
    for name in names:
        files[directory / weight_map[name]].append(name)
    absent = sorted(path.name for path in files if not path.exists())
    if absent:
        raise UserError(f"{directory} is incomplete: {_some(absent)} missing, of {len(files)} shards; download again")
    return dict(sorted(files.items()))


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


def _copy(path: Path, names: list[str], tensors: Mapping[str, Tensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            missing = [name for name in names if name not in present]
            if missing:
                raise UserError(f"{path} lacks {_some(missing)}: the checkpoint is incomplete or of another model")
            for name in names:
                _check_shape(path, name, file.get_slice(name).get_shape(), tensors[name])
                tensors[name].copy_(file.get_tensor(name))
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged or cut off ({error}); download this file again") from None


def _check_shape(path: Path, name: str, found: list[int], destination: Tensor) -> None:
    if list(found) != list(destination.shape):
        raise UserError(
            f"{path}: tensor {name} has shape {list(found)}, but config.json implies {list(destination.shape)}; "
            "weights and config.json belong to different checkpoints"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
