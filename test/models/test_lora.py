# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters, merged while a checkpoint is loaded: against PEFT's own merge, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, write_checkpoint
from support.random_qwen_vl import FAST_IDS, SHAPES, add_nora, write_qwen_vl
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from specvla_ros import UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.lora import bare_name, read_adapter

MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv", "proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "every matrix": dict(r=4, lora_alpha=12, target_modules=MATRICES),
    "by the root of the rank": dict(r=5, lora_alpha=3, target_modules=["q_proj", "v_proj"], use_rslora=True),
    "patterns": dict(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 2},
        alpha_pattern={"down_proj": 1, r"layers\.1\.self_attn\.q_proj": 5},
    ),
    "patterns that name a module from the root on, beside more general ones": dict(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={"^model.language_model.layers.1.self_attn.q_proj": 5, "model.language_model.layers.0.mlp.*": 1},
        use_rslora=True,
    ),
    "embeddings, and modules of their own": dict(
        r=4, lora_alpha=8, target_modules=["embed_tokens", "k_proj"], modules_to_save=["lm_head"]
    ),
    "biases": dict(r=2, lora_alpha=2, target_modules=["q_proj"], bias="lora_only"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_nora(write_qwen_vl(tmp_path_factory.mktemp("base"), SHAPES[1], seed=1, actions=FAST_IDS))


def adapted(base: Path, directory: Path, options: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    """A copy of the base with a random adapter that PEFT has saved beside it, and what PEFT makes of both."""
    shutil.copytree(base, directory)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    made: Any = get_peft_model(model, LoraConfig(**options))
    torch.manual_seed(0)
    for parameter in made.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.4)
    made.save_pretrained(directory)
    return directory, {bare_name(name): tensor for name, tensor in made.merge_and_unload().state_dict().items()}


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_weights_are_those_that_peft_merges(base: Path, tmp_path: Path, name: str) -> None:
    directory, merged = adapted(base, tmp_path / "policy", ADAPTERS[name])
    target: Any = load_target(directory, device="cpu", dtype="float32")
    plain: Any = load_target(base, device="cpu", dtype="float32")
    for key, value in target.model.visual.named_parameters():
        torch.testing.assert_close(value, merged[f"visual.{key}"], atol=1e-6, rtol=1e-5)
    question = torch.tensor([[1, 5, 9, 2]])
    reference: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    reference.load_state_dict({key: merged[bare_name(key)] for key in reference.state_dict()})
    with torch.inference_mode():
        logits = reference(input_ids=question).logits[0]
    torch.testing.assert_close(forward(target, question[0]), logits, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(forward(plain, question[0]), logits, atol=1e-2)


def forward(target: Any, ids: Tensor) -> Tensor:
    cache = new_cache(target.decoder, slots=1, slot_rows=len(ids))
    return packed_forward(target.decoder, [Segment(0, 0, ids, wanted=len(ids))], cache).logits


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose head is its table of embeddings, as those of NORA and VLA-0 are."""
    return add_nora(write_qwen_vl(tmp_path_factory.mktemp("tied"), SHAPES[0], seed=1, actions=FAST_IDS))


ON_TABLES: dict[str, dict[str, Any]] = {
    "its own head": dict(target_modules=["k_proj"], modules_to_save=["lm_head"]),
    "its own embeddings": dict(target_modules=["k_proj"], modules_to_save=["embed_tokens"]),
    "factors of the head": dict(target_modules=["lm_head"]),
    "factors of the embeddings": dict(target_modules=["embed_tokens"]),
    "tied factors": dict(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
}


@pytest.mark.parametrize("name", ON_TABLES)
@torch.no_grad()
def test_an_adapter_on_one_of_two_tied_tables_leaves_the_other(tied: Path, tmp_path: Path, name: str) -> None:
    """Against the adapted model that was trained: PEFT's merge of factors puts them into both tables."""
    directory = Path(shutil.copytree(tied, tmp_path / "policy"))
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(tied, dtype=torch.float32)
    made: Any = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, **ON_TABLES[name])).eval()
    torch.manual_seed(0)
    for parameter in made.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.4)
    made.save_pretrained(directory)
    question = torch.tensor([[1, 5, 9, 2]])
    logits = made(input_ids=question).logits[0]
    target: Any = load_target(directory, device="cpu", dtype="float32")
    torch.testing.assert_close(forward(target, question[0]), logits, atol=2e-4, rtol=1e-4)
    plain: Any = load_target(tied, device="cpu", dtype="float32")
    assert not torch.allclose(forward(plain, question[0]), logits, atol=1e-2)


