# SPDX-License-Identifier: Apache-2.0
"""Quantised matrices of the decoder's layers: w8a8, fp8 and int4 on a CPU are our own, int4 on a GPU is torchao's.

Vision towers and projector are quantised if asked for; a draft head's layer is, where the decoder's products run in 8
bits. Embeddings, norms and output head are not.
"""

import importlib.util
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvla_kernels.device import has_kernels
from specvla_kernels.int8_linear import int8_linear, pack_int8
from specvla_kernels.rounded_linear import Rounded, round_rows, round_weight, rounded_linear
from specvla_ros.errors import UserError
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder, RMSNorm
from specvla_ros.models.settings import QUANTIZATIONS, WeightFormat

ROTATED = WeightFormat.W8A8_HADAMARD.value  # as w8a8, after `rotate_layer`
MATRICES = ("qkv", "out", "gate_up", "down")

# Bytes per weight, including its share of the scales. int4: a scale and a zero in bfloat16 per group of 128, and rows
# padded to a multiple of 1024.
BYTES_PER_WEIGHT = {"int4": 0.55, "w8a8": 1.01, ROTATED: 1.01, "fp8": 1.01}

_INT4_GROUP = 128  # weights that share a scale
_INT4_STEPS = 15
# Minimum compute capability: tensor cores for bfloat16 (Ampere), and for float8 (Ada).
_LEAST_CAPABILITY = {"int4": (8, 0), "fp8": (8, 9)}
_INSTALL = "pip install torchao (0.18 goes with torch 2.13); `specvla doctor` shows what is installed"


class RoundedLinear(nn.Linear):
    """Weights in int8 or float8_e4m3fn, with activations rounded to the same dtype per row; see `rounded_linear`.

    In host memory, only the packed int8 weight is kept if the processor has a product for it.

    Args:
        weight: [out_features, in_features]; in a float64 model its steps are float64, and it is not packed.
        bias: [out_features], not rounded.
    """

    scales: Tensor

    def __init__(self, weight: Rounded, bias: Tensor | None = None) -> None:
        values, scales = weight.values, weight.steps
        super().__init__(values.shape[1], values.shape[0], bias=False, device="meta")
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        packable = values.dtype == torch.int8 and values.device.type == "cpu" and scales.dtype != torch.float64
        self.packed = pack_int8(values, scales.float()) if packable else None
        self.weight = nn.Parameter(values if self.packed is None else values[:0].clone(), requires_grad=False)
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim > 2:
            return self(x.flatten(0, -2)).view(*x.shape[:-1], -1)
        if self.packed is None and (weight := self.rounded) is not None:
            return rounded_linear(round_rows(x, weight.values.dtype), weight, x.dtype, bias=self.bias)
        out = int8_linear(x, self.weight, self.scales) if self.packed is None else self.packed(x)
        return out if self.bias is None else out + self.bias

    @property
    def rounded(self) -> Rounded | None:
        """The weight for kernels that round in the norm and the gate; None for int8 if these do not run."""
        runs = self.weight.dtype != torch.int8 or has_kernels(self.scales)
        return Rounded(self.weight, self.scales) if runs else None


class Int4Linear(nn.Linear):
    """4-bit weights, unpacked for every product: to measure the effect of rounding without a GPU, not for speed.

    Each row's groups of 128 weights are rounded to 16 even steps between their minimum and maximum.
    """

    steps: Tensor
    least: Tensor

    def __init__(self, weight: Tensor) -> None:
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, bias=False, device="meta")
        groups = F.pad(weight, (0, -in_features % _INT4_GROUP)).view(out_features, -1, _INT4_GROUP)
        least, most = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
        steps = ((most - least) / _INT4_STEPS).clamp(min=torch.finfo(weight.dtype).tiny)
        rounded = ((groups - least) / steps).round().to(torch.uint8).view(out_features, -1)
        self.weight = nn.Parameter(rounded[:, ::2] << 4 | rounded[:, 1::2], requires_grad=False)
        self.register_buffer("steps", steps)
        self.register_buffer("least", least)

    def unpacked(self) -> Tensor:
        """The weight [out_features, in_features], in the dtype of the steps."""
        rounded = torch.stack((self.weight >> 4, self.weight & 15), dim=2).view(*self.steps.shape[:2], _INT4_GROUP)
        return (rounded * self.steps + self.least).view(self.out_features, -1)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.unpacked())


