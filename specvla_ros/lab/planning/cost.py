# SPDX-License-Identifier: Apache-2.0
"""The cost of a forward in bytes, operations and seconds, from a checkpoint's shapes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from specvla_ros.engine.cuda_graphs import FREE
from specvla_ros.errors import UserError
from specvla_ros.lab.planning.device import LIMIT, Arithmetic, Device, Efficiency
from specvla_ros.models.config import DecoderShape, VisionTowerConfig, check_directory, read_checkpoint_json
from specvla_ros.models.families.openvla.config import OPENVLA_TYPES, OpenVLAConfig, is_oft, read_config
from specvla_ros.models.settings import WeightFormat
from specvla_ros.settings.json_file import shown
from specvla_ros.speculation.settings import DRAFT_FOLDER, branch_rank

# Hugging Face openvla/openvla-7b, config.json: Llama-2-7B with a vocabulary padded to 32064, DINOv2 ViT-L/14 with four
# registers and SigLIP SoViT-400m/14 at 224 pixels; the towers' shapes are timm's for these names.
OPENVLA_7B = OpenVLAConfig(
    towers=(
        VisionTowerConfig(1024, 24, 16, 4096, 14, True, 4, layer_scale=True, image_size=224),
        VisionTowerConfig(1152, 27, 16, 4304, 14, False, 0, layer_scale=False, image_size=224),
    ),
    llama=DecoderShape(vocab_size=32064),
    pad_to_multiple_of=64,
    action_bins=256,
    norm_stats={},
    vicuna=False,
)

# BOS, "In: What action should the robot take to …?\nOut:" with an instruction of about ten words, and the space token.
# With OpenVLA-7B's 256 patches this makes a prompt of 290 rows.
_TEXT_TOKENS = 34
_FIXED = "bins"  # the codec with answers of fixed length
_ACTION_TOKENS = 7  # default if the checkpoint has no statistics
_MAX_ROWS = 4096  # more than any forward has
_STEPS = 20


def arithmetic_of(weights: WeightFormat) -> Arithmetic:
    """Number format of the products with the decoder's matrices."""
    if weights in (WeightFormat.W8A8, WeightFormat.W8A8_HADAMARD):
        return Arithmetic.INT8
    return Arithmetic.FP8 if weights is WeightFormat.FP8 else Arithmetic.DENSE


def weight_bytes(weights: WeightFormat, dtype_bytes: int) -> float:
    """Bytes read per weight of the decoder; int4 has a 16-bit scale and a 16-bit zero point per group of 128."""
    if weights is WeightFormat.NONE:
        return float(dtype_bytes)
    return 4.25 / 8 if weights is WeightFormat.INT4 else 1.0


@dataclass(frozen=True)
class ModelCost:
    """Counts of a checkpoint. Biases and norms, together less than a thousandth, are ignored."""

    decoder_values: int  # weights of the decoder's layers, all read by every forward
    head_values: int  # weights of the output head, all read by every forward that ends in logits
    embedding_values: int  # weights of the input embeddings; a lookup, counted for memory only (0 if tied to the head)
    vision_values: int  # weights of towers and projector
    decoder_layers: int
    vision_layers: int  # computed layers of both towers
    vision_operations: int  # multiplications and additions for one image in towers and projector
    kv_values: int  # keys and values of one token, all layers
    pair_operations: int  # attention operations for one pair of query and key, all layers and heads
    draft_values: int  # weights of an EAGLE head for this decoder: its fusion and its one layer
    draft_layer_values: int  # those of the layer
    draft_head_values: int  # weights of the output head for the ids that it may draft
    draft_branch_values: int  # weights that a head that drafts in one forward reads for each further depth
    draft_kv_values: int  # keys and values of one token in that layer
    prompt_rows: int  # rows of a prompt: the images' patches, a state's tokens and about 34 text tokens
    action_tokens: int  # tokens of an answer
    pictures: int = 1  # images of a prompt, one per camera
    one_pass: bool = False  # True if the draft head drafts all depths of a tree in one forward

    def memory_bytes(self, weights: WeightFormat, dtype_bytes: int, *, draft: bool) -> float:
        """Memory of all weights in bytes, with or without a draft head."""
        rounded, plain = self.decoder_values, self.head_values + self.embedding_values + self.vision_values
        if draft:
            in_layer = self.draft_layer_values if _rounds(weights) else 0
            rounded, plain = rounded + in_layer, plain + self.draft_values - in_layer
        return rounded * weight_bytes(weights, dtype_bytes) + plain * dtype_bytes


