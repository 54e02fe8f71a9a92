"""transformers' LlamaForCausalLM with a decoder's weights."""

from typing import Any

import torch

from specvla_ros.models.llama import LlamaDecoder, llama_tensors


def transformers_llama(decoder: LlamaDecoder) -> Any:
    """The same model as transformers computes it, in the decoder's dtype and on its device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = decoder.config
    names = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    ]
    reference_config = LlamaConfig(
        **{name: getattr(config, name) for name in names},
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(reference_config)
    tensors = llama_tensors(decoder)
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict({name: tensor.to(decoder.dtype) for name, tensor in tensors.items()}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(reference_config)
    return model.to(decoder.device).eval()
