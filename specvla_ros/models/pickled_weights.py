# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own weight files (.bin, .pt), read with `weights_only`: tensors and plain values, nothing that acts."""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specvla_ros.errors import UserError


def read_pickled(path: Path) -> dict[str, Any]:
    """The dictionary in a file, its tensors mapped from it where the format allows.

    UserError if it is missing, damaged, holds anything but tensors and plain values, or is no dictionary.
    """
    try:
        value = _load(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; copy it from where the others are from") from None
    except Exception as error:  # a damaged file raises nearly anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{path} cannot be read as weights: it is damaged or holds more than tensors ({reason}); download this "
            "file again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__} in place of named weights; download this file again")
    return value


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of storages, which only says how old a file is
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # files of before 2020 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)


def copy_weights(
    given: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    path: Path,
    progress: Callable[[str, float], None] | None = None,
    *,
    unused: str = r"(?!)",
) -> None:
    """Copies each wanted tensor from the given one of its name in the file `path`.

    `unused`: regular expression of names that may be given and are not wanted: of what is never computed.

    UserError if one is missing, or has another shape or no floating-point values; or if others are given.
    """
    extra = sorted(name for name in given.keys() - wanted.keys() if not re.fullmatch(unused, name))
    if extra:
        raise UserError(
            f"{path} holds {extra[0]}, for which this policy has no place, and {len(extra) - 1} more such tensors: it "
            "was saved from another model than the files beside it describe"
        )
    for done, (name, tensor) in enumerate(wanted.items(), 1):
        found = given.get(name)
        if found is None or found.shape != tensor.shape or not found.is_floating_point():
            has = "no such tensor" if found is None else f"one of shape {list(found.shape)}"
            raise UserError(f"{path}: {name} must have shape {list(tensor.shape)}, and there is {has}")
        tensor.copy_(found)
        if progress is not None:
            progress(f"reading {path.name}", done / len(wanted))


def tensors_in(value: Any, path: Path, where: str = "") -> dict[str, Tensor]:
    """The state dictionary in a value at place `where` of the file `path`; UserError if it is none."""
    if not isinstance(value, dict) or not all(isinstance(each, Tensor) for each in value.values()):
        place = f" as {where}" if where else ""
        raise UserError(f"{path} has no named weights{place}: it holds no tensors by name; download this file again")
    return value
