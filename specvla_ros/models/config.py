# SPDX-License-Identifier: Apache-2.0
"""Shapes of the modules that families share, and checks that apply to every checkpoint directory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import Fields, read_fields, shown

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Above any model's values: more is an error or an attack, and would otherwise only show as a lack of memory.
MAX_WIDTH, MAX_LAYERS, MAX_IDS, _MAX_POSITIONS = 1 << 17, 256, 1 << 22, 1 << 20
ADAPTER_CONFIG = "adapter_config.json"
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class VisionTowerConfig:
    """Shape of one vision transformer."""

    # embed_dim, depth, heads, mlp_dim, patch_size: as in the ViT paper. The tower's output is that of the
    # second-to-last block, so `depth - 1` blocks are computed.
    embed_dim: int
    depth: int
    heads: int
    mlp_dim: int
    patch_size: int
    class_token: bool  # a prefix token without a position before the patches (DINOv2)
    register_tokens: int  # number of further prefix tokens
    layer_scale: bool  # the blocks scale their residual branches (DINOv2)
    image_size: int  # height and width of the input in pixels

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class DecoderVariant:
    """Differences of a decoder from Llama."""

    qkv_bias: bool = False  # queries, keys and values have a bias (Qwen2)
    qk_norm: bool = False  # queries and keys are normalised per head, before RoPE (Qwen3)
    unit_offset_norms: bool = False  # norms scale by 1 + their weight (Gemma)
    scaled_embeddings: bool = False  # token embeddings are multiplied by the square root of their width (Gemma)
    gate: str = "silu"  # activation of the MLP's gate, `silu` or `gelu_tanh` (Gemma)


@dataclass(frozen=True)
class DecoderShape:
    """Shape of a decoder; names and defaults are those of transformers' Llama."""

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
    variant: DecoderVariant = DecoderVariant()
    # Numbers of the `head_dim` / 2 frequencies that rotate with time, height and width under M-RoPE (Qwen2.5-VL);
    # empty: a row has one position.
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False  # the axes' frequencies are interleaved (Qwen3-VL), not consecutive
    # Number of first layers after which further features of an image row are added (DeepStack, arXiv 2406.04334;
    # Qwen3-VL). The features are concatenated to the row's embedding.
    deepstack: int = 0

    @property
    def input_size(self) -> int:
        """Width of an embedding including its DeepStack features."""
        return self.hidden_size * (1 + self.deepstack)

    @property
    def rope_axes(self) -> int:
        return len(self.rope_sections) or 1


_QWEN2 = DecoderShape(
    intermediate_size=22016, vocab_size=151936, max_position_embeddings=32768, variant=DecoderVariant(qkv_bias=True)
)
# Defaults of a config.json by its `model_type`, as in transformers.
DECODERS: dict[str, DecoderShape] = {
    "llama": DecoderShape(),
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, variant=DecoderVariant(qk_norm=True)),
    "gemma": DecoderShape(
        hidden_size=3072,
        intermediate_size=24576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        vocab_size=256000,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        variant=DecoderVariant(unit_offset_norms=True, scaled_embeddings=True, gate="gelu_tanh"),
    ),
}
_ACTIVATIONS = {"silu": ("silu",), "gelu_tanh": ("gelu_pytorch_tanh", "gelu")}  # Gemma's "gelu" is the tanh one


_BUNDLED = Path(__file__).parents[1] / "lab" / "bundled"  # a robot may lack it


