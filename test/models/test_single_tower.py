# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with SigLIP alone: one tower, a projector of two layers."""

from pathlib import Path

import numpy as np
import torch
from support.checkpoints import edit_json, load_openvla, write_checkpoint

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.training.artifacts import save_weights
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.observation import Observation


def keep_siglip(directory: Path) -> None:
    def edit(config: dict) -> None:
        config["use_fused_vision_backbone"] = False
        config["vision_backbone_id"] = "siglip-vit-so400m"
        for name in ("timm_model_ids", "timm_override_act_layers", "tiny_timm_model_kwargs", "image_sizes"):
            config[name] = config[name][1:]

    def edit_preprocessor(config: dict) -> None:
        for name in ("input_sizes", "interpolations", "means", "stds"):
            config[name] = config[name][1:]

    edit_json(directory / "config.json", edit)
    edit_json(directory / "preprocessor_config.json", edit_preprocessor)
    model = OpenVLA(read_config(directory))
    tensors = model.checkpoint_tensors()
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        tensor.normal_(0, 0.1, generator=generator)
    tensors["language_model.lm_head.weight"][: -256 - 64] = 0
    tensors["language_model.lm_head.weight"][-64:] = 0
    save_weights(directory / "model.safetensors", tensors)


def test_siglip_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    keep_siglip(tmp_path)

    policy = load_openvla(tmp_path, device="cpu")

    names = policy.model.checkpoint_tensors()
    assert not any("fused_featurizer" in name or "projector.fc3" in name for name in names)
    assert names["projector.fc1.weight"].shape == (64, 48)
    assert not any("cls_token" in name for name in names)
    image = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    action = Engine(policy, EngineSettings("ar")).act(Observation(image, "push the button", stamp_ns=1))
    assert isinstance(action, Action)


def test_released_shapes_are_known_by_their_model_ids(tmp_path: Path) -> None:
    """OpenVLA-7B's config.json gives sizes by name alone."""
    write_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.pop("tiny_timm_model_kwargs") and None)
    edit_json(tmp_path / "config.json", lambda config: config.update(text_config={"vocab_size": 32064}))
    config = read_config(tmp_path)
    with torch.device("meta"):
        model = OpenVLA(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.checkpoint_tensors().items()}
    assert shapes["vision_backbone.featurizer.blocks.22.attn.qkv.weight"] == (3072, 1024)
    assert shapes["vision_backbone.featurizer.reg_token"] == (1, 4, 1024)
    assert shapes["vision_backbone.fused_featurizer.blocks.25.mlp.fc1.weight"] == (4304, 1152)
    assert shapes["projector.fc1.weight"] == (8704, 2176)
    assert shapes["language_model.model.layers.31.mlp.down_proj.weight"] == (4096, 11008)
    assert shapes["language_model.lm_head.weight"] == (32064, 4096)
    assert config.image_tokens == 256
    assert config.token_vocab_size == 32000
