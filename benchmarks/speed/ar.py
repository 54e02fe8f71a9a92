# SPDX-License-Identifier: Apache-2.0
"""Times the plain decoder by stage, and transformers' generate on the same weights.

Both decode 7 tokens greedily after the same 290 prompt embeddings (OpenVLA's: 256 patches and about 34 text tokens),
with the same weights in memory, taking turns in one process. Random weights: time does not depend on their values.

    python -m benchmarks.speed.ar                                  # this CPU: tiny and 1B
    python -m benchmarks.speed.ar --device cuda --sizes 7b         # a GPU: OpenVLA-7B's shapes
"""

import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import transformers
import typer

from benchmarks.harness import Device, Dtype, Out, Sizes, dtype_on, finish, result_head, synchronise, take_turns
from benchmarks.random_policy import PROMPT, SIZES, TOKENS, Size, random_decoder, random_model
from benchmarks.transformers_baseline import transformers_decoder
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models.decoder import PackedDecoder


def main(
    context: typer.Context,
    sizes: Sizes = "tiny,1b",
    device: Device = "cpu",
    dtype: Dtype = "",
    repeats: Annotated[int, typer.Option(help="Turns of each contestant.", min=3)] = 9,
    out: Out = None,
) -> None:
    """Times vision, prefill, decode step, and transformers' generate."""
    chosen = dtype_on(device, dtype)
    bandwidth = _read_bandwidth(device)
    result = result_head(context, chosen, transformers=transformers.__version__)
    result |= {"read_bandwidth_gb_s": bandwidth / 1e9, "sizes": {}}
    for name in sizes.split(","):
        with torch.inference_mode():
            result["sizes"][name] = _measure(SIZES[name], device, chosen, repeats, bandwidth)
    finish(result, out)


def _measure(size: Size, device: str, dtype: torch.dtype, repeats: int, bandwidth: float) -> dict[str, Any]:
    decoder = random_decoder(size.llama, dtype=dtype, device=device)
    reference = transformers_decoder(decoder)
    prompt = torch.randn(PROMPT, size.llama.hidden_size, device=device, dtype=dtype)
    cache = new_cache(decoder, slots=1, slot_rows=304)
    contestants: dict[str, Callable[[], Any]] = {
        "prefill": lambda: _ours(decoder, cache, prompt, 1),
        "action": lambda: _ours(decoder, cache, prompt, TOKENS),
        "transformers_action": lambda: _generate(reference, prompt, TOKENS),
    }
    times = take_turns(contestants, repeats, device)
    same = _ours(decoder, cache, prompt, TOKENS) == _generate(reference, prompt, TOKENS)
    model = random_model(decoder, size, vision=True)
    pixels = torch.randn(model.pixel_shape, device=device, dtype=dtype)
    vision = take_turns({"vision": lambda: model.image_embeddings(pixels)}, max(3, repeats // 3), device)["vision"]
    step = (times["action"] - times["prefill"]) / (TOKENS - 1)
    weights = sum(p.nbytes for p in decoder.parameters()) - decoder.embed_tokens.weight.nbytes
    return {
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "same_tokens": same,
        "vision_s": vision,
        "prefill_s": times["prefill"],
        "decode_step_s": step,
        "decode_tokens_per_s": 1 / step,
        "decode_share_of_bandwidth": weights / bandwidth / step,
        "language_model_s": times["action"],
        "transformers_language_model_s": times["transformers_action"],
        "speedup_over_transformers": times["transformers_action"] / times["action"],
    }


def _ours(decoder: PackedDecoder, cache: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    segment = Segment(0, 0, prompt)
    out: list[int] = []
    while True:
        out.append(int(packed_forward(decoder, [segment], cache).logits[0].argmax()))
        if len(out) == tokens:
            return out
        root = torch.tensor(out[-1:], device=prompt.device)
        segment = Segment(0, len(prompt) + len(out) - 1, root, ancestry=Ancestry.from_parents((-1,), prompt.device))


def _generate(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    mask = torch.ones(1, len(prompt), dtype=torch.int64, device=prompt.device)
    out = model.generate(
        inputs_embeds=prompt[None], attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    return out[0].tolist()


def _read_bandwidth(device: str) -> float:
    """Bytes per second, from the fastest of ten sums over 1 GiB."""
    data = torch.ones(2**28, device=device)
    data.sum()
    best = float("inf")
    for _ in range(10):
        synchronise(device)
        started = time.perf_counter()
        data.sum()
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best


if __name__ == "__main__":
    typer.run(main)