def fast_format(model: nn.Module) -> str:
    """The format, w8a8 or fp8, in which a model's products are computed in 8 bits on its device; empty: in none."""
    for module in model.modules():
        if isinstance(module, RoundedLinear) and (module.packed is not None or has_kernels(module.scales)):
            return "w8a8" if module.weight.dtype == torch.int8 else "fp8"
    return ""


class _TorchaoLinear(nn.Linear):
    """A linear layer whose weight is a torchao tensor with its own product."""


def parameter_count(model: nn.Module) -> int:
    """Number of weights of a model; packed ones count by the shape of their matrix."""
    packed = [module for module in model.modules() if isinstance(module, (Int4Linear, RoundedLinear))]
    whole = sum(module.in_features * module.out_features - module.weight.numel() for module in packed)
    return sum(parameter.numel() for parameter in model.parameters()) + whole


def check_quantization(quantization: str, device: torch.device, dtype: torch.dtype, *, vision: bool = False) -> None:
    """Checks that a device can compute with such weights; reads no checkpoint.

    Args:
        quantization: `none`; `int4`: weights only; `w8a8`, `w8a8_hadamard`, `fp8`: weights and activations.
        dtype: of the unquantised part.
        vision: whether the vision is quantised too.

    Raises UserError: unknown quantisation, unsupported on this device or in this dtype, or torchao is missing.
    """
    if quantization not in QUANTIZATIONS:
        raise UserError(f"model.quantization is '{quantization}', but it must be one of: {', '.join(QUANTIZATIONS)}")
    if vision and quantization in ("none", "int4"):
        raise UserError(
            f"model.quantize_vision needs 8 bits, but model.quantization is {quantization}: set it to w8a8, {ROTATED} "
            "or fp8"
        )
    if quantization in _LEAST_CAPABILITY and not (quantization == "int4" and device.type == "cpu"):
        _check_gpu(quantization, device, dtype)
    if quantization == "int4" and device.type != "cpu" and importlib.util.find_spec("torchao") is None:
        raise UserError(f"model.quantization '{quantization}' needs torchao: {_INSTALL}")


def _check_gpu(quantization: str, device: torch.device, dtype: torch.dtype) -> None:
    wanted = f"model.quantization '{quantization}'"
    if device.type != "cuda":
        raise UserError(f"{wanted} needs a CUDA GPU; on a CPU choose w8a8, int4 or none")
    least, found = _LEAST_CAPABILITY[quantization], torch.cuda.get_device_capability(device)
    if found < least:
        other = "w8a8 or int4" if found >= _LEAST_CAPABILITY["int4"] else "w8a8"
        raise UserError(
            f"{wanted} needs compute capability {least[0]}.{least[1]}, but {device} has {found[0]}.{found[1]} "
            f"(an Orin has 8.7): choose {other}"
        )
    if dtype != torch.bfloat16:
        raise UserError(
            f"{wanted} has kernels for bfloat16 only, not for {str(dtype).removeprefix('torch.')}: "
            "set dtype to bfloat16, or choose w8a8"
        )


def quantize_layer(layer: DecoderLayer, quantization: str) -> None:
    """Quantises a layer's matrices in place, one at a time, so that only one is in memory twice.

    Raises UserError if a matrix's shape cannot be quantised, or torchao is missing or too old.
    """
    for name in MATRICES:
        setattr(layer, name, _quantized(getattr(layer, name), quantization))


@torch.no_grad()
def quantize_products(part: nn.Module, quantization: str) -> None:
    """Quantises all linear layers of a part of the model in place, to 8 bits without rotation; biases stay as they are.

    Layers whose widths are not multiples of 8 stay unquantised, since torch's own product on a GPU refuses them.
    """
    for name, matrix in list(part.named_modules()):
        if isinstance(matrix, nn.Linear) and matrix.in_features % 8 == matrix.out_features % 8 == 0:
            part.set_submodule(name, _quantized(matrix, quantization))


def _quantized(matrix: nn.Linear, quantization: str) -> nn.Linear:
    if quantization == "int4":
        return _by_torchao(matrix) if matrix.weight.is_cuda else Int4Linear(matrix.weight)
    kind = torch.int8 if quantization in ("w8a8", ROTATED) else torch.float8_e4m3fn
    return RoundedLinear(round_weight(matrix.weight.detach(), kind), matrix.bias)


