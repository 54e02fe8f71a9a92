# SPDX-License-Identifier: Apache-2.0
"""Every key of a configuration file that changes an answer is honoured or refused: by the classes' own lists."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from support.checkpoints import edit_json
from support.nightly import nightly_but
from support.random_qwen_vl import FAST_IDS, SHAPES, add_nora, write_qwen_vl, write_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import benchmarks.papers.text_target  # noqa: F401  for language models without vision
from specvla_ros import UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models import generation, lora
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.qwen_vl import policy

# What generate reads and does not change a greedy answer, or is honoured here.
GENERATION = {
    *("repetition_penalty", "max_new_tokens", "eos_token_id"),  # honoured
    "max_length",  # refused where a policy's code reads it
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),  # of sampling
    *("epsilon_cutoff", "eta_cutoff"),
    *("early_stopping", "length_penalty", "diversity_penalty"),  # of beams
    *("remove_invalid_values", "renormalize_logits"),  # the largest stays the largest
    *("use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "continuous_batching_config"),
    *("prefill_chunk_size", "low_memory", "use_mtp", "speculation_type", "is_assistant"),  # of speed
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("target_lookbehind", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
}
IMAGES = {
    *("size", "min_pixels", "max_pixels", "image_mean", "image_std"),  # honoured
    *("patch_size", "temporal_patch_size", "merge_size"),
    *("crop_size", "default_to_square", "pad_size", "image_seq_length"),  # of what is refused, or not this class's
    *("data_format", "input_data_format", "device", "return_tensors", "disable_grouping"),  # of a call
}
ADAPTER = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),  # honoured
    *(
        "target_modules",
        "exclude_modules",
        "modules_to_save",
        "bias",
        "layers_to_transform",
        "layers_pattern",
    ),  # by name
    *("lora_dropout", "eva_config", "corda_config", "lora_ga_config", "loftq_config", "velora_config"),  # of training
    *("qalora_group_size", "megatron_core", "runtime_config", "ensure_weight_tying"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
}


@pytest.mark.parametrize(
    ("theirs", "refused", "others"),
    [
        (set(vars(GenerationConfig())), generation.PLAIN, GENERATION),
        ({*Qwen2VLImageProcessorPil.valid_kwargs.__annotations__}, policy.PLAIN, IMAGES),
        ({field.name for field in dataclasses.fields(LoraConfig)}, lora.PLAIN, ADAPTER),
    ],
    ids=["generation", "images", "adapter"],
)
def test_every_key_is_known(theirs: set[str], refused: dict[str, Any], others: set[str]) -> None:
    assert theirs - set(refused) - others == set()
    assert set(refused) & others == set()


# Values of each key of a decoder's configuration, beside those that the tests of shapes change.
ROPE: list[tuple[str, Any]] = [
    ("rope_theta", 5e3),
    ("rope_scaling", {"rope_type": "default", "rope_theta": 300.0}),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
    ("rope_scaling", {}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 300.0}),
    ("rope_parameters", {"rope_theta": 300.0, "partial_rotary_factor": 0.5}),
    ("rope_parameters", {"type": "linear", "factor": 2.0}),
    ("rope_parameters", {"rope_type": "linear", "type": "default", "factor": 2.0}),
    ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 300.0}}),
    ("rope_parameters", None),
]
OTHERS: list[tuple[str, Any]] = [
    ("partial_rotary_factor", 0.5),
    ("use_sliding_window", True),
    ("sliding_window", 2),
    ("max_window_layers", 0),
    ("layer_types", ["sliding_attention"] * 3),
    ("layer_types", ["full_attention"] * 3),
    ("layer_types", ["chunked_attention"] * 3),
    ("use_bidirectional_attention", True),
    ("is_causal", False),
    ("rms_norm_eps", 0.1),
    ("hidden_act", "gelu"),
    ("hidden_act", "relu"),
    ("hidden_activation", "relu"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("attention_dropout", 0.5),
    ("pretraining_tp", 2),
    ("tie_word_embeddings", True),
    ("tie_word_embeddings", False),
    ("use_cache", False),
    ("num_attention_heads", 2),
    ("num_key_value_heads", 4),
    ("head_dim", 16),
]
MROPE: list[tuple[str, Any]] = [
    (
        "rope_parameters",
        {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2], "mrope_interleaved": True},
    ),
    ("rope_scaling", {"type": "mrope", "mrope_section": [1, 2, 3]}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "mrope_section": [2, 2, 2]}),
]
SHAPE = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"}
# No answer comes from these.
WITHOUT = {
    *("architectures", "dtype", "model_type", "transformers_version", "_name_or_path", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type", "is_encoder_decoder"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
}
IDS = torch.tensor([5, 9, 200, 17, 33, 8, 41, 99, 120, 7])
POSITIONS = np.stack([np.arange(10), np.arange(10) * 2 % 7, np.arange(10) * 3 % 5])  # of M-RoPE


def write(directory: Path, family: str) -> Path:
    if family == "qwen2_5_vl":
        return add_nora(write_qwen_vl(directory, SHAPES[0], seed=1, actions=FAST_IDS))
    shape: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, max_position_embeddings=64)
    config = AutoConfig.for_model(family, vocab_size=300, num_attention_heads=4, num_key_value_heads=2, **shape)
    config.head_dim = 8
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    write_tokenizer(directory, 0)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return directory


def variants(directory: Path, family: str) -> Iterator[tuple[Path, str]]:
    """A directory for each changed key, with its name."""
    chat = family == "qwen2_5_vl"
    for name, value in [*ROPE, *OTHERS, *(MROPE if chat else [])]:
        changed = directory.with_name("changed")
        shutil.copytree(directory, changed, dirs_exist_ok=True)
        shutil.copy(directory / "config.json", changed)
        edit_json(changed / "config.json", lambda c: (c["text_config"] if chat else c).update({name: value}))  # noqa: B023
        yield changed, f"{name}: {value}"


def ours(directory: Path) -> Tensor:
    decoder = load_target(directory, device="cpu").decoder
    cache = new_cache(decoder, slots=1, slot_rows=len(IDS))  # type: ignore[arg-type]
    positions = POSITIONS if decoder.config.rope_sections else None
    return packed_forward(decoder, [Segment(0, 0, IDS, wanted=len(IDS), positions=positions)], cache).logits


def theirs(directory: Path, family: str) -> Tensor | None:
    """None: transformers refuses it."""
    try:
        if family == "qwen2_5_vl":
            model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
            positions = torch.from_numpy(POSITIONS)[:, None]
            return model(input_ids=IDS[None], position_ids=positions).logits[0]  # type: ignore[no-any-return]
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model(input_ids=IDS[None]).logits[0]  # type: ignore[no-any-return]
    except Exception:  # each class has its own
        return None


@pytest.mark.parametrize(
    "family", nightly_but(lambda each: each == "qwen2_5_vl", ["llama", "qwen2", "qwen3", "gemma", "qwen2_5_vl"])
)
@torch.inference_mode()
def test_a_decoder_answers_as_transformers_does_or_is_refused(tmp_path: Path, family: str) -> None:
    directory = write(tmp_path / "whole", family)
    config: Any = AutoConfig.from_pretrained(directory)
    known = {name for name, _ in [*ROPE, *OTHERS]} | SHAPE | WITHOUT
    assert set(config.get_text_config().to_dict()) <= known
    same, refused = 0, 0
    for changed, what in variants(directory, family):
        try:
            logits = ours(changed)
        except UserError:
            refused += 1
            continue
        wanted = theirs(changed, family)
        if wanted is not None:
            torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-4, msg=lambda text: f"{what}: {text}")  # noqa: B023
            same += 1
    assert same >= 12 and refused >= 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("watermarking_config", {"greenlist_ratio": 0.5}),
        ("stop_strings", ["|"]),
        ("token_healing", True),
        ("dola_layers", "low"),
        ("max_length", 100),
        ("max_time", 0.1),
        ("cache_implementation", "quantized"),
    ],
)
def test_generation_settings_that_would_change_an_answer(tmp_path: Path, name: str, value: Any) -> None:
    directory = write(tmp_path / "nora", "qwen2_5_vl")
    edit_json(directory / "generation_config.json", lambda given: given.update({name: value}))
    with pytest.raises(UserError, match=rf"generation_config.json: {name} is"):
        load_target(directory, device="cpu")
    if name == "max_length":  # which generate does not read then
        edit_json(directory / "generation_config.json", lambda given: given.update(max_new_tokens=30))
        load_target(directory, device="cpu")
