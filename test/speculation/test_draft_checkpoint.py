# SPDX-License-Identifier: Apache-2.0
"""Draft heads on disk: both formats, and heads of other targets."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from support.draft_heads import random_head, write_random_head

from benchmarks.random_policy import random_decoder
from specvla_ros.errors import UserError
from specvla_ros.lab.training.artifacts import save_draft_head
from specvla_ros.models.config import DecoderShape
from specvla_ros.speculation.drafters.eagle.head import load_draft_head

DECODER = random_decoder(DecoderShape(32, 64, 2, 4, 2, 8, vocab_size=50), seed=0, dtype=torch.float32)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_random_head(tmp_path / "head", DECODER, seed=5)


def as_published(directory: Path, **more: torch.Tensor) -> None:
    """SpecVLA's file: pickled, with the embeddings in it."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save({"embed_tokens.weight": torch.zeros(50, 32)} | tensors | more, directory / "pytorch_model.bin")


def test_both_formats_give_the_head_back(head: Path) -> None:
    expected = random_head(DECODER, seed=5).state_dict()
    for _ in range(2):
        loaded = load_draft_head(head, DECODER)
        for name, tensor in loaded.state_dict().items():
            assert tensor.equal(expected[name].bfloat16().float()), name
        if (head / "model.safetensors").exists():
            as_published(head)


def test_a_parallel_head_comes_back_with_its_masks(tmp_path: Path) -> None:
    made = random_head(DECODER, seed=5, parallel_depth=4)
    save_draft_head(tmp_path, made)
    loaded = load_draft_head(tmp_path, DECODER)
    assert loaded.parallel_depth == 4 and loaded.mask_rows.equal(made.mask_rows.bfloat16().float())
    for one, other in zip(loaded.branch.parameters(), made.branch.parameters(), strict=True):
        assert one.equal(other.bfloat16().float())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"parallel_depth": 3}))
    with pytest.raises(UserError, match="mask_rows"):
        load_draft_head(tmp_path, DECODER)
    (tmp_path / "config.json").write_text(json.dumps(config | {"parallel_depth": 0}))
    with pytest.raises(UserError, match="parallel_depth"):
        load_draft_head(tmp_path, DECODER)


def test_a_parallel_head_of_a_version_without_branches_is_refused(tmp_path: Path) -> None:
    save_draft_head(tmp_path, random_head(DECODER, seed=5, parallel_depth=4))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if "branch" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"without branches.*train it again with `specvla train-draft --parallel-depth"):
        load_draft_head(tmp_path, DECODER)


def test_a_head_of_another_target_is_refused(head: Path) -> None:
    other = random_decoder(DecoderShape(48, 64, 2, 6, 2, 8, vocab_size=50), seed=0, dtype=torch.float32)
    with pytest.raises(UserError, match=r"hidden size 32, but this target's is 48.*specvla train-draft"):
        load_draft_head(head, other)
    other = random_decoder(DecoderShape(32, 64, 2, 4, 2, 16, vocab_size=50), seed=0, dtype=torch.float32)
    with pytest.raises(UserError, match="made for another target"):
        load_draft_head(head, other)


def add(directory: Path, kind: str, **more: torch.Tensor) -> None:
    """More tensors into the head's file, which is then of this kind."""
    if kind == "bin":
        as_published(directory, **more)
    else:
        tensors = load_file(directory / "model.safetensors")
        save_file(tensors | more, directory / "model.safetensors")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_head_of_another_vocabulary_is_refused(head: Path, kind: str) -> None:
    add(head, kind, **{"embed_tokens.weight": torch.zeros(51, 32)})
    with pytest.raises(UserError, match="vocabulary of 51 ids, but this target has 50"):
        load_draft_head(head, DECODER)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_head_of_another_kind_is_refused(head: Path, kind: str) -> None:
    add(head, kind, **{"layers.0.input_layernorm.weight": torch.ones(32)})
    with pytest.raises(UserError, match=r"input_layernorm.*this kind of draft head is not supported"):
        load_draft_head(head, DECODER)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_missing_and_misshapen_tensors_are_named(head: Path, kind: str) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"] = torch.zeros(3, 3)
    del tensors["fc.bias"]
    save_file(tensors, head / "model.safetensors")
    if kind == "bin":
        as_published(head)
    with pytest.raises(UserError, match=r"fc\.bias"):
        load_draft_head(head, DECODER)


def test_damaged_files_say_so(head: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_draft_head(tmp_path / "nowhere", DECODER)
    whole = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(UserError, match="damaged or cut off"):
        load_draft_head(head, DECODER)
    (head / "model.safetensors").unlink()
    (head / "pytorch_model.bin").write_bytes(b"\x80\x02no pickle")
    with pytest.raises(UserError, match="damaged or contains more than tensors"):
        load_draft_head(head, DECODER)
    edit_json(head / "config.json", lambda config: config.pop("hidden_size"))
    with pytest.raises(UserError, match=r"config\.json"):
        load_draft_head(head, DECODER)


def test_a_missing_file_is_named(head: Path) -> None:
    (head / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor pytorch_model\.bin.*specvla train-draft"):
        load_draft_head(head, DECODER)
    (head / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json is missing.*copy it there"):
        load_draft_head(head, DECODER)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(num_attention_heads="many"),
        dict(num_attention_heads=0, head_dim=None),
        dict(num_attention_heads=-4),
        dict(num_key_value_heads=-2),
        dict(num_key_value_heads=3),
        dict(intermediate_size=-1),
    ],
    ids=str,
)
def test_a_config_of_no_possible_layer_is_refused(head: Path, wrong: dict) -> None:
    edit_json(head / "config.json", lambda config: config.update(wrong))
    with pytest.raises(UserError, match=r"config\.json: "):
        load_draft_head(head, DECODER)


def test_pickled_files_of_every_age_are_read_and_empty_ones_refused(head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    pickled = head / "pytorch_model.bin"
    torch.save(tensors, pickled, _use_new_zipfile_serialization=False)
    assert load_draft_head(head, DECODER).fc.bias.equal(tensors["fc.bias"].float())
    torch.save(tensors | {"fc.bias": 3}, pickled)
    with pytest.raises(UserError, match="contains no tensors by name"):
        load_draft_head(head, DECODER)
    pickled.write_bytes(b"")
    with pytest.raises(UserError, match="damaged or contains more than tensors"):
        load_draft_head(head, DECODER)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(head: Path, number: float) -> None:
    tensors = load_file(head / "model.safetensors")
    next(iter(tensors.values())).view(-1)[3] = number
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(UserError, match="NaN or infinity; train it again"):
        load_draft_head(head, DECODER)


def test_a_whole_model_is_no_head(head: Path) -> None:
    edit_json(head / "config.json", lambda config: config.update(num_hidden_layers=32))
    with pytest.raises(UserError, match="has one layer, but this model has 32"):
        load_draft_head(head, DECODER)


def test_the_config_names_the_shape(head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (32, 2, 8)
