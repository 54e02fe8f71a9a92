# SPDX-License-Identifier: Apache-2.0
"""Loads a target from a checkpoint directory: selects its family, device and dtype.

A family registers a loader in `TARGETS` under the `model_type` of its config.json. The loader takes the directory and
the keywords of `load_target`, with `device` and `dtype` resolved; the keywords it does not use go to `refuse_options`.
Messages suggest quantisation only if the loader has a parameter `quantization`.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from specvla_ros.errors import UserError
from specvla_ros.models import settings
from specvla_ros.models.config import check_directory, read_checkpoint_json
from specvla_ros.models.quantization import BYTES_PER_WEIGHT, check_quantization
from specvla_ros.models.target import TARGETS, Target
from specvla_ros.models.weights import Progress, no_progress, tensor_sizes

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in settings.DTYPES if name != "auto"}
_USUAL = settings.ModelSettings()
_GIB = 1 << 30
_BESIDE = 1 << 30  # bytes for the KV cache of a few slots, graphs and activations
_QUANTISED = re.compile(r"\blayers\.\d+\.(self_attn|mlp)\.\w+\.weight$")  # decoder weights, by checkpoint name


def load_target(
    directory: str | Path,
    *,
    device: str = _USUAL.device,
    dtype: str = _USUAL.dtype,
    unnorm_key: str = _USUAL.unnorm_key,
    center_crop: bool = _USUAL.center_crop,
    quantization: str = _USUAL.quantization,
    quantize_vision: bool = _USUAL.quantize_vision,
    action_head: bool = _USUAL.action_head,
    prompt: str = _USUAL.prompt,
    cameras: tuple[str, ...] = _USUAL.cameras,
    progress: Progress = no_progress,
) -> Target:
    """Loads a policy from a directory in Hugging Face format.

    Args:
        directory: holds config.json, safetensors weights, preprocessor_config.json and tokenizer.json.
        device: `auto` (CUDA if available), `cpu`, `cuda` or `cuda:N`.
        dtype: `float32`, `bfloat16`, `float16`; `auto`: float32 on a CPU, bfloat16 on CUDA.
        unnorm_key: dataset whose action statistics to use; empty: the only one.
        center_crop: for checkpoints fine-tuned with image augmentation.
        quantization: format of the decoder layers' matrices, see `check_quantization`.
        quantize_vision: give the vision's matrices the same format.
        action_head: compute only the logits of action tokens, for a policy that answers with nothing else.
        prompt: see `PromptStyle`; `auto`: as config.json says.
        cameras: the robot's cameras among the policy's, for a policy that can run without some.
        progress: called with the current step and the fraction of the tensors read.

    Raises UserError: an invalid directory or argument, before weights are read if possible; or too little device
    memory, with the formats that would fit.
    """
    if not isinstance(directory, str | Path):
        raise UserError(f"a checkpoint must be given as a directory path, got {type(directory).__name__}")
    directory = Path(directory).expanduser()
    load = loader_of(directory)
    on = _device(device)
    chosen = _dtype(dtype, on)
    quantizes = "quantization" in signature(load).parameters
    with explained_shortage(directory, on, chosen, quantization, quantizes=quantizes):
        target: Target = load(
            directory,
            device=on,
            dtype=chosen,
            unnorm_key=unnorm_key,
            center_crop=center_crop,
            quantization=quantization,
            quantize_vision=quantize_vision,
            action_head=action_head,
            prompt=prompt,
            cameras=cameras,
            progress=progress,
        )
    return target


def loader_of(directory: Path) -> Callable[..., Any]:
    """The loader of a checkpoint's family; UserError if the directory holds no checkpoint of a known one."""
    check_directory(directory)
    model_type = model_type_of(directory)
    families = TARGETS.entries()
    if model_type not in families:
        known = ", ".join(f"'{name}'" for name in sorted(families))
        raise UserError(
            f"{directory / 'config.json'}: model_type is {model_type!r}, only {known} checkpoints are supported; "
            "another package can add a family through an entry point"
        )
    return families[model_type].make


def model_type_of(directory: Path) -> str:
    """model_type of config.json; `type` in LeRobot's; native Prismatic files have `vla`, StarVLA runs a config.yaml."""
    run = directory / "config.yaml"
    if not (directory / "config.json").exists() and run.exists() and "\nframework:" in "\n" + run.read_text("utf-8"):
        return "starvla-run"
    config = read_checkpoint_json(directory / "config.json")
    if "model_type" in config.raw:
        return config.text("model_type")
    if "vla" in config.raw:
        return "prismatic-vla"
    return config.text("type" if "type" in config.raw else "model_type")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{name}' is not known; use auto, cpu, cuda or cuda:0")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device '{name}' was requested, but torch {torch.__version__} sees no CUDA GPU; "
            "install a CUDA build of torch, check nvidia-smi, or set device to cpu"
        )
    if device.type == "cuda" and device.index is not None:
        if device.index >= torch.cuda.device_count():
            raise UserError(f"device '{name}' was requested, but there are {torch.cuda.device_count()} CUDA GPUs")
        torch.cuda.set_device(device)  # Triton launches on the thread's current device, wherever the tensors are
    if device.type == "cuda":
        _check_build(device)
    return device


