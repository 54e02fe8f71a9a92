# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that does not fit is refused with what is wrong, where, and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import bins_of, copy_checkpoint, edit_json, load_openvla, shard, write_checkpoint
from transformers import PreTrainedTokenizerFast

from specvla_ros.errors import UserError
from specvla_ros.models import checkpoint as checkpoints
from specvla_ros.models.checkpoint import load_target


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("good"))


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    return copy_checkpoint(good, tmp_path / "checkpoint")


def refuse(directory: Path, match: str, **arguments: Any) -> None:
    with pytest.raises(UserError, match=match):
        load_target(directory, **({"device": "cpu"} | arguments))


def edit_weights(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", r"nowhere does not exist; give the folder")
    (tmp_path / "file").touch()
    refuse(tmp_path / "file", r"file is a file; give the folder")


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_missing_file(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    refuse(checkpoint, rf"{name} is missing: is .* a complete checkpoint")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_config(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    refuse(checkpoint, r"config\.json .*copy the file again")


def test_missing_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    refuse(checkpoint, "neither model.safetensors nor")
    (checkpoint / "pytorch_model.bin").touch()
    refuse(checkpoint, "pytorch_model.bin cannot be read as weights")


def test_a_tensor_of_another_shape(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({"projector.fc2.bias": torch.zeros(7)}))
    refuse(checkpoint, r"projector\.fc2\.bias has shape \[7\], but config\.json implies \[64\]")


def test_a_missing_tensor(checkpoint: Path) -> None:
    name = "language_model.model.layers.1.mlp.up_proj.weight"
    edit_weights(checkpoint, lambda tensors: tensors.__delitem__(name))
    refuse(checkpoint, rf"model\.safetensors lacks {name}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_of_another_number_format_are_not_taken_for_values(checkpoint: Path, dtype: torch.dtype) -> None:
    name = "language_model.model.layers.1.mlp.up_proj.weight"
    edit_weights(checkpoint, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refuse(checkpoint, rf"tensor {name} has values of format .*where the family supports it, model\.quantization")


@pytest.mark.parametrize("scale", ["weight_scale_inv", "SCB", "weight.absmax", "qzeros"])
def test_scales_of_quantised_weights_are_not_left_out(checkpoint: Path, scale: str) -> None:
    name = f"language_model.model.layers.1.mlp.up_proj.{scale}"
    edit_weights(checkpoint, lambda tensors: tensors.update({name: torch.ones(192)}))
    refuse(checkpoint, rf"contains {name}: quantised weights are not supported.*use the original checkpoint")


@pytest.mark.parametrize("place", [None, "text_config"])
def test_a_quantised_checkpoint_is_refused_by_its_config(checkpoint: Path, place: str | None) -> None:
    method = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    edit_json(checkpoint / "config.json", lambda c: (c[place] if place else c).update(method))
    refuse(checkpoint, "quantization_config says that the weights are quantised .'bitsandbytes'.*model.quantization")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_config_with_fewer_layers_than_the_weights(checkpoint: Path, sharded: bool) -> None:
    if sharded:
        shard(checkpoint)
    edit_json(checkpoint / "config.json", lambda config: config["text_config"].update(num_hidden_layers=1))
    refuse(checkpoint, r"contains language_model\.model\.layers\.1\..*, which the model of config\.json does not have")
    edit_json(checkpoint / "config.json", lambda config: config["text_config"].update(num_hidden_layers=3))
    refuse(checkpoint, r"(lacks|does not list) language_model\.model\.layers\.2\.")


def test_what_released_files_hold_beside_the_model_is_let_be(good: Path, checkpoint: Path) -> None:
    extra = {
        "vision_backbone.featurizer.blocks.2.mlp.fc1.weight": torch.zeros(2),  # the last of three is not computed
        "vision_backbone.featurizer.norm.weight": torch.zeros(2),
        "vision_backbone.fused_featurizer.attn_pool.latent": torch.zeros(2),
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    edit_weights(checkpoint, lambda tensors: tensors.update(extra))
    whole, more = (load_openvla(path, device="cpu").model.checkpoint_tensors() for path in (good, checkpoint))
    assert all(torch.equal(whole[name], more[name]) for name in whole)


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_a_head_that_config_json_calls_the_embeddings(checkpoint: Path, quantization: str) -> None:
    """It may be missing, or the same; another one is a head of its own, as in transformers."""
    edit_json(checkpoint / "config.json", lambda config: config["text_config"].update(tie_word_embeddings=True))
    head, embeddings = (f"language_model.{name}.weight" for name in ("lm_head", "model.embed_tokens"))
    own = load_file(checkpoint / "model.safetensors")[head]
    decoder = load_openvla(checkpoint, device="cpu", quantization=quantization).decoder
    assert torch.equal(decoder.lm_head.weight, own) and not torch.equal(decoder.embed_tokens.weight, own)
    for edit in (
        lambda tensors: tensors.update({head: tensors[embeddings].clone()}),
        lambda tensors: tensors.pop(head),
    ):
        edit_weights(checkpoint, edit)
        decoder = load_openvla(checkpoint, device="cpu", quantization=quantization).decoder
        assert decoder.lm_head.weight is decoder.embed_tokens.weight


def test_numbers_beyond_any_model_are_refused_before_memory_is_asked_for(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", lambda config: config["text_config"].update(intermediate_size=100_000))
    refuse(checkpoint, r"but config\.json implies \[100000, 64\]")
    edit_json(checkpoint / "config.json", lambda config: config["text_config"].update(num_hidden_layers=10**6))
    refuse(checkpoint, "text_config.num_hidden_layers is 1000000, but it must be a whole number from 1 to 256")


def test_an_index_that_leads_out_of_the_directory(checkpoint: Path) -> None:
    shard(checkpoint)
    name = "language_model.lm_head.weight"
    edit_json(checkpoint / "model.safetensors.index.json", lambda index: index["weight_map"].update({name: "../x"}))
    refuse(checkpoint, r"weight_map names '\.\./x', which is not a file next to it")


def test_a_truncated_shard(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refuse(checkpoint, r"model\.safetensors is damaged or cut off .*download this file again")


def test_shards_give_the_same_model(good: Path, checkpoint: Path) -> None:
    shard(checkpoint)
    whole, sharded = (load_openvla(path, device="cpu").model.checkpoint_tensors() for path in (good, checkpoint))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_a_missing_and_a_truncated_second_shard(checkpoint: Path) -> None:
    second = checkpoint / shard(checkpoint)[1]
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    refuse(checkpoint, rf"{second.name} is damaged or cut off")
    second.unlink()
    refuse(checkpoint, rf"incomplete: {second.name} missing, of 2 shards")


@pytest.mark.parametrize("left", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_was_left_behind_does_not_make_a_whole_file_incomplete(
    good: Path, checkpoint: Path, left: str
) -> None:
    weight_map = dict.fromkeys(load_file(good / "model.safetensors"), "model-00001-of-00002.safetensors")
    (checkpoint / left).write_text(json.dumps({"weight_map": weight_map}))
    ours, theirs = (load_openvla(each, device="cpu").decoder.state_dict() for each in (checkpoint, good))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def test_of_two_sets_of_weights_the_one_that_transformers_reads_is_read(good: Path, checkpoint: Path) -> None:
    """Older shards beside a newer single file."""
    newer = load_file(good / "model.safetensors")
    save_file({name: tensor * 0 for name, tensor in newer.items()}, checkpoint / "model.safetensors")
    shard(checkpoint)
    save_file(newer, checkpoint / "model.safetensors")
    ours, theirs = (load_openvla(each, device="cpu").decoder.state_dict() for each in (checkpoint, good))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def test_an_index_that_lists_too_little(checkpoint: Path) -> None:
    shard(checkpoint)
    edit_json(
        checkpoint / "model.safetensors.index.json",
        lambda index: index["weight_map"].__delitem__("language_model.lm_head.weight"),
    )
    refuse(checkpoint, r"does not list language_model\.lm_head\.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(model_type="bert"),
            "only .*'openvla', 'pi0_fast', .*'qwen3_vl', 'starvla-run' checkpoints",
        ),
        (dict(tiny_timm_model_kwargs=None, timm_model_ids=["resnet50", "vit"]), "'resnet50' is not supported; known"),
        (dict(timm_model_ids=["vit_so400m_patch14_siglip_224"]), "disagree on the number of vision towers"),
        (dict(timm_override_act_layers=["quick_gelu", None]), "only exact GELU"),
        (dict(text_config={"model_type": "phi"}), "'phi' is not supported"),
        (dict(text_config={"rope_scaling": {"type": "linear", "factor": 2}}), "only plain RoPE"),
        (dict(text_config={"attention_bias": True}), "attention_bias is not supported"),
        (dict(text_config={"hidden_act": "gelu"}), "only 'silu' is"),
        (
            dict(text_config={"hidden_size": "wide"}),
            r"config\.json: text_config\.hidden_size is 'wide', but it",
        ),
        (dict(image_sizes=[224, 448]), "cannot be joined"),
        (
            dict(text_config={"tie_word_embeddings": "false"}),
            "tie_word_embeddings is 'false', but it must be true or",
        ),
        (dict(text_config={"rms_norm_eps": 0}), "rms_norm_eps is 0, but it must be a finite number above 0"),
        (
            dict(text_config={"num_attention_heads": 0}),
            "num_attention_heads is 0, but it must be a whole number",
        ),
        (dict(text_config={"num_key_value_heads": 3}), "num_key_value_heads is 3, but it must be a divisor"),
        (dict(text_config={"vocab_size": 200}), "leaves no text token besides"),
        (dict(use_fused_vision_backbone="true"), "use_fused_vision_backbone is 'true', but"),
        (dict(image_sizes=[0, 0]), "image_sizes is .* sizes from 1 to"),
        (dict(norm_stats=[]), "norm_stats is .*, but it must be an object"),
        (dict(instructions="lift"), "instructions is 'lift', but it must be a list of strings"),
    ],
)
def test_a_config_of_something_else(checkpoint: Path, change: dict, message: str) -> None:
    edit_json(checkpoint / "config.json", lambda config: config.update(change))
    refuse(checkpoint, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(image_resize_strategy="squash"),
            "image_resize_strategy is 'squash', but it must be one of: resize-naive, letterbox, resize-crop",
        ),
        (dict(means=[[0.5] * 3]), "each tower needs"),
        (dict(means=[[0.5], [0.5]]), "three values per tower"),
        (dict(stds=[[0.5, 0.5, 0.0], [0.5] * 3]), "standard deviations above"),
        (dict(stds=[[0.5] * 3, [0.5, 0.5, float("nan")]]), "standard deviations above"),
        (dict(interpolations=["bicubic", "x"]), "interpolations is .*bilinear"),
        (dict(tvf_letterbox_fill=[0, 0, 256]), "tvf_letterbox_fill is .*three whole numbers"),
        (dict(input_sizes=[[3, 384, 384]] * 2), r"does not give the towers' image sizes \[224, 224\]"),
    ],
)
def test_a_preprocessor_config_that_does_not_fit(checkpoint: Path, change: dict, message: str) -> None:
    edit_json(checkpoint / "preprocessor_config.json", lambda config: config.update(change))
    refuse(checkpoint, message)


def test_a_tokenizer_of_another_model(checkpoint: Path) -> None:
    def grow(tokenizer: dict) -> None:
        vocab = tokenizer["model"]["vocab"]
        vocab.update({f"word{i}": len(vocab) + i for i in range(1000)})

    edit_json(checkpoint / "tokenizer.json", grow)
    refuse(checkpoint, "belongs to another checkpoint")
    (checkpoint / "tokenizer.json").write_text("{}")
    refuse(checkpoint, r"tokenizer\.json cannot be read")


def test_a_tokenizer_that_truncates_and_pads_leaves_prompts_whole_as_transformers_does(checkpoint: Path) -> None:
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    padding = dict(strategy={"Fixed": 90}, direction="Right", pad_to_multiple_of=None, pad_id=0, pad_type_id=0)
    usual = load_openvla(checkpoint, device="cpu").prompt.ids("lift the red cube")
    edit_json(
        checkpoint / "tokenizer.json",
        lambda tokenizer: tokenizer.update(truncation=truncation, padding=padding | {"pad_token": "<unk>"}),
    )
    policy = load_openvla(checkpoint, device="cpu")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    assert policy.prompt.ids("lift the red cube") == usual
    assert policy.prompt.ids("lift the blue cube") != usual
    assert policy.prompt.complete(theirs(policy.prompt.text("lift the red cube")).input_ids) == usual


def test_a_tokenizer_that_contradicts_itself(checkpoint: Path) -> None:
    edit_json(checkpoint / "tokenizer.json", lambda tokenizer: tokenizer["post_processor"].update(special_tokens={}))
    refuse(checkpoint, r"tokenizer\.json cannot encode a prompt .*; copy the file again")


def test_a_tokenizer_with_an_id_beyond_the_embeddings(checkpoint: Path) -> None:
    edit_json(checkpoint / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update({"▁": 10**6}))
    refuse(checkpoint, r"tokenizer\.json gives '▁' the id 1000000, but the model has embeddings for")


def test_no_tokenizer_refuses_words_and_takes_ids(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    policy = load_openvla(checkpoint, device="cpu")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        policy.prompt.ids("put carrot on plate")
    assert policy.prompt.complete([1, 5]) == (1, 5)
    with pytest.raises(UserError, match="outside the vocabulary"):
        policy.prompt.complete([1, 10**6])


def test_unnorm_keys(checkpoint: Path) -> None:
    refuse(checkpoint, "'moon_dust' is not in this checkpoint; it has: bridge_orig", unnorm_key="moon_dust")
    edit_json(
        checkpoint / "config.json",
        lambda c: c["norm_stats"].update(libero_goal_no_noops=c["norm_stats"]["bridge_orig"]),
    )
    refuse(checkpoint, "statistics of 2 datasets; set unnorm_key to one of: bridge_orig, libero_goal_no_noops")
    assert load_target(checkpoint, device="cpu", unnorm_key="libero_goal").unnorm_key == "libero_goal_no_noops"
    edit_json(checkpoint / "config.json", lambda c: c.update(norm_stats={}))
    refuse(checkpoint, "statistics of 0 datasets")


@pytest.mark.parametrize(
    "action",
    [
        {},
        dict(q01=[0.0], q99=[1.0, 2.0]),
        dict(q01=[0.0], q99=[float("nan")]),
        dict(q01=[2.0], q99=[1.0]),
        dict(q01=[0.0], q99=[1e300]),
        dict(q01=["0.0"], q99=["1.0"]),
        dict(q01=[0.0], q99=[1.0], mask=["false"]),
    ],
)
def test_malformed_statistics(checkpoint: Path, action: dict) -> None:
    edit_json(checkpoint / "config.json", lambda c: c.update(norm_stats={"x": {"action": action}}))
    refuse(checkpoint, r"norm_stats\['x'\]\['action'\]")


def test_a_fine_tuned_checkpoints_statistics_take_precedence(checkpoint: Path) -> None:
    statistics = {"mine": {"action": dict(q01=[0.0] * 7, q99=[1.0] * 7)}}
    (checkpoint / "dataset_statistics.json").write_text("{}")
    edit_json(checkpoint / "dataset_statistics.json", lambda value: value.update(statistics))
    policy = load_openvla(checkpoint, device="cpu")
    assert policy.unnorm_key == "mine"
    assert bins_of(policy).statistics.mask.all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(device="tpu"), "device 'tpu' is not known"),
        (dict(device="meta"), "device 'meta' is not known"),
        (dict(dtype="int3"), "dtype 'int3' is not known"),
    ],
)
def test_arguments_out_of_range(good: Path, arguments: dict, message: str) -> None:
    refuse(good, message, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(good: Path) -> None:
    refuse(good, "sees no CUDA GPU; install a CUDA build of torch", device="cuda")


def test_a_gpu_beyond_those_there_are(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refuse(good, "device 'cuda:2' was requested, but there are 2 CUDA GPUs", device="cuda:2")


def test_a_gpu_without_room_is_told_before_anything_is_read(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1024, 2**30))
    monkeypatch.setattr(checkpoints, "_check_build", lambda _: None)
    refuse(good, r"the weights take 0\.0 GiB in bfloat16, but cuda has 0\.0 GiB free, too little", device="cuda")


def test_a_hub_id_is_told_how_to_become_a_directory() -> None:
    refuse(
        Path("openvla/openvla-7b"), "not a directory; .* download it first: hf download openvla/openvla-7b --local-dir"
    )


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    refuse(tmp_path, "contains an adapter .* without its base model: copy or link the base model's files")


def test_a_git_lfs_pointer_is_told_from_the_file(checkpoint: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 15\n"
    (checkpoint / "model.safetensors").write_text(pointer)
    refuse(checkpoint, r"model\.safetensors is a git-lfs pointer.*git lfs pull")


@pytest.mark.parametrize(("name", "value"), [("num_beams", 4), ("suppress_tokens", [7])])
def test_decoding_that_is_not_plainly_greedy(checkpoint: Path, name: str, value: Any) -> None:
    plain = '"repetition_penalty": 1.0, "num_beams": 1, "do_sample": true, "temperature": 0.6, "suppress_tokens": null'
    (checkpoint / "generation_config.json").write_text("{" + plain + "}")
    load_target(checkpoint, device="cpu")
    edit_json(checkpoint / "generation_config.json", lambda given: given.update({name: value}))
    refuse(checkpoint, rf"generation_config\.json: {name} is .* changes the answers")
