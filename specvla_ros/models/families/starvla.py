# SPDX-License-Identifier: Apache-2.0
"""StarVLA's QwenFast, from the folder of its training run: Qwen2.5-VL or Qwen3-VL that writes a chunk in FAST tokens.

Source: starVLA/starVLA (0ed0aad): model/framework/VLM4A/QwenFast.py, model/modules/vlm, deployment/model_server,
dataloader/gr00t_lerobot/transform/state_action.py, and the data_config.py and evaluation clients of its examples.
Answers that are not a chunk are refused here; that class repairs them (with zero coefficients, or by dropping text
between the tokens).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from specvla_ros.errors import UserError, missing_package
from specvla_ros.models.codecs.statistics import MAX_VALUE, ActionStatistics, select_key
from specvla_ros.models.config import folder_beside, only_file, read_checkpoint_json, refuse_adapter
from specvla_ros.models.families.qwen_vl.model import load_model
from specvla_ros.models.families.qwen_vl.nora import SIDE, has_robot_actions, robot_action_codec, robot_action_policy
from specvla_ros.models.families.qwen_vl.policy import ChatPolicy, PolicyContext, read_yaml
from specvla_ros.models.families.qwen_vl.target import QwenVLTarget, qwen_vl_target, read_base
from specvla_ros.models.observation import ONLY_CAMERA
from specvla_ros.models.settings import refuse_options
from specvla_ros.models.target import TARGETS
from specvla_ros.models.weights import Progress
from specvla_ros.settings.json_file import Fields, shown

_HORIZON = 16  # QwenFastDefaultConfig's future_action_window_size + 1
_PREFIX = "qwen_vl_interface.model."  # of a tensor's name
_PLACE = "{instruction}"
_FRAMEWORK = "qwenfast"  # QwenFast in its code, QwenFAST in papers and model cards
_SCALED_BY = {"q99": ("q01", "q99"), "min_max": ("min", "max")}  # the range that maps to -1 to 1
_SCALINGS = (*_SCALED_BY, "binary", "none")
_OURS = "specvla"


@dataclass(frozen=True)
class RobotData:
    """StarVLA's registry entry for a robot's data, which a run does not contain."""

    cameras: tuple[str, ...]  # in the order of training
    scaling: tuple[str, ...]  # per action dimension, from _SCALINGS
    averaged: bool = False  # its client resizes images with INTER_AREA, not with Pillow's bilinear filter


_OXE = RobotData((ONLY_CAMERA,), ("q99",) * 6 + ("binary",), averaged=True)
_ROBOTS = {
    "oxe_bridge": _OXE,
    "oxe_rt1": _OXE,
    "libero_franka": RobotData((ONLY_CAMERA, "wrist"), ("min_max",) * 6 + ("none",)),
    "openpi_libero_franka": RobotData((ONLY_CAMERA, "wrist"), ("q99",) * 7),
}
# DATASET_NAMED_MIXTURES; with several robots, the key of the statistics is the robot's name.
_MIXTURES = {
    "bridge": ("oxe_bridge",),
    "bridge_rt_1": ("oxe_bridge", "oxe_rt1"),
    "libero_all": ("libero_franka",),
    "libero_goal": ("libero_franka",),
    "multi_robot": ("libero_franka",),
    "openpi_libero_all": ("openpi_libero_franka",),
}


@dataclass(frozen=True)
class Run:
    """A training run's folder."""

    directory: Path  # contains config.yaml and dataset_statistics.json
    fields: Fields  # of config.yaml
    vlm: Path  # the base model's configuration, tokenizer and processor
    weights: Path  # of the checkpoint to run


def read_run(directory: Path) -> Run:
    """Reads the parts of a run; UserError if one is missing, or the run is of another framework.

    Args:
        directory: contains config.yaml, dataset_statistics.json and checkpoints/ with one file; vlm/, the base model's
            folder, is inside it or next to it.
    """
    fields = read_yaml(directory / "config.yaml", "StarVLA")
    name = fields.inner("framework").text("name")
    if name.lower() != _FRAMEWORK:
        raise UserError(
            f"{directory} is a StarVLA run of {shown(name)}, but only QwenFast, which writes actions token by token, "
            "is supported; run it with StarVLA's own server"
        )
    vlm = folder_beside(
        directory, "vlm", "config.json, tokenizer and processor of the run's base model (framework.qwenvl.base_vlm)"
    )
    refuse_adapter(vlm)
    return Run(directory, fields, vlm, only_file(directory / "checkpoints", ".pt", ".safetensors"))