def planned_config(checkpoint: Path, tokens: int) -> OpenVLAConfig:
    """Reads a checkpoint's config.json; UserError for another architecture or if `tokens` is needed and 0."""
    from specvla_ros.models.checkpoint import model_type_of

    check_directory(checkpoint)
    kind = model_type_of(checkpoint)
    if kind not in OPENVLA_TYPES:
        raise UserError(
            f"{checkpoint}: its model_type is {shown(kind)}, but only OpenVLA's architecture can be planned. Without "
            "--model, `--tokens N` plans OpenVLA-7B with answers of this policy's length; `specvla replay` times it"
        )
    if is_oft(checkpoint):
        raise UserError(
            f"{checkpoint} is an OpenVLA-OFT checkpoint: it answers in one forward without tokens to draft, so there "
            "is nothing to plan; `specvla replay` times it"
        )
    config = read_config(checkpoint)
    if not tokens and (config.vicuna or config.action_codec != _FIXED):
        what = "text before its actions, or none (ECoT 40 to 200 tokens, OpenVLA v0.1 7)"
        raise UserError(
            f"{checkpoint} may write {what if config.vicuna else f'answers of any length ({config.action_codec})'}: "
            "give the length of an answer with --tokens N; `specvla predict --json` shows one"
        )
    return config


def drafts_in_one_pass(checkpoint: Path) -> bool:
    """True if the checkpoint's own draft head drafts all depths of a tree in one forward."""
    path = checkpoint / DRAFT_FOLDER / "config.json"
    return path.exists() and read_checkpoint_json(path).whole("parallel_depth", 1, minimum=1) > 1


def model_cost(config: OpenVLAConfig) -> ModelCost:
    """Computes the counts from the shapes in config.json."""
    llama = config.llama
    heads = 2 * llama.num_attention_heads + 2 * llama.num_key_value_heads  # query and output, key and value
    layer = llama.hidden_size * (heads * llama.head_dim + 3 * llama.intermediate_size)
    width = sum(tower.embed_dim for tower in config.towers)
    # The projector has three matrices after two towers, two after one.
    first = 4 * width * (width + llama.hidden_size) if len(config.towers) > 1 else width * llama.hidden_size
    projector = first + llama.hidden_size**2
    kv_values = 2 * llama.num_key_value_heads * llama.head_dim
    ids, rank = _drafted_ids(config), branch_rank(llama.hidden_size)
    return ModelCost(
        decoder_values=llama.num_hidden_layers * layer,
        head_values=llama.vocab_size * llama.hidden_size,
        embedding_values=0 if llama.tie_word_embeddings else llama.vocab_size * llama.hidden_size,
        vision_values=sum(map(_tower_values, config.towers)) + projector,
        decoder_layers=llama.num_hidden_layers,
        vision_layers=sum(tower.depth - 1 for tower in config.towers),
        vision_operations=sum(map(_tower_operations, config.towers)) + 2 * projector * config.image_tokens,
        pictures=len(config.cameras),
        kv_values=llama.num_hidden_layers * kv_values,
        pair_operations=llama.num_hidden_layers * 4 * llama.num_attention_heads * llama.head_dim,
        draft_values=2 * llama.hidden_size**2 + layer,
        draft_layer_values=layer,
        draft_head_values=ids * llama.hidden_size,
        draft_branch_values=rank * (llama.hidden_size + rank + ids),
        draft_kv_values=kv_values,
        prompt_rows=len(config.cameras) * config.image_tokens + config.state_dims + _TEXT_TOKENS,
        action_tokens=_action_tokens(config.norm_stats),
    )


def _drafted_ids(config: OpenVLAConfig) -> int:
    """Number of ids that a draft chooses from: the bins if an answer has no text, else the vocabulary."""
    text = config.vicuna or config.action_codec != _FIXED
    return config.llama.vocab_size if text else config.action_bins


def _action_tokens(norm_stats: Mapping[str, Any]) -> int:
    for statistics in norm_stats.values():
        try:
            return len(statistics["action"]["q01"])
        except (KeyError, TypeError):
            continue
    return _ACTION_TOKENS


