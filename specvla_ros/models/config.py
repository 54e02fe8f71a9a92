# SPDX-License-Identifier: Apache-2.0
"""Shapes of the parts that families share, and what every checkpoint directory is checked for."""

import re
from dataclasses import dataclass
from pathlib import Path

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import Fields, read_fields, shown

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# More than any model has: what is beyond them is a slip or an attack, and would only show as a lack of memory.
MAX_WIDTH, MAX_LAYERS, MAX_IDS, _MAX_POSITIONS = 1 << 17, 256, 1 << 22, 1 << 20
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class VisionTowerConfig:
    """Shape of one vision transformer.

    Args:
        embed_dim, depth, heads, mlp_dim, patch_size: as in the ViT paper. The tower's output is that of the block
            before the last, so `depth - 1` blocks are computed.
        class_token, register_tokens: prefix tokens in front of the patches (DINOv2); they carry no position.
        layer_scale: whether the blocks scale their residual branches (DINOv2).
        image_size: height and width of the input in pixels.
    """

    embed_dim: int
    depth: int
    heads: int
    mlp_dim: int
    patch_size: int
    class_token: bool
    register_tokens: int
    layer_scale: bool
    image_size: int

    @property
    def patches(self) -> int:
        """Patch tokens per image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of the Llama decoder; names and defaults are transformers'."""

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    vocab_size: int = 32000
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False


def check_directory(directory: Path) -> None:
    """Tells the usual mistakes apart.

    Raises:
        UserError: the directory is not there, or holds something that is close to a checkpoint.
    """
    if not directory.is_dir():
        if _HUB_ID.fullmatch(str(directory)):
            raise UserError(
                f"'{directory}' is no directory; if it is a Hugging Face hub id, download it first: "
                f"hf download {directory} --local-dir {directory.name}"
            )
        raise UserError(f"checkpoint directory {directory} does not exist; give the folder that holds config.json")
    if (directory / "adapter_config.json").exists() and not (directory / "config.json").exists():
        raise UserError(
            f"{directory} holds an adapter (adapter_config.json), not a whole model: merge it into its base model "
            "(PEFT's merge_and_unload) and give the merged directory"
        )
    heads = sorted(directory.glob("action_head--*.pt"))
    if heads:
        raise UserError(
            f"{directory} is an OpenVLA-OFT checkpoint ({heads[0].name}): its actions come from that head in one "
            "parallel forward and not from tokens, so decoding its tokens would give wrong actions; it is not supported"
        )
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")]):
        try:
            file = path.open("rb")
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); download it again") from None
        with file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise UserError(
                    f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in {directory}, or download "
                    "the checkpoint again"
                )


def read_checkpoint_json(path: Path) -> Fields:
    """The object in a JSON file of a checkpoint.

    Raises:
        UserError: the file is missing or is no JSON object.
    """
    missing = f"is {path.parent} a complete OpenVLA checkpoint directory?"
    return read_fields(path, missing=missing, hint="; compare it with a released checkpoint's")


# What changes greedy decoding in transformers' generate, with the values that do not.
_GREEDY: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "penalty_alpha": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "sequence_bias": (None,),
    "bad_words_ids": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}


def check_generation(directory: Path) -> None:
    """Refuses a generation_config.json that asks for other than plain greedy decoding; sampling is never done.

    Raises:
        UserError: it does, and decoded without it the policy would act otherwise than its own code has it act.
    """
    path = directory / "generation_config.json"
    given = read_checkpoint_json(path).raw if path.exists() else {}
    for name, plain in _GREEDY.items():
        if name in given and given[name] not in plain:
            raise UserError(
                f"{path}: {name} is {shown(given[name])}, which changes what it answers and is not supported for "
                "this family; if it was not trained or evaluated so, take it out"
            )


def read_end_ids(directory: Path) -> frozenset[int]:
    """The ids that end an answer, as transformers' generate takes them: generation_config.json's, else config.json's.

    Raises:
        UserError: neither file says it.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found = read_checkpoint_json(path).raw.get("eos_token_id") if path.exists() else None
        ids = found if isinstance(found, list) else [found]
        if found is not None:
            if not ids or not all(type(i) is int and i >= 0 for i in ids):
                raise UserError(f"{path}: eos_token_id must be a token id, or a list of them; copy the file again")
            return frozenset(ids)
    raise UserError(f"{directory} does not say which token ends an answer: add eos_token_id to generation_config.json")


def check_not_quantised(raw: Fields) -> None:
    """Refuses a config.json that says its weights are quantised.

    Raises:
        UserError: it does.
    """
    for name in ("quantization_config", "compression_config"):
        if raw.raw.get(name) is not None:
            method = raw.inner(name).text("quant_method", "unknown")
            raise UserError(
                f"{raw.path}: {name} says that the weights are quantised ({shown(method)}), which cannot be read: give "
                "the original checkpoint, and set model.quantization to have its weights quantised here"
            )


def read_llama_config(text: Fields) -> LlamaConfig:
    """The decoder that a config.json of transformers' LlamaForCausalLM describes.

    Args:
        text: its fields, or those of a `text_config`.

    Raises:
        UserError: it is no plain Llama, its weights are quantised, or a number is wrong.
    """
    path = text.path
    if text.text("model_type", "llama") != "llama":
        raise UserError(f"{path}: language model {shown(text.raw['model_type'])} is not supported, only 'llama' is")
    rope = text.inner("rope_scaling" if text.raw.get("rope_parameters") is None else "rope_parameters", {})
    if rope.text("rope_type", rope.text("type", "default")) != "default":
        raise UserError(f"{path}: rope scaling {shown(rope.raw)} is not supported, only plain RoPE is")
    for flag in ("attention_bias", "mlp_bias"):
        if text.flag(flag, False):
            raise UserError(f"{path}: {text.prefix}{flag} is not supported")
    if text.text("hidden_act", "silu") != "silu":
        raise UserError(f"{path}: activation {shown(text.raw['hidden_act'])} is not supported, only 'silu' is")
    check_not_quantised(text)
    default = LlamaConfig()
    heads = text.whole("num_attention_heads", default.num_attention_heads, minimum=1, maximum=MAX_WIDTH)
    hidden = text.whole("hidden_size", default.hidden_size, minimum=1, maximum=MAX_WIDTH)
    kv_heads = text.whole("num_key_value_heads", heads, minimum=1, maximum=heads)
    if heads % kv_heads:
        raise text.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    head_dim = text.whole("head_dim", hidden // heads, minimum=2, maximum=MAX_WIDTH)
    if head_dim < 2 or head_dim % 2:
        raise UserError(f"{path}: config gives heads of {head_dim} channels, but RoPE turns pairs{text.hint}")
    theta = text.number("rope_theta", None, above=0.0) or rope.number("rope_theta", default.rope_theta, above=0.0)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=text.whole("intermediate_size", default.intermediate_size, minimum=1, maximum=MAX_WIDTH),
        num_hidden_layers=text.whole("num_hidden_layers", default.num_hidden_layers, minimum=1, maximum=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=text.whole("vocab_size", default.vocab_size, minimum=1, maximum=MAX_IDS),
        rms_norm_eps=text.number("rms_norm_eps", default.rms_norm_eps, above=0.0, maximum=1.0),
        rope_theta=theta,
        max_position_embeddings=text.whole(
            "max_position_embeddings", default.max_position_embeddings, minimum=1, maximum=_MAX_POSITIONS
        ),
        tie_word_embeddings=text.flag("tie_word_embeddings", False),
    )