def _robot(run: Run, key: str) -> RobotData:
    """The robot of a data set's name, or as written into config.yaml by the user."""
    data = run.fields.inner("datasets").inner("vla_data")
    if _OURS in data.raw:
        ours = data.inner(_OURS)
        cameras = ours.list_of("cameras", str, "a list of names, in the order of training")
        words = f"a list with one of {', '.join(_SCALINGS)} for each action dimension"
        scaling = ours.list_of("scaling", str, words)
        if not cameras or len(set(cameras)) < len(cameras):
            raise ours.wrong("cameras", "a list of distinct names")
        if not scaling or not set(scaling) <= set(_SCALINGS):
            raise ours.wrong("scaling", words)
        return RobotData(tuple(cameras), tuple(scaling))
    mixture = data.text("data_mix")
    robots = _MIXTURES.get(mixture, ())
    if len(robots) > 1 and key not in robots:
        raise UserError(
            f"{run.directory}: '{mixture}' has data of {' and '.join(robots)}; set unnorm_key to one of them"
        )
    if not robots:
        raise UserError(
            f"{run.fields.path}: the run lacks the cameras and action scaling of '{mixture}', which are "
            f"built in only for {', '.join(_MIXTURES)}: add them under datasets.vla_data as {_OURS}: "
            "{cameras: [image], scaling: [q99, q99, q99, q99, q99, q99, binary]}, as in its data_config.py"
        )
    return _ROBOTS[key if len(robots) > 1 else robots[0]]


def _statistics(key: str, raw: Fields, robot: RobotData) -> ActionStatistics:
    n = len(robot.scaling)
    ranges: dict[str, np.ndarray] = {}
    for name in {name for scaling in robot.scaling for name in _SCALED_BY.get(scaling, ())}:
        values = raw.list_of(name, float, f"a list of {n} numbers", length=n)
        if max(map(abs, values)) > MAX_VALUE:
            raise raw.wrong(name, f"{n} numbers of at most {MAX_VALUE:g}")
        ranges[name] = np.float64(values)
    low, high = np.zeros(n), np.ones(n)
    for i, scaling in enumerate(robot.scaling):
        if scaling in _SCALED_BY:
            first, second = _SCALED_BY[scaling]
            low[i], high[i] = ranges[first][i], ranges[second][i]
    if not (low <= high).all():
        raise UserError(f"{raw.path}: the ranges of '{key}' need a lower bound that is not above the upper one")
    mask = np.array([scaling in _SCALED_BY for scaling in robot.scaling])
    switches = tuple(i for i, scaling in enumerate(robot.scaling) if scaling == "binary")
    return ActionStatistics(key, low, high, mask, switches)


@TARGETS.register("starvla-run")
def load_starvla(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    unnorm_key: str,
    progress: Progress,
    **options: Any,
) -> QwenVLTarget:
    """Loads StarVLA's QwenFast from the folder of its training run, see `read_run`, with `load_target`'s arguments."""
    refuse_options(directory, options)
    run = read_run(directory)
    config, context = read_base(run.vlm, unnorm_key)
    policy = _qwen_fast(run, context)
    load = partial(load_model, run.weights, config, device=device, dtype=dtype, progress=progress, prefix=_PREFIX)
    return qwen_vl_target(directory, config, context, policy, load)


def _qwen_fast(run: Run, context: PolicyContext) -> ChatPolicy:
    if not has_robot_actions(context.tokenizer):
        raise UserError(
            f"{run.vlm} has no tokens from <robot_action_0> on: it is not the base model that the run was trained from"
        )
    file = read_checkpoint_json(run.directory / "dataset_statistics.json")
    key = select_key(file.raw, context.unnorm_key, str(file.path))
    robot = _robot(run, key)
    statistics = _statistics(key, file.inner(key).inner("action"), robot)
    action = run.fields.inner("framework").inner("action_model", {})
    dims = action.whole("action_dim", len(robot.scaling), minimum=1, maximum=1 << 10)
    if dims != len(robot.scaling):
        raise UserError(f"{run.fields.path}: action_dim is {dims}, but the data have {len(robot.scaling)}")
    codec = robot_action_codec(
        context, run.directory, statistics, horizon=_horizon(action), limit=context.generation.max_new_tokens
    )
    prompt, sent = _prompt(run), _sent(averaged=robot.averaged)
    return robot_action_policy(
        "starvla", context, codec, robot.cameras, sent, lambda instruction: prompt.replace(_PLACE, instruction)
    )


def _horizon(action: Fields) -> int:
    """Actions per answer, read from old and new files as in StarVLA's compatibility layer."""
    window = action.whole("future_action_window_size", _HORIZON - 1, maximum=(1 << 10) - 1)
    return action.whole("action_horizon", window + 1, minimum=1, maximum=1 << 10)


def _prompt(run: Run) -> str:
    data = run.fields.inner("datasets").inner("vla_data")
    prompt = data.text("CoT_prompt", _PLACE)
    if _PLACE not in prompt:
        raise data.wrong("CoT_prompt", f"a string with {_PLACE} in it: the prompt would otherwise lack the instruction")
    return prompt


def _sent(*, averaged: bool) -> Callable[[np.ndarray], np.ndarray]:
    """The evaluation clients' resizing of a camera image to uint8 RGB [SIDE, SIDE, 3]; aspect ratio not kept.

    Raises UserError if OpenCV is not installed.
    """
    if not averaged:
        size = (SIDE, SIDE)
        return lambda image: np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    try:
        import cv2
    except ModuleNotFoundError as error:
        raise missing_package(error) from None
    return lambda image: np.asarray(cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA))