def _check_build(device: torch.device) -> None:
    """Refuses a build of torch that does not run on this GPU."""
    try:
        torch.zeros(1, device=device).add_(1.0).tolist()
    except torch.OutOfMemoryError:
        raise UserError(
            f"{device} has no memory left: stop other processes on it (nvidia-smi lists them), or set device to cpu"
        ) from None
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability(device)
        built = ", ".join(torch.cuda.get_arch_list())
        raise UserError(
            f"torch {torch.__version__} does not run on {torch.cuda.get_device_name(device)}, which is sm_{major}"
            f"{minor} ({str(error).strip().splitlines()[0]}); it was built for {built}: install a build for "
            "this GPU, or set device to cpu"
        ) from None


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise UserError(f"dtype '{name}' is not known; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def explained_shortage(
    directory: Path, device: torch.device, dtype: torch.dtype, quantization: str, *, quantizes: bool
) -> Iterator[None]:
    """Refuses, before and while they are loaded, weights that a GPU has too little memory for.

    The UserError lists the formats that would fit; those of quantisation only if the family's loader `quantizes`.
    """
    if device.type != "cuda":
        yield
        return
    free, _ = torch.cuda.mem_get_info(device)
    weights = _stored_weights(directory)
    formats = ("none", *BYTES_PER_WEIGHT) if quantizes else ("none",)
    refusal = partial(_what_would_fit, directory, weights, device, dtype, quantization, formats, free)
    if weights is not None and weights.bytes_in(dtype, quantization) > free:
        raise UserError(refusal())
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        # A Jetson's allocator raises another class.
        if not (isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)):
            raise
        raise UserError(refusal()) from None


@dataclass(frozen=True)
class _StoredWeights:
    """Numbers of values in a checkpoint's files."""

    layers: int  # in the decoder's matrices, which can be quantised
    others: int

    def bytes_in(self, dtype: torch.dtype, quantization: str) -> float:
        return self.others * dtype.itemsize + self.layers * BYTES_PER_WEIGHT.get(quantization, dtype.itemsize)


def _stored_weights(directory: Path) -> _StoredWeights | None:
    """Reads headers only; None if the files are damaged, which the loader explains, or not in the usual place."""
    try:
        sizes = tensor_sizes(directory)
    except UserError:
        return None
    layers = sum(size for name, size in sizes.items() if _QUANTISED.search(name))
    return _StoredWeights(layers, sum(sizes.values()) - layers)


def _what_would_fit(
    directory: Path,
    weights: _StoredWeights | None,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    formats: Sequence[str],
    free: int,
) -> str:
    has = f"{device} has {free / _GIB:.1f} GiB free"
    if weights is None:
        advice = "" if dtype.itemsize == 2 else "choose dtype bfloat16, "
        return f"{directory}: the weights do not fit; {has}: {advice}stop other processes on it, or use a larger GPU"
    wanted = str(dtype).removeprefix("torch.") + ("" if quantization == "none" else f" with {quantization} layers")
    needed = weights.bytes_in(dtype, quantization)
    text = f"{directory}: the weights take {needed / _GIB:.1f} GiB in {wanted}, but {has}"
    fitting = [
        f"{_parameters(kind, dtype)} ({size / _GIB:.1f} GiB)"
        for kind in formats
        if (size := weights.bytes_in(torch.bfloat16, kind)) < needed and size + _BESIDE <= free and _runs(kind, device)
    ]
    if not fitting:
        return f"{text}, too little for any format: stop other processes on the GPU, or use a larger one"
    return f"{text}: choose {' or '.join(fitting)}, or stop other processes on the GPU"


def _parameters(quantization: str, dtype: torch.dtype) -> str:
    """The parameters to set for a format in bfloat16, instead of `dtype`."""
    changed = [] if dtype == torch.bfloat16 else ["dtype bfloat16"]
    return " with ".join(changed + ([] if quantization == "none" else [f"model.quantization {quantization}"]))


def _runs(quantization: str, device: torch.device) -> bool:
    try:
        check_quantization(quantization, device, torch.bfloat16)
    except UserError:
        return False
    return True


def leave_a_core() -> None:
    """Leaves one CPU core to other processes, such as DDS, a camera or a simulator.

    torch's threads wait for each other, so one that shares its core slows all of them: on two busy cores a 12 ms action
    took 190 ms and more. OMP_NUM_THREADS, if set, takes precedence, as do fewer threads that were set before.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) - 1)))
