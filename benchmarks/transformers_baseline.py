# SPDX-License-Identifier: Apache-2.0
"""transformers on the same weights: its own model class, and its generate as a contestant."""

import time
from typing import Any

import torch

from benchmarks.harness import synchronise
from benchmarks.random_policy import TEXT_TOKENS, RandomPolicy, frame
from benchmarks.saturated import GpuMemory, rate_and_latency
from specvla_ros.models.config import DECODERS
from specvla_ros.models.decoder import PackedDecoder, decoder_tensors

_WARM = 2  # actions before a turn: a decode step is captured in its second run
_SHARED = (
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
)


def transformers_decoder(decoder: PackedDecoder) -> Any:
    """Returns transformers' model with the decoder's weights, dtype and device."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = decoder.config
    family = next(name for name, usual in DECODERS.items() if usual.variant == shape.variant)
    config = AutoConfig.for_model(
        family,
        **{name: getattr(shape, name) for name in _SHARED},
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )
    with init_empty_weights():  # buffers such as RoPE's are still created
        model: Any = AutoModelForCausalLM.from_config(config)
    tensors = decoder_tensors(decoder)
    if shape.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict({name: tensor.to(decoder.dtype) for name, tensor in tensors.items()}, assign=True)
    return model.to(decoder.device).eval()


class GenerateTurns:
    """transformers' generate with the policy's weights, one action after the other.

    Args:
        policy: provides weights and prompt.
        compiled: use a static cache and transformers' own compiled decode step, where it supports one.
    """

    def __init__(self, policy: RandomPolicy, *, compiled: bool) -> None:
        self._policy = policy
        self._device = policy.decoder.device
        self._model = transformers_decoder(policy.decoder)
        self._on_gpu = GpuMemory(policy.model) if self._device.type == "cuda" else None
        self._options: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}
        self._compiled = compiled
        self._skipped = ""
        if compiled and self._device.type != "cuda":
            self._skipped = "transformers compiles the decode step on accelerators only"
        self._latency_s: list[float] = []
        self._rates_hz: list[float] = []
        self._peak_bytes: int | None = None
        self.tokens: tuple[int, ...] = ()

    def add_turn(self, actions: int) -> None:
        """Times a number of actions after uncounted warm-up actions; the very first one compiles."""
        if self._skipped:
            return
        if self._on_gpu is not None:
            self._on_gpu.begin()
        try:
            for _ in range(_WARM):
                self._act()
        except Exception as error:  # a compiler error must not end the comparison
            if not self._compiled:
                raise
            self._skipped = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return
        if self._compiled and not hasattr(self._model, "_compiled_call"):
            self._skipped = "transformers did not compile the decode step"
            return
        synchronise(str(self._device))
        started = time.perf_counter()
        self._latency_s += [self._act() for _ in range(actions)]
        self._rates_hz.append(actions / (time.perf_counter() - started))
        self._peak_bytes = self._on_gpu.end() if self._on_gpu is not None else None

    def summary(self) -> dict[str, Any]:
        """Returns the figures for a result, or the reason why there are none."""
        if self._skipped:
            return {"skipped": self._skipped}
        return rate_and_latency(self._latency_s, self._rates_hz, self._peak_bytes)

    @torch.no_grad()
    def _act(self) -> float:
        """Seconds of one action, including the read-back of its tokens."""
        started = time.perf_counter()
        prompt = self._policy.prompt_embeddings(frame(1), (1,) * TEXT_TOKENS)
        mask = torch.ones(1, len(prompt), dtype=torch.int64, device=self._device)
        out = self._model.generate(
            inputs_embeds=prompt[None],
            attention_mask=mask,
            max_new_tokens=len(self._policy.codec.names),
            do_sample=False,
            eos_token_id=None,
            **self._options,
        )
        self.tokens = tuple(out[0].tolist())
        return time.perf_counter() - started
