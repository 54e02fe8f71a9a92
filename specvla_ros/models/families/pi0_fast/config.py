# SPDX-License-Identifier: Apache-2.0
"""A pi0-FAST checkpoint as LeRobot saves it: config.json, and the statistics of its two processors.

Source: huggingface/lerobot: policies/pi0_fast and processor/normalize_processor.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.config import DECODERS, MAX_IDS, MAX_LAYERS, MAX_WIDTH, DecoderShape, read_checkpoint_json
from specvla_ros.settings.json_file import Fields, shown

MODEL_TYPE = "pi0_fast"
_CAMERA = "observation.images."
_STATE, _ACTION = "observation.state", "action"
_GEMMA = replace(
    DECODERS["gemma"],
    hidden_size=2048,
    intermediate_size=16384,
    num_hidden_layers=18,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=257152,
)
_VARIANTS = {"gemma_2b": _GEMMA, "gemma_300m": replace(_GEMMA, hidden_size=1024, intermediate_size=4096)}
# SigLIP-So400m/14, as PaliGemma has it.
_VISION: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
_EPS = 1e-8  # NormalizerProcessorStep's
# Modes of normalisation, and the two statistics that each needs.
_BOUNDS = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99")}


@dataclass(frozen=True)
class Pi0FastConfig:
    """The whole policy."""

    decoder: DecoderShape  # the language model
    vision: Mapping[str, Any]  # arguments of transformers' SiglipVisionConfig
    cameras: tuple[str, ...]  # names of all its cameras, in its order
    image_size: tuple[int, int]  # height and width
    state: "Normalisation"  # normalises the robot's state
    actions: ActionStatistics  # un-normalises its actions
    chunk: int  # actions per answer
    prompt_tokens: int  # longest prompt
    answer_tokens: int  # length at which an answer ends in any case
    skipped_ids: int  # ids at the vocabulary's end that are no FAST tokens
    text_tokenizer: Path  # its folder
    action_tokenizer: Path  # its folder


@dataclass(frozen=True)
class Normalisation:
    """Of one vector, in float32 as in LeRobot."""

    mode: str  # MEAN_STD, MIN_MAX, QUANTILES or IDENTITY
    first: np.ndarray  # float32 [dims], mean or lower bound; of IDENTITY only its length counts
    second: np.ndarray  # float32 [dims], standard deviation or upper bound

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Float [dims] in the robot's units to float32 [dims], about [-1, 1]."""
        values = values.astype(np.float32)
        if self.mode == "IDENTITY":
            return values
        if self.mode == "MEAN_STD":
            return (values - self.first) / (self.second + np.float32(_EPS))
        width = self.second - self.first
        return 2 * (values - self.first) / np.where(width == 0, np.float32(_EPS), width) - 1


def read_config(directory: Path) -> Pi0FastConfig:
    """Reads config.json and the processors' statistics; UserError for damaged files or unsupported values."""
    raw = read_checkpoint_json(directory / "config.json")
    _refuse_others(raw, directory)
    decoder, vision = _shapes(raw, directory)
    inputs, outputs = raw.inner("input_features"), raw.inner("output_features")
    cameras = tuple(name.removeprefix(_CAMERA) for name in inputs.raw if name.startswith(_CAMERA))
    if not cameras:
        raise UserError(f"{raw.path}: input_features names no camera (observation.images.…)")
    height, width = raw.list_of("image_resolution", int, "height and width in pixels", [224, 224], length=2)
    if not (1 <= height == width <= 4096):
        raise raw.wrong("image_resolution", "the same height and width, from 1 to 4096 pixels")
    modes = raw.inner("normalization_mapping")
    state = _normalisation(directory, "preprocessor", modes.text("STATE"), _STATE, _dims(inputs, _STATE))
    actions = _normalisation(directory, "postprocessor", modes.text("ACTION"), _ACTION, _dims(outputs, _ACTION))
    return Pi0FastConfig(
        decoder=decoder,
        vision=vision | {"image_size": height, "vision_use_head": False},
        cameras=cameras,
        image_size=(height, width),
        state=state,
        actions=_statistics(actions),
        chunk=raw.whole("chunk_size", minimum=1, maximum=1 << 10),
        prompt_tokens=raw.whole("tokenizer_max_length", minimum=1, maximum=1 << 14),
        answer_tokens=raw.whole("max_decoding_steps", 256, minimum=1, maximum=1 << 14),
        skipped_ids=raw.whole("fast_skip_tokens", 128, maximum=MAX_IDS),
        text_tokenizer=_folder(directory, raw.text("text_tokenizer_name", ""), "tokenizer"),
        action_tokenizer=_folder(directory, raw.text("action_tokenizer_name", ""), "action_tokenizer"),
    )


