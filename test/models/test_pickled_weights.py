# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose weights are PyTorch's own files, whole and in shards, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import write_checkpoint

from specvla_ros import UserError
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.openvla.target import require_openvla


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path


def to_bin(directory: Path, *, shards: int = 1, legacy: bool = False) -> dict[str, torch.Tensor]:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return tensors
    weight_map = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(names)}
    for file in {*weight_map.values()}:
        torch.save({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize(("shards", "legacy"), [(1, False), (3, False), (1, True)])
def test_the_same_weights_load(checkpoint: Path, shards: int, legacy: bool) -> None:
    expected = to_bin(checkpoint, shards=shards, legacy=legacy)
    found = require_openvla(load_target(checkpoint, device="cpu")).model.checkpoint_tensors()
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in found)


def test_whole_numbers_are_quantised_weights(checkpoint: Path) -> None:
    tensors = to_bin(checkpoint)
    tensors["projector.fc1.weight"] = tensors["projector.fc1.weight"].to(torch.int8)
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"projector.fc1.weight has values of format torch.int8"):
        load_target(checkpoint, device="cpu")


@pytest.mark.parametrize("value", [[1, 2], {"model": {"a": torch.zeros(1)}}])
def test_a_file_of_something_else(checkpoint: Path, value: object) -> None:
    to_bin(checkpoint)
    torch.save(value, checkpoint / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin (contains a list|has no named weights)"):
        load_target(checkpoint, device="cpu")