def _by_torchao(matrix: nn.Linear) -> nn.Linear:
    """Quantises to int4. Torchao's settings for torch.compile are not changed: nothing is compiled here."""
    for name in ("torchao", "torch.utils._pytree"):  # it warns about extensions for other GPUs
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from torchao import quantization as torchao
    except ImportError as error:
        raise UserError(
            f"model.quantization 'int4' needs torchao, which cannot be imported ({error}): {_INSTALL}"
        ) from None
    try:
        # The tile format of torch's own kernel. HQQ finds scales that lose less than those of minimum and maximum.
        config = torchao.Int4WeightOnlyConfig(
            group_size=_INT4_GROUP,
            int4_packing_format="tile_packed_to_4d",
            int4_choose_qparams_algorithm="hqq",
            set_inductor_config=False,
        )
    except (AttributeError, TypeError) as error:
        raise UserError(f"this torchao is too old for 'int4' ({error}): {_INSTALL}") from None
    shape = list(matrix.weight.shape)
    torchao.quantize_(matrix, config)
    if type(matrix.weight) is nn.Parameter:  # torchao silently leaves what does not fit unchanged
        raise UserError(
            f"a matrix of shape {shape} cannot be quantised as 'int4': set model.quantization to another format, or "
            "none"
        )
    matrix.__class__ = _TorchaoLinear
    return matrix


# Hadamard rotation of the layers (QuaRot, arXiv 2404.00456), which spreads outlier channels before rounding.
#
# Two of its rotations fold into the weights and change only the rounding. The residual stream is rotated: the norms'
# weights are folded into the matrices after them, since rotation keeps a row's norm, and the matrices that read or
# write the stream are rotated with it. Each head's values are rotated too, which the output matrix undoes. The stream
# is rotated where it enters the layers and back where it leaves them, at two products of [hidden, hidden] per forward:
# embeddings, output head, vision and a draft head are unchanged. QuaRot's rotation at run time, of the input of the
# MLP's second matrix, would need another kernel and is left out.


def rotation(size: int) -> Tensor:
    """An orthogonal matrix, float64 [size, size]: a Hadamard matrix with random signs, times a small random one.

    The Hadamard matrix has the size's power of two; the odd factor is a random orthogonal matrix, as in SpinQuant's
    initialisation (arXiv 2405.16406).
    """
    generator = torch.Generator().manual_seed(0)
    odd = size // (size & -size)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < size // odd:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    beside = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64)).Q.contiguous()
    signs = torch.randint(2, (size,), generator=generator) * 2.0 - 1.0
    return torch.kron(hadamard / hadamard.shape[0] ** 0.5, beside) * signs[:, None]


def turn_stream(decoder: PackedDecoder) -> Tensor:
    """Makes the decoder rotate its stream; returns the rotation [hidden, hidden] that `rotate_layer` must apply."""
    assert not decoder.config.deepstack
    wide = torch.promote_types(decoder.dtype, torch.float32)
    turn = rotation(decoder.config.hidden_size).to(decoder.device, wide)
    decoder.turn = turn.to(decoder.dtype)
    return turn


@torch.no_grad()
def rotate_layer(layer: DecoderLayer, turn: Tensor) -> None:
    """Rotates an unquantised layer's matrices in place by `turn`, and folds its norms' weights into them."""
    wide = turn.dtype
    of_head = rotation(layer.head_dim).to(turn)
    for norm, matrix in ((layer.input_norm, layer.qkv), (layer.post_norm, layer.gate_up)):
        assert isinstance(norm, RMSNorm)
        scale = norm.weight.to(wide) + float(norm.unit_offset)
        matrix.weight.copy_(matrix.weight.to(wide) * scale @ turn)
        norm.weight.fill_(0.0 if norm.unit_offset else 1.0)
    for matrix in (layer.out, layer.down):
        matrix.weight.copy_(turn.T @ matrix.weight.to(wide))
    first = (layer.heads + layer.kv_heads) * layer.head_dim
    values = layer.qkv.weight[first:].to(wide).unflatten(0, (layer.kv_heads, -1))
    layer.qkv.weight[first:].copy_((of_head.T @ values).flatten(0, 1))
    if layer.qkv_bias is not None:
        biases = layer.qkv_bias[first:].to(wide).unflatten(0, (layer.kv_heads, -1))
        layer.qkv_bias[first:].copy_((biases @ of_head).flatten())
    attended = layer.out.weight.to(wide).unflatten(1, (layer.heads, -1))
    layer.out.weight.copy_((attended @ of_head).flatten(1))