def _tower_values(tower: VisionTowerConfig) -> int:
    """Weights of the patch embedding and all blocks except the last, which OpenVLA does not compute."""
    block = 4 * tower.embed_dim**2 + 2 * tower.embed_dim * tower.mlp_dim
    return 3 * tower.patch_size**2 * tower.embed_dim + (tower.depth - 1) * block


def _tower_operations(tower: VisionTowerConfig) -> int:
    tokens = tower.patches + tower.register_tokens + int(tower.class_token)
    attention = 4 * tokens**2 * tower.embed_dim * (tower.depth - 1)
    return 2 * _tower_values(tower) * tokens + attention


@dataclass(frozen=True)
class Forward:
    """The rows of one packed forward."""

    prompt_rows: int = 0  # rows of the newest frame's prompt in this forward: all, a chunk, or none
    prompt_before: int = 0  # rows of that prompt computed by earlier forwards
    # True if a frame goes through the vision towers: before its prompt, or beside this forward if it has no prompt.
    image: bool = False
    prompt_ends: bool = True  # True if the chunk is the prompt's last, so that it yields a token
    trees: int = 0  # number of requests with a complete prompt
    nodes: int = 0  # their tree nodes in total, roots included
    prefix_rows: int = 0  # their committed rows in total

    @property
    def rows(self) -> int:
        """Rows of every matrix product in the decoder."""
        return self.prompt_rows + self.nodes


@dataclass(frozen=True)
class Part:
    """A part of a forward within which reading and computing may overlap."""

    name: str  # vision, decoder, attention, head or draft
    bytes: float  # bytes read and written, without activations, which stay in the caches
    operations: float  # multiplications plus additions
    rows: int  # rows of the matrix products; a measured rate depends on them
    arithmetic: Arithmetic = Arithmetic.DENSE  # number format of the products
    layers: int = 0  # model layers it runs through in sequence
    beside: bool = False  # True if it runs at the same time as the others

    def seconds(self, device: Device, efficiency: Efficiency = LIMIT) -> float:
        if not self.rows:
            return 0.0
        return max(self.work_s(device, efficiency)) + self.layers * efficiency.layer_s

    def work_s(self, device: Device, efficiency: Efficiency) -> tuple[float, float]:
        """Seconds of reading and of computing, which overlap."""
        rate = device.operations_per_s(self.arithmetic, self.rows) * efficiency.compute(self.rows)
        return self.bytes / (device.bytes_per_s() * efficiency.bandwidth), self.operations / rate


def forward_parts(forward: Forward, model: ModelCost, weights: WeightFormat, dtype_bytes: int) -> tuple[Part, ...]:
    """The parts of one forward in execution order, and the vision towers where they run beside it."""
    chosen_rows = forward.nodes + int(bool(forward.prompt_rows) and forward.prompt_ends)
    # Every row of a prompt or tree is written once; that row and those before it are read once.
    kv_rows = forward.prompt_before + forward.prefix_rows + 2 * forward.rows
    kv_bytes = kv_rows * model.kv_values * dtype_bytes
    parts = [
        Part(
            "decoder",
            model.decoder_values * weight_bytes(weights, dtype_bytes),
            2.0 * model.decoder_values * forward.rows,
            forward.rows,
            arithmetic_of(weights),
            model.decoder_layers,
        ),
        Part("attention", float(kv_bytes), _attention_operations(forward, model), forward.rows),
        Part("head", model.head_values * dtype_bytes, 2.0 * model.head_values * chosen_rows, chosen_rows, layers=1),
    ]
    if forward.image:
        parts.insert(0, replace(vision_part(model, dtype_bytes), beside=not forward.prompt_rows))
    return tuple(part for part in parts if part.rows)


def vision_part(model: ModelCost, dtype_bytes: int) -> Part:
    """Towers and projector over the images of one prompt, one after the other."""
    read, n = float(model.vision_values * dtype_bytes), model.pictures
    return Part("vision", n * read, n * model.vision_operations, model.prompt_rows, layers=n * model.vision_layers)


def _attention_operations(forward: Forward, model: ModelCost) -> float:
    """Causal attention: half of the pairs within a prompt; a node attends to its prefix and at most to its tree."""
    chunk = forward.prompt_rows * (forward.prompt_before + (forward.prompt_rows + 1) / 2)
    nodes_per_tree = forward.nodes / forward.trees if forward.trees else 0.0
    trees = nodes_per_tree * (forward.prefix_rows + forward.nodes)
    return model.pair_operations * (chunk + trees)


