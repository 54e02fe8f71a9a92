# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints for tests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from support.random_checkpoint import write_random_checkpoint

from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.bins import BinsCodec
from specvla_ros.models.families.openvla.target import OpenVLATarget, require_openvla


def write_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """A random checkpoint, small enough to load in milliseconds."""
    write_random_checkpoint(directory, seed=seed, hidden_size=64, layers=2)
    return directory


def load_openvla(directory: Path, **options: Any) -> OpenVLATarget:
    """What `load_target` loads, for tests of what OpenVLA alone has."""
    return require_openvla(load_target(directory, **options))


def bins_of(policy: OpenVLATarget) -> BinsCodec:
    """Its codec, for tests of a policy that writes bins."""
    assert isinstance(policy.codec, BinsCodec)
    return policy.codec


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes a JSON file in place."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def copy_checkpoint(source: Path, destination: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(source, destination))


def shard(directory: Path) -> list[str]:
    """Splits the weights over two files, as the Hub does; gives their names."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text("{}")
    edit_json(directory / "model.safetensors.index.json", lambda index: index.update(weight_map=weight_map))
    return sorted(set(weight_map.values()))


SENSORS_CAMERAS = ("image", "left", "wrist")


def with_sensors(directory: Path, **changes: Any) -> Path:
    """A checkpoint of the same weights with three cameras and two numbers of state."""
    proprio = {"q01": [-1.0, 0.0], "q99": [1.0, 0.08], "mask": [True, True]}

    def edit(config: dict[str, Any]) -> None:
        config |= {"cameras": SENSORS_CAMERAS, "state_dims": 2} | changes
        for statistics in config["norm_stats"].values():
            statistics["proprio"] = proprio

    edit_json(directory / "config.json", edit)
    return directory
