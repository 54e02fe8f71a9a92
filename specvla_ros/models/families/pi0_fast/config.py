# SPDX-License-Identifier: Apache-2.0
"""Configuration of a pi0-FAST checkpoint as saved by LeRobot: config.json, and the statistics of its two processors.

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
GEMMA_2B = replace(
    DECODERS["gemma"],
    hidden_size=2048,
    intermediate_size=16384,
    num_hidden_layers=18,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=257152,
)
_VARIANTS = {"gemma_2b": GEMMA_2B, "gemma_300m": replace(GEMMA_2B, hidden_size=1024, intermediate_size=4096)}
# SigLIP-So400m/14, as in PaliGemma.
_VISION: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
_EPS = 1e-8  # NormalizerProcessorStep's
_MAX_CAMERAS = 64
# Steps of the two processors; each is implemented here, or does not change answers. LeRobot follows them where
# config.json has the same settings.
_NEEDED = ("normalizer_processor", "tokenizer_processor", "unnormalizer_processor")
_NORMALISER, _TOKENIZER, _UNNORMALISER = _NEEDED
_STEPS = {
    "preprocessor": (
        "rename_observations_processor",
        "to_batch_processor",
        "relative_actions_processor",
        _NORMALISER,
        "pi0_fast_prepare_state_tokenizer_processor_step",
        _TOKENIZER,
        "action_tokenizer_processor",
        "device_processor",
    ),
    "postprocessor": (_UNNORMALISER, "absolute_actions_processor", "device_processor"),
}
# Normalisation modes, and the two statistics that each needs.
_BOUNDS = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99")}


@dataclass(frozen=True)
class Pi0FastConfig:
    """Configuration of a pi0-FAST policy."""

    decoder: DecoderShape  # the language model
    vision: Mapping[str, Any]  # arguments of transformers' SiglipVisionConfig
    cameras: tuple[str, ...]  # names of all its cameras, in the policy's order
    image_size: tuple[int, int]  # height and width
    state: "Normalisation"  # normalises the robot's state
    actions: ActionStatistics  # un-normalises its actions
    chunk: int  # actions per answer
    prompt_tokens: int  # longest prompt
    answer_tokens: int  # maximum length of an answer
    skipped_ids: int  # ids at the vocabulary's end that are not FAST tokens
    text_tokenizer: Path  # its folder
    action_tokenizer: Path  # its folder


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of one vector, in float32 as in LeRobot."""

    mode: str  # MEAN_STD, MIN_MAX, QUANTILES or IDENTITY
    first: np.ndarray  # float32 [dims], mean or lower bound; for IDENTITY only its length counts
    second: np.ndarray  # float32 [dims], standard deviation or upper bound

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Normalises float [dims] in the robot's units to float32 [dims], about [-1, 1]."""
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
    before, after = (_steps(directory, processor) for processor in _STEPS)
    if raw.number("temperature", 0.0) > 0:
        raise UserError(f"{raw.path}: temperature above 0 asks for sampling, but decoding is always greedy")
    decoder, vision = _shapes(raw, directory)
    inputs, outputs = raw.inner("input_features"), raw.inner("output_features")
    # LeRobot adds inputs of these names to the file; no image is ever given for them, and their rows are masked.
    empty = {f"empty_camera_{i}" for i in range(raw.whole("empty_cameras", 0, maximum=_MAX_CAMERAS))}
    named = (name.removeprefix(_CAMERA) for name in inputs.raw if name.startswith(_CAMERA))
    cameras = tuple(name for name in named if name not in empty)
    if not cameras:
        raise UserError(f"{raw.path}: input_features names no camera (observation.images.…)")
    height, width = raw.list_of("image_resolution", int, "height and width in pixels", [224, 224], length=2)
    if not (1 <= height == width <= 4096):
        raise raw.wrong("image_resolution", "the same height and width, from 1 to 4096 pixels")
    # Images are normalised as SigLIP's, by the policy; the step would normalise them by a data set's statistics before.
    before[_NORMALISER].inner("config").inner("norm_map").text("VISUAL", "IDENTITY", choices=("IDENTITY",))
    state = _normalisation(before[_NORMALISER], "STATE", _STATE, _dims(inputs, _STATE))
    actions = _normalisation(after[_UNNORMALISER], "ACTION", _ACTION, _dims(outputs, _ACTION))
    return Pi0FastConfig(
        decoder=decoder,
        vision=vision | {"image_size": height, "vision_use_head": False},
        cameras=cameras,
        image_size=(height, width),
        state=state,
        actions=_statistics(actions, after[_UNNORMALISER].path),
        chunk=raw.whole("chunk_size", minimum=1, maximum=1 << 10),
        prompt_tokens=before[_TOKENIZER].inner("config").whole("max_length", minimum=1, maximum=1 << 14),
        answer_tokens=raw.whole("max_decoding_steps", 256, minimum=1, maximum=1 << 14),
        skipped_ids=raw.whole("fast_skip_tokens", 128, maximum=MAX_IDS),
        text_tokenizer=_folder(directory, raw.text("text_tokenizer_name", ""), "tokenizer"),
        action_tokenizer=_folder(directory, raw.text("action_tokenizer_name", ""), "action_tokenizer"),
    )


