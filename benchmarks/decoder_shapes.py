# SPDX-License-Identifier: Apache-2.0
"""Decoders of the policies and language models that run here, by model: compiled, timed, counted and emulated."""

from dataclasses import replace

from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.planning.cost import OPENVLA_7B
from specvla_ros.models.config import DECODERS as DEFAULTS
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.models.families.pi0_fast.config import GEMMA_2B

_QWEN3_VL_2B = replace(
    DEFAULTS["qwen3"],
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=262144,
    rope_theta=5e6,
    tie_word_embeddings=True,
    rope_sections=(24, 20, 20),
    rope_interleaved=True,
    deepstack=3,
)
# From each model's config.json on Hugging Face.
DECODERS: dict[str, DecoderShape] = {
    "openvla-7b": OPENVLA_7B.llama,  # also ECoT; Llama 2 and Chameleon with other vocabularies
    "minivla": replace(  # Qwen2.5-0.5B
        DEFAULTS["qwen2"],
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        rope_theta=1e6,
        tie_word_embeddings=True,
    ),
    "pi0-fast": GEMMA_2B,
    "qwen2.5-vl-3b": replace(  # NORA, QwenFAST, VLA-0
        DEFAULTS["qwen2"],
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=128000,
        rope_theta=1e6,
        tie_word_embeddings=True,
        rope_sections=(16, 24, 24),
    ),
    "qwen3-vl-2b": _QWEN3_VL_2B,  # QwenFAST
    "qwen3-vl-4b": replace(  # QwenFAST
        _QWEN3_VL_2B,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
    ),
    "smollm2-135m": DecoderShape(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "nano": read_config(nano_policy()).llama,  # and the other bundled policies
}
