# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own weight files (.bin, .pt), read with `weights_only`: tensors and plain values, no code."""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specvla_ros.errors import UserError


def read_pickled(path: Path) -> dict[str, Any]:
    """Reads the dictionary in a file, with memory-mapped tensors if the format allows.

    Raises UserError if it is missing, damaged, not a dictionary, or contains more than tensors and plain values.
    """
    try:
        value = _load(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; copy it from the source of the others") from None
    except Exception as error:  # a damaged file raises nearly anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{path} cannot be read as weights: it is damaged or contains more than tensors ({reason}); download this "
            "file again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path} contains a {type(value).__name__} instead of named weights; download this file again")
    return value


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about storages; it only shows that the file is old
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # files from before 2020 cannot be memory-mapped
            return torch.load(path, map_location="cpu", weights_only=True)


def copy_weights(
    given: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    path: Path,
    progress: Callable[[str, float], None] = lambda *_: None,
    *,
    unused: str = r"(?!)",
) -> None:
    """Copies each wanted tensor from the given one of the same name, read from the file `path`.

    `unused`: regular expression of names that may be given although the model never uses them.

    Raises UserError if a tensor is missing, has another shape or is not floating-point, or if others are given.
    """
    extra = sorted(name for name in given.keys() - wanted.keys() if not re.fullmatch(unused, name))
    if extra:
        raise UserError(
            f"{path} contains {extra[0]}, which this policy does not have, and {len(extra) - 1} more such tensors: it "
            "was saved from a model other than the one described by the files next to it"
        )
    for done, (name, tensor) in enumerate(wanted.items(), 1):
        found = given.get(name)
        if found is None or found.shape != tensor.shape or not found.is_floating_point():
            has = "no such tensor" if found is None else f"one of shape {list(found.shape)}"
            raise UserError(f"{path}: {name} must have shape {list(tensor.shape)}, but there is {has}")
        tensor.copy_(found)
        progress(f"reading {path.name}", done / len(wanted))


def tensors_in(value: Any, path: Path, where: str = "") -> dict[str, Tensor]:
    """Returns a value found at `where` in the file `path` as a state dictionary; UserError if it is not one."""
    if not isinstance(value, dict) or not all(isinstance(each, Tensor) for each in value.values()):
        place = f" as {where}" if where else ""
        raise UserError(f"{path} has no named weights{place}: it contains no tensors by name; download this file again")
    return value
