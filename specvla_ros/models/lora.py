# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as saved by PEFT, merged into the weights of their base model while loading.

W becomes W + s B A (arXiv 2106.09685, section 4.1) with s = alpha / r, or alpha / sqrt(r) with `use_rslora`. The sum is
computed in float32; PEFT's `merge_and_unload` computes it in the base model's precision.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.config import ADAPTER_CONFIG, read_checkpoint_json
from specvla_ros.models.pickled_weights import read_pickled, tensors_in
from specvla_ros.settings.json_file import Fields, shown

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# Parts of a tensor's name that differ between a checkpoint's files and the modules that PEFT adapted, depending on the
# version of transformers.
_WRAPPERS = frozenset(("base_model", "model", "language_model", "modules_to_save", "base_layer"))
_ROOT = "base_model.model."  # PEFT's prefix of the names that its patterns match
_FACTOR = re.compile(r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(\.weight)?")
# Settings that would change the sum above, or the base model's W, with their neutral values.
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "megatron_config": (None,),
    # Others, such as PiSSA, change the base.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica"),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "layer_replication": (None,),
    "monteclora_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
}


@dataclass(frozen=True)
class LoraFactors:
    """The update of one weight."""

    down: Tensor  # A, [r, in]; for an embedding [r, vocabulary], for a convolution [r, in, …]
    up: Tensor  # B, [out, r]; for a convolution [out, r, 1, …]
    scale: float  # s
    embedding: bool  # the weight has a row per token, B A a column

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = len(self.up), *self.down.shape[1:]
        return sizes[::-1] if self.embedding else sizes

    @property
    def delta(self) -> Tensor:
        """The update in float32, in the weight's shape."""
        product = self.scale * (self.up.float().flatten(1) @ self.down.float().flatten(1))
        return product.mT if self.embedding else product.view(self.shape)


@dataclass(frozen=True)
class LoraAdapter:
    """Low-rank changes to a base model's weights, as PEFT saves them."""

    path: Path  # file of its weights
    factors: Mapping[str, LoraFactors]  # by the weight's name, see `bare_name`
    whole: Mapping[str, Tensor]  # tensors that replace the base model's (`modules_to_save`, biases)

    def changes(self, name: str) -> bool:
        """True if it changes the tensor of this name."""
        return bare_name(name) in self.factors.keys() | self.whole.keys()

    def merged(self, name: str, weight: Tensor) -> Tensor:
        name = bare_name(name)
        factors = self.factors.get(name)
        weight = self.whole.get(name, weight)
        return weight if factors is None else weight.float() + factors.delta.to(weight.device)

    def contained_in(self, weights: Mapping[str, Tensor]) -> float:
        """Share of the adapter in some weights: about 0 in those that it was trained on, 1 if it was merged before.

        `weights`: by name; the adapter must have factors for each.
        """
        found = whole = 0.0
        for name, weight in weights.items():
            delta = self.factors[bare_name(name)].delta
            found += float((weight.float() * delta).sum())
            whole += float(delta.square().sum())
        return found / whole if whole else 0.0

    def check(self, tensors: Mapping[str, Tensor], unused: re.Pattern[str]) -> None:
        """Refuses an adapter of another base model.

        Args:
            tensors: the model's, by checkpoint name.
            unused: names that the model's files may contain although the model does not have them.
        """
        there = {bare_name(name): tensor for name, tensor in tensors.items()}
        for name, shape in self._shapes():
            found = there.get(name)
            if found is None and unused.fullmatch(name):
                continue
            if found is None or tuple(found.shape) != shape:
                has = "none" if found is None else f"one of shape {list(found.shape)}"
                raise UserError(
                    f"{self.path} changes a tensor {name} of shape {list(shape)}, but the model has {has}: the adapter "
                    "was trained on another base model"
                )

    def _shapes(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        yield from ((name, factors.shape) for name, factors in self.factors.items())
        yield from ((name, tuple(tensor.shape)) for name, tensor in self.whole.items())


def bare_name(name: str) -> str:
    """A tensor's name without the names of wrapper modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def adapter_of(directory: Path) -> str:
    """Description of the adapter that is merged while loading a directory, for results; empty if there is none."""
    config = directory / ADAPTER_CONFIG
    if not config.exists():
        return ""
    return f"merged, trained on {shown(read_checkpoint_json(config).raw.get('base_model_name_or_path'))}"


def read_adapter(directory: Path) -> LoraAdapter | None:
    """Reads the adapter next to a model's files, if any; UserError if it is not a LoRA, or is incomplete."""
    config = directory / ADAPTER_CONFIG
    if not config.exists():
        return None
    given = read_checkpoint_json(config)
    for name, plain in PLAIN.items():
        if given.raw.get(name) not in plain:
            raise UserError(
                f"{config}: {name} is {shown(given.raw.get(name))}, which is not supported: merge it with PEFT's "
                "merge_and_unload and use the merged directory"
            )
    path, tensors = _tensors(directory)
    found: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        factor = _FACTOR.fullmatch(name)
        if factor is None:
            whole[bare_name(name)] = tensor
        else:
            found.setdefault(factor["module"], {})[factor["kind"]] = tensor
    if not found and not whole:
        raise UserError(f"{path} contains no tensors; copy it again")
    factors = {f"{bare_name(module)}.weight": _factors(module, kinds, given, path) for module, kinds in found.items()}
    return LoraAdapter(path, factors, whole)


def _tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    path = next((directory / name for name in _FILES if (directory / name).exists()), None)
    if path is None:
        raise UserError(
            f"{directory} has {ADAPTER_CONFIG}, but neither {' nor '.join(_FILES)}; copy the adapter's weights "
            "from the same source"
        )
    if path.suffix == ".bin":
        return path, tensors_in(read_pickled(path), path)
    try:
        return path, load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or cut off ({error}); download this file again") from None


def _factors(module: str, kinds: Mapping[str, Tensor], config: Fields, path: Path) -> LoraFactors:
    embedding = "lora_embedding_A" in kinds
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    down, up = (kinds.get(name) for name in names)
    if down is None or up is None or min(down.ndim, up.ndim) < 2 or up[0].numel() != len(down):
        raise UserError(f"{path}: {module} needs matrices {names[0]} [r, in] and {names[1]} [out, r]; copy it again")
    alpha = _of_module(module, config.inner("alpha_pattern").raw if config.raw.get("alpha_pattern") else {})
    alpha = config.number("lora_alpha", 8.0) if alpha is None else alpha
    rank = len(down)
    scale = alpha / (math.sqrt(rank) if config.raw.get("use_rslora") else rank)
    return LoraFactors(down, up, scale, embedding)


def _of_module(module: str, pattern: Mapping[str, object]) -> float | None:
    """The module's value in PEFT's patterns, which match the end of a module's name or all of it."""
    module = module.removeprefix(_ROOT)
    for key, value in pattern.items():
        if isinstance(value, int | float) and re.fullmatch(rf"(.*\.)?({key})", module):
            return float(value)
    return None
