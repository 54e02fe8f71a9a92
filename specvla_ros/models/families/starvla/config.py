# SPDX-License-Identifier: Apache-2.0
"""What the folder of a StarVLA run says, and what StarVLA knows of its data beside it; see `target.py`."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.statistics import MAX_VALUE, ActionStatistics
from specvla_ros.models.config import folder_beside, only_file, read_checkpoint_json
from specvla_ros.models.observation import ONLY_CAMERA
from specvla_ros.settings.json_file import Fields, shown

_FRAMEWORK = "qwenfast"  # its code asks for QwenFast, papers and cards say QwenFAST
_SCALED_BY = {"q99": ("q01", "q99"), "min_max": ("min", "max")}  # the range that becomes -1 to 1
_SCALINGS = (*_SCALED_BY, "binary", "none")
_OURS = "specvla"


@dataclass(frozen=True)
class RobotData:
    """What StarVLA's registry knows of a robot's data, and a run does not say.

    Args:
        cameras: in the order in which the policy was shown them.
        scaling: of each number of an action: of _SCALINGS.
        averaged: a larger picture is made smaller by averages (OpenCV's INTER_AREA), and not by Pillow's bilinear
            filter: as the evaluation client of these data does it.
    """

    cameras: tuple[str, ...]
    scaling: tuple[str, ...]
    averaged: bool = False


_OXE = RobotData((ONLY_CAMERA,), ("q99",) * 6 + ("binary",), averaged=True)
_ROBOTS = {
    "oxe_bridge": _OXE,
    "oxe_rt1": _OXE,
    "libero_franka": RobotData((ONLY_CAMERA, "wrist"), ("min_max",) * 6 + ("none",)),
    "openpi_libero_franka": RobotData((ONLY_CAMERA, "wrist"), ("q99",) * 7),
}
# DATASET_NAMED_MIXTURES; where there are several robots, the key of the statistics is the robot's name.
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
    """A training run's folder.

    Args:
        directory: holds config.yaml and dataset_statistics.json.
        fields: of config.yaml.
        vlm: the base model's configuration, tokenizer and processor.
        weights: of the one checkpoint to run.
    """

    directory: Path
    fields: Fields
    vlm: Path
    weights: Path


def read_run(directory: Path) -> Run:
    """What belongs to a run.

    Args:
        directory: holds config.yaml, dataset_statistics.json and checkpoints/ with one file; vlm/, the base model's
            folder, lies in it or beside it.

    Raises:
        UserError: a part is missing, or it is a run of another framework.
    """
    fields = _read_yaml(directory / "config.yaml")
    name = fields.inner("framework").text("name")
    if name.lower() != _FRAMEWORK:
        raise UserError(
            f"{directory} is a StarVLA run of {shown(name)}: of its frameworks QwenFast alone writes actions token by "
            "token, which is what can be made faster here; run it with StarVLA's own server"
        )
    vlm = folder_beside(
        directory, "vlm", "config.json, tokenizer and processor of the run's base model (framework.qwenvl.base_vlm)"
    )
    return Run(directory, fields, vlm, only_file(directory / "checkpoints", ".pt", ".safetensors"))


def _read_yaml(path: Path) -> Fields:
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as a StarVLA configuration ({error}); copy it again") from None
    return Fields(given if isinstance(given, dict) else {}, path, hint="; compare it with a released run's")


def robot_and_statistics(run: Run, unnorm_key: str) -> tuple[RobotData, ActionStatistics]:
    """What is known of a run's data, and the statistics of its actions.

    Raises:
        UserError: the data are not known, or their statistics are missing or damaged.
    """
    key, raw = _select(run, unnorm_key)
    robot = _robot(run, key)
    return robot, _statistics(key, raw, robot)


def _select(run: Run, unnorm_key: str) -> tuple[str, Fields]:
    """The key of the statistics, and those of its actions."""
    file = read_checkpoint_json(run.directory / "dataset_statistics.json")
    known = ", ".join(sorted(file.raw)) or "none"
    if not unnorm_key and len(file.raw) != 1:
        raise UserError(f"{file.path} has statistics of {len(file.raw)} datasets; set unnorm_key to one of: {known}")
    key = unnorm_key or next(iter(file.raw))
    if key not in file.raw:
        raise UserError(f"unnorm_key '{key}' is not in {file.path}; it has: {known}")
    return key, file.inner(key).inner("action")


def _robot(run: Run, key: str) -> RobotData:
    """The facts of the data, known by their name, or as the user has written it into config.yaml."""
    data = run.fields.inner("datasets").inner("vla_data")
    if _OURS in data.raw:
        ours = data.inner(_OURS)
        cameras = ours.list_of("cameras", str, "a list of names, in the order of training")
        words = f"a list with one of {', '.join(_SCALINGS)} for each number of an action"
        scaling = ours.list_of("scaling", str, words)
        if not cameras or len(set(cameras)) < len(cameras):
            raise ours.wrong("cameras", "a list of different names")
        if not scaling or not set(scaling) <= set(_SCALINGS):
            raise ours.wrong("scaling", words)
        return RobotData(tuple(cameras), tuple(scaling))
    mixture = data.text("data_mix")
    robots = _MIXTURES.get(mixture, ())
    if len(robots) > 1 and key not in robots:
        raise UserError(
            f"{run.directory}: '{mixture}' are data of {' and '.join(robots)}; set unnorm_key to one of them"
        )
    if not robots:
        raise UserError(
            f"{run.fields.path}: how actions of '{mixture}' are scaled and which cameras it has is not in the run, and "
            f"known here for {', '.join(_MIXTURES)} only: write it below datasets.vla_data as {_OURS}: "
            "{cameras: [image], scaling: [q99, q99, q99, q99, q99, q99, binary]}, as its data_config.py has it"
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
        raise UserError(f"{raw.path}: the ranges of '{key}' must not end before they begin")
    mask = np.array([scaling in _SCALED_BY for scaling in robot.scaling])
    switches = tuple(i for i, scaling in enumerate(robot.scaling) if scaling == "binary")
    return ActionStatistics(key, low, high, mask, switches)
