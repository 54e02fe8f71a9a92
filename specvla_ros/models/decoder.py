# SPDX-License-Identifier: Apache-2.0
"""One decoder for Llama, Qwen2, Qwen3 and Gemma, written around the packed forward; `DecoderShape` selects one."""

from collections.abc import Callable
from functools import cache, partial
from itertools import islice
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvla_kernels.fused_linear import linear
from specvla_kernels.gated_unit import GATES
from specvla_kernels.layer_products import Matrix, gated_mlp, normed_product, product_to_add
from specvla_kernels.layout import PackedLayout
from specvla_kernels.packed_attention import packed_attention
from specvla_kernels.rmsnorm_residual import RowNorm, rmsnorm_reference
from specvla_kernels.rope_write_kv import rope_write_kv
from specvla_ros.models.compiled_layers import CompiledLayers, are_compilable, compile_layers
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.target import ForwardResult as ForwardResult


def head_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the output head, so that logits are at least float32.

    A half-precision head needs a product that accumulates into float32, which torch has on CUDA since 2.8; elsewhere
    the head is kept in float32 (0.5 GB for OpenVLA-7B).
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return dtype
    accumulates = device.type == "cuda" and "dtype" in torch.ops.aten.mm.overloads()
    return dtype if accumulates else torch.float32


Model = TypeVar("Model", bound=nn.Module)


def empty_model(make: Callable[[], Model], dtype: torch.dtype, device: torch.device) -> Model:
    """Makes a model around a `PackedDecoder` on the meta device: shapes and dtypes, but no memory for weights.

    The output head may have another dtype, see `head_dtype`; `device` is the weights' later device.
    """
    with torch.device("meta"):
        model = make()
    model.to(dtype)
    decoder_of(model).lm_head.to(head_dtype(dtype, device))
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocates an empty model's weights, with undefined values."""
    model.to_empty(device=device)
    tie_head(decoder_of(model))


def tie_head(decoder: "PackedDecoder") -> None:
    """Ties the output head to the embeddings if the config says so."""
    if decoder.config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight


def decoder_of(model: nn.Module) -> "PackedDecoder":
    """The decoder in a model, or the model itself."""
    decoder: Any = getattr(model, "decoder", model)
    return cast(PackedDecoder, decoder)


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    """Rounds a number to a dtype, which makes a tensor the first time only: no CUDA graph can capture that."""
    return float(torch.tensor(value, dtype=dtype))


