# SPDX-License-Identifier: Apache-2.0
"""The memory that a checkpoint's weights need in each format, for a user whose GPU has too little."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from specvla_ros.errors import UserError
from specvla_ros.models.quantization import BYTES_PER_WEIGHT, MATRICES, check_quantization
from specvla_ros.models.weights import tensor_sizes

_GIB = 1 << 30
_BESIDE = 1 << 30  # bytes for the KV cache of a few slots, graphs and activations
_QUANTISED = re.compile(r"\blayers\.\d+\.(self_attn|mlp)\.\w+\.weight$")  # of the decoder, by checkpoint name


@contextmanager
def explained_shortage(directory: Path, device: torch.device, dtype: torch.dtype, quantization: str) -> Iterator[None]:
    """Turns a lack of GPU memory while loading into an error that says which formats would fit.

    Raises:
        UserError: in place of torch's.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        # A Jetson's allocator raises another class.
        if device.type != "cuda" or not (isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)):
            raise
        raise UserError(_what_would_fit(directory, device, dtype, quantization, free)) from None


def _what_would_fit(directory: Path, device: torch.device, dtype: torch.dtype, quantization: str, free: int) -> str:
    sizes = tensor_sizes(directory)
    layers = sum(size for name, size in sizes.items() if _QUANTISED.search(name))
    others = sum(sizes.values()) - layers

    def taken(item: int, kind: str) -> float:
        return others * item + layers * BYTES_PER_WEIGHT.get(kind, item)

    wanted = str(dtype).removeprefix("torch.") + ("" if quantization == "none" else f" with {quantization} layers")
    size = taken(dtype.itemsize, quantization)
    text = (
        f"{directory}: the weights take {size / _GIB:.1f} GiB in {wanted}, but {device} has {free / _GIB:.1f} GiB free"
    )
    fitting = [
        f"{'dtype bfloat16' if kind == 'none' else f'model.quantization {kind}'} ({size / _GIB:.1f} GiB)"
        for kind in ("none", *BYTES_PER_WEIGHT)
        if (size := taken(2, kind)) + _BESIDE <= free and _runs(kind, device)
    ]
    if not fitting:
        return f"{text}, too little for any format: close what else uses the GPU, or take a larger one"
    return f"{text}: choose {' or '.join(fitting)}, or close what else uses the GPU"


def _runs(quantization: str, device: torch.device) -> bool:
    try:
        check_quantization(quantization, device, torch.bfloat16)
    except UserError:
        return False
    return True


def check_memory(model: Any, device: torch.device, quantization: str) -> None:
    """Whether a GPU can hold a model while it is loaded, before anything is.

    Args:
        model: around a `PackedDecoder`, on the meta device.
        device: where the weights go.
        quantization: of the decoder layers' matrices, done layer by layer.

    Raises:
        UserError: it cannot.
    """
    if device.type != "cuda":
        return
    needed = _bytes_needed(model, quantization)
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        fitting = [kind for kind in BYTES_PER_WEIGHT if kind != quantization and _bytes_needed(model, kind) <= free]
        hint = f"model.quantization {' or '.join(fitting)}, " if fitting else ""
        raise UserError(
            f"the weights take {needed / 2**30:.1f} GiB, but {device} has {free / 2**30:.1f} of {total / 2**30:.1f} "
            f"GiB free: end what else runs there, choose bfloat16, {hint}or another device"
        )


def _bytes_needed(model: Any, quantization: str) -> float:
    """While loading: what stays, and one layer that is not quantised yet."""
    whole = sum(parameter.nbytes for parameter in model.parameters())
    if quantization == "none":
        return whole
    layers = [[getattr(layer, name).weight for name in MATRICES] for layer in model.decoder.layers]
    before = sum(weight.nbytes for layer in layers for weight in layer)
    after = sum(weight.numel() for layer in layers for weight in layer) * BYTES_PER_WEIGHT[quantization]
    return whole - before + after + before / len(layers)