def draft_parts(
    model: ModelCost, weights: WeightFormat, dtype_bytes: int, *, steps: int, rows: int, prefix_rows: int
) -> tuple[Part, ...]:
    """One draft for all requests in flight: the head's layer, then the ids' part of the output head and the selection.

    `steps` is the tree's depth, the number of sequential forwards of a draft head that is not one-pass. `rows` are the
    tree nodes of all steps, `prefix_rows` the committed rows of all requests. With a decoder in 8 bits the head's layer
    is in 8 bits too, a part of its own.
    """
    steps, further = (1, steps - 1) if model.one_pass else (steps, 0)
    rounded = model.draft_layer_values if _rounds(weights) else 0
    values = model.draft_values - rounded + model.draft_head_values
    read = steps * (values + prefix_rows * model.draft_kv_values) + further * model.draft_branch_values
    rest = Part("draft", float(read * dtype_bytes), 2.0 * values * rows, rows, layers=(1 if rounded else 2) * steps)
    if not rounded:
        return (rest,)
    layer = float(steps * rounded), 2.0 * rounded * rows, rows, arithmetic_of(weights), steps
    return Part("draft layer", *layer), rest


def draft_prompt_parts(model: ModelCost, weights: WeightFormat, dtype_bytes: int) -> tuple[Part, ...]:
    """Cost of the draft head over one prompt."""
    rows, rounded = model.prompt_rows, model.draft_layer_values if _rounds(weights) else 0
    values = model.draft_values - rounded
    read = float((values + 2 * rows * model.draft_kv_values) * dtype_bytes)
    rest = Part("draft prompt", read, 2.0 * values * rows, rows, layers=0 if rounded else 1)
    if not rounded:
        return (rest,)
    return Part("draft prompt layer", float(rounded), 2.0 * rounded * rows, rows, arithmetic_of(weights), 1), rest


def _rounds(weights: WeightFormat) -> bool:
    """True if the products with the matrices are in 8 bits, in the draft head too."""
    return arithmetic_of(weights) is not Arithmetic.DENSE


def roofline_seconds(parts: Sequence[Part], device: Device, efficiency: Efficiency = LIMIT) -> float:
    """Time of parts that run in sequence, by default at the limit.

    Parts beside them overlap as far as bandwidth and arithmetic allow: a bound, since they share more than these. The
    time that layers cost whatever they compute does not overlap.
    """
    known = [part for part in parts if part.rows]
    groups = [[part.work_s(device, efficiency) for part in known if part.beside == beside] for beside in (False, True)]
    each_alone_s = [sum(map(max, group)) for group in groups]
    together_s = [sum(kind) for kind in zip(*chain(*groups), strict=True)]
    return max(*each_alone_s, *together_s) + sum(part.layers for part in known) * efficiency.layer_s


def ridge_rows(model: ModelCost, device: Device, weights: WeightFormat, efficiency: Efficiency = LIMIT) -> float:
    """Number of rows at which the decoder's matrices become compute-bound; below it one more row is free.

    With measured rates: the rows up to which a product takes at most a tenth longer than with one row, because one row
    rarely reaches the bandwidth of a plain read and measured times scatter.
    """
    arithmetic = arithmetic_of(weights)

    def computing_s(rows: int) -> float:
        rate = device.operations_per_s(arithmetic, rows) * efficiency.compute(rows)
        return 2.0 * model.decoder_values * rows / rate

    read = model.decoder_values * weight_bytes(weights, device.value_bytes)
    reading_s = read / (device.bytes_per_s() * efficiency.bandwidth)
    if not device.tflops_by_rows or arithmetic is not Arithmetic.DENSE:
        rows = 1.0
        for _ in range(_STEPS):  # the reached share depends on the rows
            size = math.ceil(rows)
            rows = max(1.0, size * reading_s / computing_s(size))
        return rows
    free_s = FREE * max(reading_s, computing_s(1))
    rows = 1.0
    for size in sorted({size for size in device.tflops_by_rows if size > 1} | {_MAX_ROWS}):
        crossing = size * free_s / computing_s(size)
        rows = max(rows, min(crossing, size))
        if crossing < size:
            break
    return rows
