# SPDX-License-Identifier: Apache-2.0
"""The EAGLE draft head: one decoder layer over features and embeddings, and its checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specvla_kernels.fused_linear import linear
from specvla_kernels.layout import MAX_TREE_NODES, PackedLayout
from specvla_ros.errors import UserError
from specvla_ros.models.config import MAX_WIDTH, DecoderShape, DecoderVariant, read_checkpoint_json
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder, layer_tensors
from specvla_ros.models.weights import load_weights, tensor_shapes
from specvla_ros.speculation.settings import branch_rank


class EagleHead(nn.Module):
    """Spec-VLA eq. 4: linear fusion of the next token's embedding and the target's hidden state, then one layer.

    There is no norm before the attention or after the layer; embeddings and output head are the target's.

    A parallel head drafts all levels of a tree in one forward, as P-EAGLE does (arXiv 2602.01469): rows whose token and
    state are not known yet are learned masks. P-EAGLE has one mask token and one mask state for all depths, which is
    one row after the fusion; here each depth has its own row. A mask's state is the same after every node of a depth;
    `branched` adds what the tokens on a node's own path change. That is linear and of low rank, so that a tree grows
    without reading the output head again.

    Args:
        config: the layer's shape; its variant is always Llama's, regardless of the target's.
        parallel_depth: number of tokens drafted per forward; 1: a tree grows level by level.

    Attributes:
        mask_rows: [parallel_depth - 1, hidden], used instead of `fuse`'s output; row i predicts token i + 2.
        branch: [rank, 2 hidden] and [hidden, rank], of a parallel head; see `branched`.
    """

    mask_rows: Tensor

    def __init__(self, config: DecoderShape, parallel_depth: int = 1) -> None:
        super().__init__()
        self.config = config = replace(config, variant=DecoderVariant())
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = DecoderLayer(config, input_norm=False)
        self.parallel_depth = parallel_depth
        masks = torch.zeros(parallel_depth - 1, config.hidden_size)
        if parallel_depth > 1:
            self.mask_rows = nn.Parameter(masks)
            rank = branch_rank(config.hidden_size)
            self.branch = nn.Sequential(
                nn.Linear(2 * config.hidden_size, rank, bias=False), nn.Linear(rank, config.hidden_size, bias=False)
            )
        else:
            self.register_buffer("mask_rows", masks, persistent=False)

    def fuse(self, following: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input, [..., hidden], from the next token's embedding and the target's or the head's state."""
        return self.project(torch.cat((following, hidden), dim=-1))

    def project(self, both: Tensor) -> Tensor:
        """The layer's input from the concatenated inputs of `fuse`, [..., 2 * hidden]."""
        return linear(both, self.fc.weight, self.fc.bias)

    def branched(self, states: Tensor, following: Tensor, above: Tensor) -> Tensor:
        """States after nodes, [..., hidden], of a parallel head.

        Args:
            states: after the mask of each node's depth.
            following: embeddings of the nodes' tokens.
            above: states after the nodes' parents, from this function, or after the last known row.
        """
        changed: Tensor = self.branch(torch.cat((following, above), dim=-1))
        return states + changed

    def branch_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """`branched`'s factors of `following` and of `above`, [rank, hidden] each, and of their sum, [hidden, rank]."""
        taken, given = (each.get_parameter("weight") for each in self.branch)
        of_token, of_above = (part.clone(memory_format=torch.contiguous_format) for part in taken.chunk(2, dim=1))
        return of_token, of_above, given

    def path_weights(self, output: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """`branched` along whole paths, followed by the output head: linear, so that each term of a logit is apart.

        Args:
            output: rows of the output head, [ids, hidden], of the only ids that are drafted.
            embedded: their embeddings, likewise.

        Returns:
            [parallel_depth, ids, hidden]: the logits that a level's state adds, by how many levels they are below it.
            [parallel_depth - 1, ids, ids]: those that a token adds, by how many levels they are below its children;
            then by the token. See `PathLogits`.
        """
        of_token, of_above, given = (weight.to(output.dtype) for weight in self.branch_weights())
        onward, from_path = of_above @ given, [output @ given]  # [rank, rank], and [ids, rank] of each distance
        while len(from_path) < self.parallel_depth - 1:
            from_path.append(from_path[-1] @ onward)
        below = torch.stack(from_path)
        of_tokens = (embedded @ of_token.T) @ below.mT
        return torch.cat((output[None], below @ of_above)), of_tokens

    def forward(
        self, fused: Tensor, layout: PackedLayout, rotation: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> Tensor:
        """Runs one packed forward and returns the predicted state after each row, [n_rows, hidden].

        Args:
            fused: [n_rows, hidden], from `fuse`, or masks.
            rotation: the rows' cosines and sines, see `PackedDecoder.rotation`.
            keys, values: [slots, slot_rows, kv_heads, head_dim], written in place.
        """
        return self.layer(fused, *rotation, layout, keys, values)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The tensors by their names in published draft checkpoints; writing to one writes to the head."""
        tensors = {"fc.weight": self.fc.weight, "fc.bias": self.fc.bias}
        tensors |= layer_tensors(self.layer, self.config, "layers.0.")
        if self.parallel_depth > 1:
            tensors["mask_rows"] = self.mask_rows
            tensors |= {f"branch.{name}": weight for name, weight in self.branch.named_parameters()}
        return {name: tensor.detach() for name, tensor in tensors.items()}


def load_draft_head(directory: Path, decoder: PackedDecoder) -> EagleHead:
    """Loads a draft head for a target, in the target's dtype and on its device.

    Reads model.safetensors, or pytorch_model.bin as published by SpecVLA. Embeddings in the file are ignored: the
    target's are used. Raises UserError if a file is missing or damaged, or the head was made for another target.
    """
    if not directory.is_dir():
        raise UserError(f"draft.head: {directory} does not exist; give the folder with the head's config.json")
    config, parallel_depth = _config(directory, decoder.config)
    with torch.device("meta"):
        head = EagleHead(config, parallel_depth)
    head.to(decoder.dtype).to_empty(device=decoder.device)
    tensors = head.checkpoint_tensors()
    if not any(directory.glob("model.safetensors*")) and not (directory / "pytorch_model.bin").exists():
        raise UserError(
            f"draft.head: {directory} has neither model.safetensors nor pytorch_model.bin; copy the head's weights "
            "there, or train one with `specvla train-draft`"
        )
    if parallel_depth > 1 and not any(name.startswith("branch.") for name in tensor_shapes(directory)):
        raise UserError(
            f"draft.head: {directory} drafts {parallel_depth} tokens in one forward without branches, as heads of an "
            f"earlier version did: train it again with `specvla train-draft --parallel-depth {parallel_depth}`"
        )
    load_weights(directory, tensors)
    _check_kind(directory, tensors, decoder.config.vocab_size)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise UserError(f"{directory}: the draft head's weights hold NaN or infinity; train it again")
    return head.eval().requires_grad_(False)


def _config(directory: Path, target: DecoderShape) -> tuple[DecoderShape, int]:
    """The head's shape, and its number of tokens drafted per forward."""
    path = directory / "config.json"
    if not path.exists():
        raise UserError(
            f"draft.head: {path} is missing; SpecVLA's training does not save it with the weights: copy it there"
        )
    raw = read_checkpoint_json(path)
    layers = raw.whole("num_hidden_layers", 1)
    if layers != 1:
        raise UserError(f"{path}: a draft head has one layer, but this model has {layers}")
    hidden = raw.whole("hidden_size", minimum=1)
    heads = raw.whole("num_attention_heads", target.num_attention_heads, minimum=1)
    config = DecoderShape(
        hidden_size=hidden,
        intermediate_size=raw.whole("intermediate_size", minimum=1, maximum=MAX_WIDTH),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=raw.whole("num_key_value_heads", heads, minimum=1),
        head_dim=raw.whole("head_dim", hidden // heads),
        vocab_size=target.vocab_size,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6, above=0.0, maximum=1.0),
        rope_theta=raw.number("rope_theta", target.rope_theta, above=0.0),
        max_position_embeddings=target.max_position_embeddings,
    )
    groups = (config.num_attention_heads, config.num_key_value_heads)
    if min(*groups, config.hidden_size, config.intermediate_size, config.head_dim) < 1 or groups[0] % groups[1]:
        raise UserError(
            f"{path}: hidden_size {config.hidden_size}, intermediate_size {config.intermediate_size}, {groups[0]} "
            f"heads of {config.head_dim} and {groups[1]} key-value heads are not a valid layer; copy the file again"
        )
    if config.hidden_size != target.hidden_size:
        raise UserError(
            f"{directory} is a draft head for a target of hidden size {config.hidden_size}, but this target's is "
            f"{target.hidden_size}: train a head for it with `specvla train-draft`"
        )
    if (config.head_dim, config.rope_theta) != (target.head_dim, target.rope_theta):
        raise UserError(
            f"{path}: head_dim {config.head_dim} and rope_theta {config.rope_theta:g} differ from the target's "
            f"({target.head_dim}, {target.rope_theta:g}): the head was made for another target"
        )
    return config, raw.whole("parallel_depth", 1, minimum=1, maximum=MAX_TREE_NODES)


def _check_kind(path: Path, tensors: Mapping[str, Tensor], vocab_size: int) -> None:
    """Rejects files with tensors that an EAGLE head does not have, or embeddings of another vocabulary."""
    shapes = tensor_shapes(path)
    # The vocabulary size in config.json is ignored: SpecVLA's says 32000, but the embeddings have 32064 rows.
    rows = next(iter(shapes.get("embed_tokens.weight", ())), vocab_size)
    if rows != vocab_size:
        raise UserError(f"{path}: the head was made for a vocabulary of {rows} ids, but this target has {vocab_size}")
    extra = [name for name in shapes if name not in tensors and name != "embed_tokens.weight"]
    if extra:
        raise UserError(f"{path} has the tensor {extra[0]}: this kind of draft head is not supported")