def _steps(directory: Path, processor: str) -> dict[str, Fields]:
    """A processor's steps by name; UserError if it has an unsupported one, or lacks one."""
    path, known = directory / f"policy_{processor}.json", _STEPS[processor]
    given = read_checkpoint_json(path).list_of("steps", dict, "a list of objects")
    names = [step.get("registry_name") or step.get("class") for step in given]
    unknown = [name for name in names if name not in known or names.count(name) > 1]
    missing = [name for name in known if name in _NEEDED and name not in names]
    if unknown or missing:
        wrong = f"has {shown(unknown[0])}, which is not supported" if unknown else f"lacks {missing[0]}"
        raise UserError(f"{path} {wrong}; supported steps, once each: {', '.join(known)}")
    steps = {
        name: Fields(step, path, f"steps[{i}].", "; compare it with a released checkpoint's")
        for i, (name, step) in enumerate(zip(names, given, strict=True))
    }
    for step in steps.values():
        config = step.inner("config", {})
        if config.flag("enabled", False):
            raise UserError(f"{path}: relative actions are not supported")
        if config.raw.get("rename_map"):
            raise UserError(f"{path}: rename_map is not supported; rename the cameras")
    return steps


def _shapes(raw: Fields, directory: Path) -> tuple[DecoderShape, dict[str, Any]]:
    """Shapes of config.json's variant, or of tiny_dims.json for small reference checkpoints."""
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


def _normalisation(step: Fields, kind: str, feature: str, dims: int) -> Normalisation:
    """Reads a step's normalisation, with the statistics in a file next to it."""
    config, directory = step.inner("config"), step.path.parent
    modes = config.inner("norm_map")
    mode = modes.text(kind, "IDENTITY", choices=(*_BOUNDS, "IDENTITY"))
    keys = config.raw.get("normalize_observation_keys")
    if config.number("eps", _EPS) != _EPS or (feature == _STATE and keys is not None and _STATE not in keys):
        raise UserError(f"{step.path}: only eps {_EPS} without normalize_observation_keys is supported")
    if mode == "IDENTITY":
        nothing = np.zeros(dims, np.float32)
        return Normalisation(mode, nothing, nothing)
    name = step.text("state_file")
    if "/" in name:
        raise step.wrong("state_file", "the name of the statistics file next to it")
    path = directory / name
    try:
        statistics = load_file(path)
    except Exception as error:  # the library's own, or what opening a file raises
        raise UserError(f"{path} cannot be read ({error}); copy it again") from None
    found = [statistics.get(f"{feature}.{each}") for each in _BOUNDS[mode]]
    if not all(each is not None and each.shape == (dims,) and np.isfinite(each).all() for each in found):
        names = " and ".join(f"{feature}.{each}" for each in _BOUNDS[mode])
        raise UserError(f"{path} must contain {dims} finite numbers each as {names}, for {mode}")
    first, second = (np.asarray(each, dtype=np.float32) for each in found)
    return Normalisation(mode, first, second)


def _statistics(actions: Normalisation, path: Path) -> ActionStatistics:
    """The same un-normalisation for a codec: the values that -1 and 1 map to."""
    first, second = actions.first.astype(np.float64), actions.second.astype(np.float64)
    if actions.mode == "MEAN_STD":
        first, second = first - second, first + second
    if (first > second).any():
        raise UserError(f"{path}: its state_file has an action whose minimum exceeds its maximum; copy the file again")
    return ActionStatistics("", first, second, np.full(len(first), actions.mode != "IDENTITY"))


def _folder(directory: Path, name: str, usual: str) -> Path:
    """A tokenizer's folder: the one that config.json names, or the usual one."""
    named = directory / name
    return named if name and named.is_dir() else directory / usual