@pytest.mark.parametrize("own", [False, True])
@torch.no_grad()
def test_a_head_beside_tied_embeddings_is_used_as_transformers_does(tied: Path, tmp_path: Path, own: bool) -> None:
    directory = Path(shutil.copytree(tied, tmp_path / "policy"))
    weights = load_file(directory / "model.safetensors")
    (name,) = (each for each in weights if each.endswith("embed_tokens.weight"))
    head = torch.randn(weights[name].shape) if own else weights[name].clone()
    save_file(weights | {"lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})
    question = torch.tensor([[1, 5, 9, 2]])
    reference: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    target: Any = load_target(directory, device="cpu", dtype="float32")
    torch.testing.assert_close(forward(target, question[0]), reference(input_ids=question).logits[0])
    assert (target.decoder.lm_head.weight is target.decoder.embed_tokens.weight) is not own


def write_adapter(directory: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config))


@pytest.fixture
def openvla(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "openvla")


QUERY = "language_model.model.layers.0.self_attn.q_proj"


def query_factors(directory: Path) -> dict[str, Tensor]:
    out, into = load_file(directory / "model.safetensors")[f"{QUERY}.weight"].shape
    generator = torch.Generator().manual_seed(0)
    return {
        f"{QUERY}.lora_A.weight": torch.randn(2, into, generator=generator),
        f"{QUERY}.lora_B.weight": torch.randn(out, 2, generator=generator),
    }


def test_openvla_with_an_adapter_is_the_merged_checkpoint(openvla: Path, tmp_path: Path) -> None:
    factors = query_factors(openvla)
    merged = Path(shutil.copytree(openvla, tmp_path / "merged"))
    tensors = load_file(merged / "model.safetensors")
    tensors[f"{QUERY}.weight"] += 2.0 * factors[f"{QUERY}.lora_B.weight"] @ factors[f"{QUERY}.lora_A.weight"]
    save_file(tensors, merged / "model.safetensors")
    write_adapter(openvla, factors)
    ours, theirs = (load_target(each, device="cpu") for each in (openvla, merged))
    for one, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        torch.testing.assert_close(one, other)


def test_an_adapter_is_said_and_one_that_was_merged_before_hinted_at(
    openvla: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "adapter" not in load_target(openvla, device="cpu").describe() and not caplog.records
    factors = query_factors(openvla)
    write_adapter(openvla, factors, base_model_name_or_path="openvla/openvla-7b")
    described = load_target(openvla, device="cpu").describe()
    assert described["adapter"] == "merged, trained on 'openvla/openvla-7b'"
    (said,) = caplog.messages
    assert said == f"{openvla} has an adapter: merged, trained on 'openvla/openvla-7b'"
    caplog.clear()
    tensors = load_file(openvla / "model.safetensors")
    tensors[f"{QUERY}.weight"] += 2.0 * factors[f"{QUERY}.lora_B.weight"] @ factors[f"{QUERY}.lora_A.weight"]
    save_file(tensors, openvla / "model.safetensors")
    load_target(openvla, device="cpu", quantization="w8a8")
    assert len(caplog.messages) == 2
    assert "seem to have been merged with this adapter before: if so, remove adapter_config.json" in caplog.messages[1]


def tensors_of(target: Any) -> list[Tensor]:
    return list(target.model.checkpoint_tensors().values())


def refuse(directory: Path, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_target(directory, device="cpu")


def test_an_adapter_of_another_base_is_refused(openvla: Path) -> None:
    factors = query_factors(openvla)
    write_adapter(openvla, {name.replace("layers.0", "layers.31"): tensor for name, tensor in factors.items()})
    refuse(openvla, r"layers.31.self_attn.q_proj.weight .* has none: the adapter was trained on another base model")
    wide = {name: tensor.repeat(1, 2) if "lora_A" in name else tensor for name, tensor in factors.items()}
    write_adapter(openvla, wide)
    refuse(openvla, r"q_proj.weight of shape .* one of shape .*: the adapter was trained on another base model")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', which is not supported"),
        ({"use_dora": True}, "use_dora is (True|true)"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is (True|true)"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported"),
        ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens is"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much', but it must be a finite number"),
        ({"alpha_pattern": [1]}, "alpha_pattern is .*, but it must be an object"),
    ],
)
def test_adapters_that_cannot_be_merged(openvla: Path, config: dict[str, Any], message: str) -> None:
    write_adapter(openvla, query_factors(openvla), **config)
    refuse(openvla, message)


def test_damaged_adapters(openvla: Path) -> None:
    factors = query_factors(openvla)
    write_adapter(openvla, {name: tensor for name, tensor in factors.items() if "lora_A" in name})
    refuse(openvla, r"q_proj needs matrices lora_A \[r, in\] and lora_B \[out, r\]; copy it again")
    write_adapter(openvla, factors)
    weights = openvla / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refuse(openvla, "adapter_model.safetensors is damaged or cut off")
    weights.unlink()
    refuse(openvla, "has adapter_config.json, but neither adapter_model.safetensors nor adapter_model.bin")


def test_a_pickled_adapter_is_read_too(openvla: Path) -> None:
    factors = query_factors(openvla)
    write_adapter(openvla, factors)
    (openvla / "adapter_model.safetensors").unlink()
    torch.save({f"base_model.model.{name}": tensor for name, tensor in factors.items()}, openvla / "adapter_model.bin")
    adapter = read_adapter(openvla)
    assert adapter is not None and list(adapter.factors) == [bare_name(f"{QUERY}.weight")]
    edit_json(openvla / "adapter_config.json", lambda given: given.update(use_rslora=True))
    scaled = read_adapter(openvla)
    assert scaled is not None
    (one,), (other,) = adapter.factors.values(), scaled.factors.values()
    assert (one.scale, other.scale) == (2.0, pytest.approx(4 / 2**0.5))