def _refuse_others(raw: Fields, directory: Path) -> None:
    if raw.number("temperature", 0.0) > 0:
        raise UserError(f"{raw.path}: temperature asks for sampled actions; they are always the most likely ones here")
    if raw.flag("use_relative_actions", False):
        raise UserError(f"{raw.path}: use_relative_actions is not supported")
    steps = read_checkpoint_json(directory / "policy_preprocessor.json").list_of("steps", dict, "a list of objects")
    for step in steps:
        config = step.get("config")
        if isinstance(config, dict) and config.get("rename_map"):
            raise UserError(
                f"{directory / 'policy_preprocessor.json'}: rename_map is not supported; rename the cameras"
            )


def _shapes(raw: Fields, directory: Path) -> tuple[DecoderShape, dict[str, Any]]:
    """Of the variant that config.json names, or of tiny_dims.json, as small reference checkpoints need."""
    decoder, vision = _VARIANTS[raw.text("paligemma_variant", "gemma_2b", choices=tuple(_VARIANTS))], dict(_VISION)
    path = directory / "tiny_dims.json"
    if not path.exists():
        return decoder, vision
    tiny = read_checkpoint_json(path)
    text, tower = tiny.inner("text"), tiny.inner("vision")
    limits = {"num_hidden_layers": MAX_LAYERS, "vocab_size": MAX_IDS}
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", *limits)
    numbers: dict[str, Any] = {name: text.whole(name, minimum=1, maximum=limits.get(name, MAX_WIDTH)) for name in names}
    vision = {name: tower.whole(name, minimum=1, maximum=limits.get(name, MAX_WIDTH)) for name in _VISION}
    return replace(decoder, **numbers), vision


def _dims(features: Fields, name: str) -> int:
    shape: list[int] = features.inner(name).list_of("shape", int, "a list with its number of values", length=1)
    if not 1 <= shape[0] <= 1 << 10:
        raise features.inner(name).wrong("shape", "a list with its number of values")
    return shape[0]


def _normalisation(directory: Path, processor: str, mode: str, feature: str, dims: int) -> Normalisation:
    """From the statistics beside a processor's JSON file."""
    if mode == "IDENTITY":
        nothing = np.zeros(dims, np.float32)
        return Normalisation(mode, nothing, nothing)
    if mode not in _BOUNDS:
        known = ", ".join((*_BOUNDS, "IDENTITY"))
        raise UserError(f"{directory / 'config.json'}: normalization_mapping has {shown(mode)}, known are {known}")
    path = directory / f"policy_{processor}.json"
    steps = read_checkpoint_json(path).list_of("steps", dict, "a list of objects")
    files = [step.get("state_file") for step in steps if isinstance(step.get("state_file"), str)]
    if len(files) != 1 or "/" in files[0]:
        raise UserError(f"{path} must name one state_file beside it, which holds the statistics")
    try:
        statistics = load_file(directory / files[0])
    except Exception as error:  # the library's own, or what opening a file raises
        raise UserError(f"{directory / files[0]} cannot be read ({error}); copy it again") from None
    found = [statistics.get(f"{feature}.{name}") for name in _BOUNDS[mode]]
    if not all(each is not None and each.shape == (dims,) and np.isfinite(each).all() for each in found):
        names = " and ".join(f"{feature}.{name}" for name in _BOUNDS[mode])
        raise UserError(f"{directory / files[0]} must hold {dims} finite numbers each as {names}, for {mode}")
    first, second = (np.asarray(each, dtype=np.float32) for each in found)
    return Normalisation(mode, first, second)


def _statistics(actions: Normalisation) -> ActionStatistics:
    """The same un-normalisation for a codec: the values of -1 and 1."""
    first, second = actions.first.astype(np.float64), actions.second.astype(np.float64)
    if actions.mode == "MEAN_STD":
        first, second = first - second, first + second
    if (first > second).any():
        raise UserError("a statistic of the actions has its smallest value above its largest; copy the file again")
    return ActionStatistics("", first, second, np.full(len(first), actions.mode != "IDENTITY"))


def _folder(directory: Path, name: str, usual: str) -> Path:
    """Of a tokenizer: the one that config.json names beside it, or the usual one."""
    named = directory / name
    return named if name and named.is_dir() else directory / usual