def check_directory(directory: Path) -> None:
    """Refuses a missing directory, a hub id, an adapter without its base model, and git-lfs pointers."""
    if not directory.is_dir():
        if _HUB_ID.fullmatch(str(directory)):
            raise UserError(
                f"'{directory}' is not a directory; if it is a Hugging Face hub id, download it first: "
                f"hf download {directory} --local-dir {directory.name}"
            )
        wrong = "is a file" if directory.exists() else "does not exist"
        bundled = _BUNDLED / directory.name
        known = len(directory.parts) == 1 and (bundled / "config.json").exists()
        of_that_name = f": of the bundled policy of that name it is {bundled}" if known else ""
        raise UserError(
            f"checkpoint directory {directory} {wrong}; give the folder that holds config.json{of_that_name}"
        )
    if (directory / ADAPTER_CONFIG).exists() and not (directory / "config.json").exists():
        raise UserError(
            f"{directory} contains an adapter ({ADAPTER_CONFIG}) without its base model: copy or link the base "
            "model's files to it (cp -rs $PWD/BASE POLICY; cp ADAPTER/* POLICY/); the adapter is merged while loading"
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


def refuse_adapter(directory: Path) -> None:
    """Refuses an adapter, for families that do not merge adapters."""
    if (directory / ADAPTER_CONFIG).exists():
        raise UserError(
            f"{directory / ADAPTER_CONFIG}: adapters cannot be merged into this kind of checkpoint: merge it "
            "with the code that trained it, and remove the adapter's files"
        )


def folder_beside(directory: Path, name: str, what: str) -> Path:
    """Finds a folder that a checkpoint needs but does not include, inside it or next to it.

    `what`: its required content, for the UserError if there is no such folder.
    """
    found = next((each for each in (directory / name, directory.resolve().parent / name) if each.is_dir()), None)
    if found is None:
        raise UserError(f"{directory / name} is missing: it must hold {what}")
    return found


def only_file(folder: Path, *suffixes: str) -> Path:
    """The only file in a training run's folder of weights; UserError if there is none, or several."""
    files = sorted(path for path in folder.glob("*") if path.suffix in suffixes)
    if len(files) != 1:
        kinds = " or ".join(suffixes)
        raise UserError(f"{folder} must contain one {kinds} file, that of the step to run; it has {len(files)}")
    return files[0]


def read_checkpoint_json(path: Path) -> Fields:
    """Reads the object in a checkpoint's JSON file; UserError if there is none."""
    missing = f"is {path.parent} a complete checkpoint directory?"
    return read_fields(path, missing=missing, hint="; compare it with a released checkpoint's")


def check_not_quantised(raw: Fields) -> None:
    """Refuses a config.json that declares quantised weights."""
    for name in ("quantization_config", "compression_config"):
        if raw.raw.get(name) is not None:
            method = raw.inner(name).text("quant_method", "unknown")
            raise UserError(
                f"{raw.path}: {name} says that the weights are quantised ({shown(method)}), which is not supported: "
                "use the original checkpoint, and set model.quantization to quantise it while loading"
            )


def read_decoder_shape(text: Fields, families: Mapping[str, DecoderShape] = DECODERS) -> DecoderShape:
    """Reads the decoder's shape from the config.json of a transformers language model.

    Args:
        text: fields of config.json or of its `text_config`; without a `model_type` it is a Llama.
        families: the supported families, with their defaults.

    Raises UserError: unsupported family or feature, quantised weights, or an invalid number.
    """
    path = text.path
    family = text.text("model_type", "llama")
    if family not in families:
        known = ", ".join(f"'{name}'" for name in families)
        raise UserError(f"{path}: language model {shown(family)} is not supported, only {known}")
    default = families[family]
    _check_variant(text, default)
    check_not_quantised(text)
    heads = text.whole("num_attention_heads", default.num_attention_heads, minimum=1, maximum=MAX_WIDTH)
    hidden = text.whole("hidden_size", default.hidden_size, minimum=1, maximum=MAX_WIDTH)
    # If missing, the number of heads (Llama) or the family's default (Qwen, Gemma).
    usual_kv_heads = heads if family == "llama" else min(heads, default.num_key_value_heads)
    kv_heads = text.whole("num_key_value_heads", usual_kv_heads, minimum=1, maximum=heads)
    if heads % kv_heads:
        raise text.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    usual_head_dim = default.head_dim if family in ("qwen3", "gemma") else hidden // heads
    head_dim = text.whole("head_dim", usual_head_dim, minimum=2, maximum=MAX_WIDTH)
    if head_dim < 2 or head_dim % 2:
        raise UserError(f"{path}: config gives heads of {head_dim} channels, but RoPE needs an even number{text.hint}")
    rope = _rope(text)
    sections = rope.list_of("mrope_section", int, "a list of whole numbers", default.rope_sections)
    if default.rope_sections and (min(sections, default=0) < 1 or sum(sections) != head_dim // 2 or len(sections) != 3):
        raise rope.wrong("mrope_section", f"three whole numbers whose sum is half of a head's {head_dim} channels")
    theta = rope.number("rope_theta", text.number("rope_theta", default.rope_theta, above=0.0), above=0.0)
    return replace(
        default,
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
        tie_word_embeddings=text.flag("tie_word_embeddings", default.tie_word_embeddings),
        rope_sections=tuple(sections) if default.rope_sections else (),
    )


def _rope(text: Fields) -> Fields:
    """The RoPE fields as transformers reads them: rope_scaling, the older name, takes precedence."""
    return text.inner("rope_scaling" if text.raw.get("rope_scaling") else "rope_parameters", {})


def _check_variant(text: Fields, default: DecoderShape) -> None:
    path, rope = text.path, _rope(text)
    kinds = ("default", "mrope") if default.rope_sections else ("default",)
    if rope.text("rope_type", rope.text("type", "default")) not in kinds:
        raise UserError(f"{path}: rope scaling {shown(rope.raw)} is not supported, only plain RoPE is")
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window", "use_bidirectional_attention"):
        if text.raw.get(flag) is not None and text.flag(flag, False):
            raise UserError(f"{path}: {text.prefix}{flag} is not supported")
    if not text.flag("is_causal", True):
        raise UserError(f"{path}: {text.prefix}is_causal false is not supported")
    if rope.flag("mrope_interleaved", default.rope_interleaved) != default.rope_interleaved:
        raise UserError(f"{path}: {rope.prefix}mrope_interleaved differs from this family's, which is not supported")
    if {*text.list_of("layer_types", str, "a list of strings", ())} - {"full_attention"}:
        raise UserError(f"{path}: {text.prefix}layer_types must contain only full attention; others are not supported")
    # Gemma's first files have another value in hidden_act, which its own class ignores.
    activation = text.text("hidden_activation" if text.raw.get("hidden_activation") else "hidden_act", "")
    known = _ACTIVATIONS[default.variant.gate]
    if activation and activation not in known:
        raise UserError(f"{path}: activation {shown(activation)} is not supported, only '{known[0]}' is")
