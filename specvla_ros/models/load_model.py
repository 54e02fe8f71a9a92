"""Allocates a model and fills it from a checkpoint, never holding more than a layer beside it."""

from pathlib import Path
from typing import cast

import torch

from specvla_ros.errors import UserError
from specvla_ros.models.config import OpenVLAConfig
from specvla_ros.models.llama import LlamaLayer, head_dtype
from specvla_ros.models.openvla import OpenVLA, layer_tensors
from specvla_ros.models.quantization import BYTES_PER_WEIGHT, MATRICES, quantize_layer
from specvla_ros.models.weights import Progress, check_files, load_weights


def load_model(
    directory: Path,
    config: OpenVLAConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: str = "none",
    progress: Progress | None = None,
) -> OpenVLA:
    """The model of a checkpoint, ready to decode.

    Args:
        directory: of the checkpoint.
        config: what its config.json says.
        device: where the weights go.
        dtype: of what is not quantised; the output head may be of another, see `head_dtype`.
        quantization: of the decoder layers' matrices, one that `check_quantization` let pass.
        progress: called with what is being done and the fraction of it that is done.

    Raises:
        UserError: the device's memory is too small, or the weights are incomplete or do not fit the config.
    """
    with torch.device("meta"):
        model = OpenVLA(config)
    model.to(dtype)
    model.decoder.lm_head.to(head_dtype(dtype, device))
    _check_memory(model, device, quantization)
    if quantization == "none":
        model.to_empty(device=device)
        _tie(model)
        load_weights(directory, model.checkpoint_tensors(), progress)
    else:
        _load_quantized(model, directory, device, quantization, progress)
    return model.eval().requires_grad_(False)


def _load_quantized(
    model: OpenVLA, directory: Path, device: torch.device, quantization: str, progress: Progress | None
) -> None:
    """Allocates, reads and quantises one layer after the other, for a device that could not hold them unquantised."""
    decoder = model.decoder
    check_files(directory, model.checkpoint_tensors())
    for part in (*model.towers, model.projector, decoder.embed_tokens, decoder.norm, decoder.lm_head):
        part.to_empty(device=device)
    _tie(model)
    around = {name: tensor for name, tensor in model.checkpoint_tensors().items() if not tensor.is_meta}
    load_weights(directory, around, _share(progress, 0, len(decoder.layers) + 1))
    for i, module in enumerate(decoder.layers):
        layer = cast(LlamaLayer, module).to_empty(device=device)
        tensors = layer_tensors(layer, decoder.config, f"language_model.model.layers.{i}.")
        load_weights(directory, tensors, _share(progress, i + 1, len(decoder.layers) + 1))
        del tensors  # they hold the unquantised matrices
        quantize_layer(layer, quantization)


def _tie(model: OpenVLA) -> None:
    if model.config.llama.tie_word_embeddings:
        model.decoder.lm_head.weight = model.decoder.embed_tokens.weight


def _share(progress: Progress | None, index: int, parts: int) -> Progress | None:
    """Reports one of several parts as its share of the whole."""
    if progress is None:
        return None
    return lambda what, done: progress(what, (index + done) / parts)


def _check_memory(model: OpenVLA, device: torch.device, quantization: str) -> None:
    if device.type != "cuda":
        return
    needed = _bytes_needed(model, quantization)
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        hint = "a model.quantization, " if quantization == "none" else ""
        raise UserError(
            f"the weights take {needed / 2**30:.1f} GiB, but {device} has {free / 2**30:.1f} of {total / 2**30:.1f} "
            f"GiB free: end what else runs there, choose bfloat16, {hint}or another device"
        )


def _bytes_needed(model: OpenVLA, quantization: str) -> float:
    """While loading: what stays, and one layer that is not quantised yet."""
    whole = sum(parameter.nbytes for parameter in model.parameters())
    if quantization == "none":
        return whole
    layers = [[getattr(layer, name).weight for name in MATRICES] for layer in model.decoder.layers]
    before = sum(weight.nbytes for layer in layers for weight in layer)
    after = sum(weight.numel() for layer in layers for weight in layer) * BYTES_PER_WEIGHT[quantization]
    return whole - before + after + before / len(layers)