class RMSNorm(nn.Module):
    """Root mean square norm of rows; with `unit_offset` it scales by 1 + weight, as in Gemma."""

    def __init__(self, dim: int, eps: float, *, unit_offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.unit_offset = unit_offset

    @property
    def row_norm(self) -> RowNorm:
        """The norm's parameters for the kernels, which have no backward pass."""
        return RowNorm(self.weight, self.eps, self.unit_offset)

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm_reference(x, self.row_norm)


class _Embedding(nn.Embedding):
    """Token embeddings, scaled as in Gemma; padded with zeros where image rows have DeepStack features."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape.vocab_size, shape.hidden_size)
        self.scaled = shape.variant.scaled_embeddings
        self.beside = shape.input_size - shape.hidden_size

    def forward(self, ids: Tensor) -> Tensor:
        embeddings = super().forward(ids)
        if self.beside:
            return F.pad(embeddings, (0, self.beside))
        if not self.scaled:
            return embeddings
        return embeddings * self.scale

    @property
    def scale(self) -> float:
        """Scale factor, rounded to the embeddings' dtype as in transformers."""
        return _rounded(self.embedding_dim**0.5, self.weight.dtype) if self.scaled else 1.0


def _matrix(module: nn.Linear) -> Matrix:
    """The layer's weight, plain or `rounded`; other quantised classes provide their own product."""
    return module.weight if type(module) is nn.Linear else getattr(module, "rounded", None) or module


class DecoderLayer(nn.Module):
    """Pre-norm attention and a gated MLP. q, k, v form one matrix, gate and up another: fewer and larger reads.

    Without `input_norm` there is no norm before the attention, as in EAGLE's draft layer.
    """

    def __init__(self, config: DecoderShape, *, input_norm: bool = True) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, dim
        norm = partial(RMSNorm, eps=config.rms_norm_eps, unit_offset=config.variant.unit_offset_norms)
        self.input_norm: RMSNorm | nn.Identity = norm(hidden) if input_norm else nn.Identity()
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * dim, bias=False)
        # Separate from the matrix, since a quantised matrix has no bias.
        self.qkv_bias = nn.Parameter(torch.empty(self.qkv.out_features)) if config.variant.qkv_bias else None
        self.q_norm: RMSNorm | None = norm(dim) if config.variant.qk_norm else None
        self.k_norm: RMSNorm | None = norm(dim) if config.variant.qk_norm else None
        self.out = nn.Linear(self.heads * dim, hidden, bias=False)
        self.post_norm = norm(hidden)
        self.gate_name = config.variant.gate
        self.gate = GATES[config.variant.gate]
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: PackedLayout, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Maps rows [n_rows, hidden] to the same shape; see `PackedDecoder.forward` for the other arguments."""
        return self.mlp(*self.attention(x, cos, sin, layout, keys, values))

    def attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: PackedLayout, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Maps rows [n_rows, hidden] to the same shape, and to what the MLP's norm must still add to it, if any."""
        q = self.write_kv(x, cos, sin, layout.kv_rows, keys, values)
        attended = packed_attention(q, keys, values, layout)
        return product_to_add(attended.flatten(1), _matrix(self.out), x)

    def write_kv(self, x: Tensor, cos: Tensor, sin: Tensor, kv_rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Writes the rows' keys and values into the cache and returns their queries [n_rows, heads, head_dim]."""
        q, k, v = self._queries_keys_values(x)
        return rope_write_kv(q, k, v, cos, sin, kv_rows, keys, values)

    def products(self, x: Tensor) -> Tensor:
        """See `PackedDecoder.products`."""
        q, *_ = self._queries_keys_values(x)
        return self.mlp(*product_to_add(q.flatten(1), _matrix(self.out), x))

    def _queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norm = self.input_norm.row_norm if isinstance(self.input_norm, RMSNorm) else None
        return self.split_heads(normed_product(x, norm, _matrix(self.qkv), self.qkv_bias))

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits [..., (heads + 2 kv_heads) head_dim] into queries [..., heads, head_dim], keys and values."""
        heads = qkv.view(*qkv.shape[:-1], -1, self.head_dim)
        q, k, v = heads.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def mlp(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """The sum of x [n_rows, hidden], `added` if any, and the MLP's output for that sum."""
        gate_up, down = _matrix(self.gate_up), _matrix(self.down)
        return gated_mlp(x, added, self.post_norm.row_norm, gate_up, down, self.gate_name)


class PackedDecoder(nn.Module):
    """A language model from embeddings to logits, over a KV cache.

    Logits are at least float32, so that rounding to half precision creates no ties; see `head_dtype`.

    Attributes:
        head_ids: the only ids whose logits are computed, all others being -inf; None: all ids.
        turn: orthogonal rotation of the residual stream in the layers, [hidden, hidden]; None: no rotation.
        compiled: runs the layers for small trees; None: they run themselves. See `compile_layers`.
    """

    def __init__(self, config: DecoderShape) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _Embedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, unit_offset=config.variant.unit_offset_norms)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head_ids: range | None = None
        self.turn: Tensor | None
        self.register_buffer("turn", None, persistent=False)
        self.compiled: CompiledLayers | None = None
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._axes: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations; the head's may differ."""
        return self.norm.weight.dtype

    def forward(
        self, embeddings: Tensor, layout: PackedLayout, wanted_rows: Tensor, keys: Tensor, values: Tensor
    ) -> ForwardResult:
        """One pass of all segments through all layers.

        Args:
            embeddings: [n_rows, input_size], each row's embedding and its DeepStack features.
            layout: location of the segments.
            wanted_rows: int64 [n_wanted], rows whose logits are computed.
            keys, values: [layers, slots, slot_rows, kv_heads, head_dim]; the rows' keys and values are written to them.
        """
        hidden = self.hidden_states(embeddings, layout, keys, values)
        wanted = hidden if len(wanted_rows) == len(hidden) else hidden[wanted_rows]
        return ForwardResult(self.logits(wanted), hidden)

    def hidden_states(
        self, embeddings: Tensor, layout: PackedLayout, keys: Tensor, values: Tensor, *, layers: int | None = None
    ) -> Tensor:
        """Runs the first `layers` (None: all) and the final norm, giving [n_rows, hidden]; arguments as in `forward`.

        The kernels read only the layout's tensors and attention plan, not its spans.
        """
        cos, sin = self.rotation(layout.positions)
        x, *features = embeddings.split(self.config.hidden_size, dim=1)
        x = x if self.turn is None else x @ self.turn
        compiled = self.compiled and self.compiled.forward_of(layout, cos, sin, keys, values)
        for i, layer in enumerate(islice(self.layers, layers)):
            x = compiled(i, x) if compiled else layer(x, cos, sin, layout, keys[i], values[i])
            if i < len(features):
                x = x + features[i]
        hidden: Tensor = self.norm(x if self.turn is None else x @ self.turn.T)
        return hidden

    def compile_layers(self) -> None:
        """See `compiled_layers.compile_layers`; nothing if layers of this kind cannot be compiled, or are already."""
        if self.compiled is None and are_compilable([*self.layers]):
            self.compiled = compile_layers([*self.layers])

    def products(self, x: Tensor) -> Tensor:
        """See `Decoder`; uses the first layer."""
        out: Tensor = cast(DecoderLayer, self.layers[0]).products(x)
        return out

    def logits(self, hidden: Tensor, ids: range | None = None) -> Tensor:
        """Logits, float32 [n, vocab], of hidden states [n, hidden] after the final norm; float64 in a float64 model.

        With `head_ids`, only their rows of the output head are read; a hidden state with a NaN still gives NaN.
        `ids` limits the result to these ids, [n, len(ids)].
        """
        if ids is not None:
            return self.output_products(hidden, self.lm_head.weight[ids.start : ids.stop])
        if self.head_ids is None:
            return self.output_products(hidden, self.lm_head.weight)
        known = self.logits(hidden, self.head_ids)
        logits = known.new_full((hidden.shape[0], self.config.vocab_size), -torch.inf)
        logits[:, self.head_ids.start : self.head_ids.stop] = known
        return logits

    def output_products(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Products of hidden states with rows of an output head, in the dtype of `logits`."""
        kept = head_dtype(weight.dtype, weight.device)
        if kept.itemsize == 2:
            return torch.mm(hidden.to(kept), weight.T, out_dtype=torch.float32)
        return linear(hidden.to(kept), weight.to(kept))  # only a head tied to half-precision embeddings is converted

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE's cosines and sines, float32 [n_rows, head_dim / 2].

        Positions are int64 [n_rows], or [3, n_rows] under M-RoPE: time, height and width.
        """
        cos, sin = self.rotations(positions.device)
        if positions.ndim == 1:
            return cos[positions], sin[positions]
        axes = self._axes_of_frequencies(positions.device).expand(1, positions.shape[1], -1)
        turned = [each[positions].gather(0, axes)[0] for each in (cos, sin)]
        return turned[0], turned[1]

    def rotations(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """RoPE's cosines and sines of all positions, float32 [max_position_embeddings, head_dim / 2]."""
        if self._rotary is None or self._rotary[0].device != device:
            dim = self.config.head_dim
            exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
            frequencies = 1.0 / self.config.rope_theta**exponents
            steps = torch.arange(self.config.max_position_embeddings, dtype=torch.float32, device=device)
            angles = torch.outer(steps, frequencies)
            self._rotary = (angles.cos(), angles.sin())
        return self._rotary

    def _axes_of_frequencies(self, device: torch.device) -> Tensor:
        """The axis that each frequency rotates with (time 0, height 1, width 2), int64 [head_dim / 2].

        Kept on the device: a CUDA graph cannot capture a copy from pageable host memory.
        """
        if self._axes is None or self._axes.device != device:
            sections = self.config.rope_sections
            axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
            if self.config.rope_interleaved:
                axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(self.config.head_dim // 2)]
            self._axes = torch.tensor(axes, device=device)
        return self._axes


def decoder_tensors(decoder: PackedDecoder, prefix: str = "") -> dict[str, Tensor]:
    """The decoder's tensors by their names in transformers' LlamaForCausalLM, which Qwen's and Gemma's share."""
    config = decoder.config
    tensors = {"model.embed_tokens.weight": decoder.embed_tokens.weight, "model.norm.weight": decoder.norm.weight}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = decoder.lm_head.weight
    named = {prefix + name: tensor.detach() for name, tensor in tensors.items()}
    for i, layer in enumerate(decoder.layers):
        named |= layer_tensors(cast(DecoderLayer, layer), config, f"{prefix}model.layers.{i}.")
    return named


def layer_tensors(layer: DecoderLayer, config: DecoderShape, prefix: str) -> dict[str, Tensor]:
    """One layer's tensors by their names in transformers' classes; it must not be quantised."""
    q_rows, kv_rows = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    q, k, v = layer.qkv.weight.split((q_rows, kv_rows, kv_rows))
    gate, up = layer.gate_up.weight.chunk(2)
    tensors: dict[str, Tensor] = {}
    if isinstance(layer.input_norm, RMSNorm):
        tensors["input_layernorm.weight"] = layer.input_norm.weight
    tensors |= {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": layer.out.weight,
        "post_attention_layernorm.weight": layer.post_norm.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down.weight,
    }
    if layer.qkv_bias is not None:
        biases = layer.qkv_bias.split((q_rows, kv_rows, kv_rows))
        tensors |= {f"self_attn.{name}_proj.bias": bias for name, bias in zip("qkv", biases, strict=True)}
    for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
        if norm is not None:
            tensors[f"self_attn.{name}.weight"] = norm.weight
    return {prefix + name: tensor.detach() for name, tensor in tensors.items()}
