"""Times the plain decoder, stage by stage, beside transformers' generate on the same weights.

Both decode 7 tokens greedily behind the same 290 prompt embeddings (OpenVLA's: 256 patches and about 34 text tokens),
with the same weights in memory, taking turns in one process. Random weights: time does not depend on their values.

    python benchmarks/ar.py                                  # this CPU: tiny and 1B
    python benchmarks/ar.py --device cuda --sizes 7b         # a GPU: OpenVLA-7B's shapes
"""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from random_decoder import random_decoder
from rich.console import Console
from rich.table import Table
from transformers_baseline import transformers_llama

from specvla_kernels.layout import Ancestry
from specvla_ros.engine.packed_forward import new_ring, packed_forward
from specvla_ros.engine.segment import Segment
from specvla_ros.models.config import LlamaConfig, VisionTowerConfig
from specvla_ros.models.llama import LlamaDecoder
from specvla_ros.models.policy import DTYPES
from specvla_ros.models.projector import Projector
from specvla_ros.models.vision_tower import VisionTower

PROMPT = 290
TOKENS = 7
_DINO = VisionTowerConfig(1024, 24, 16, 4096, 14, True, 4, True, 224)
_SIGLIP = VisionTowerConfig(1152, 27, 16, 4304, 14, False, 0, False, 224)


@dataclass(frozen=True)
class Size:
    """Shapes to time."""

    llama: LlamaConfig
    towers: tuple[VisionTowerConfig, ...]


SIZES = {
    "tiny": Size(
        LlamaConfig(256, 688, 4, 4, 4, 64, vocab_size=32064),
        (
            VisionTowerConfig(96, 4, 3, 384, 14, True, 4, True, 224),
            VisionTowerConfig(96, 4, 3, 358, 14, False, 0, False, 224),
        ),
    ),
    "1b": Size(LlamaConfig(2048, 5632, 22, 32, 4, 64, vocab_size=32064), (_DINO, _SIGLIP)),
    "7b": Size(LlamaConfig(vocab_size=32064), (_DINO, _SIGLIP)),
}


def main(
    sizes: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(SIZES)}.")] = "tiny,1b",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; empty: float32 on CPU, else bfloat16.")
    ] = "",
    repeats: Annotated[int, typer.Option(help="Turns of each contestant.", min=3)] = 9,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Times vision, prefill and decode step, beside transformers' generate."""
    chosen = DTYPES[dtype or ("float32" if device == "cpu" else "bfloat16")]
    bandwidth = _read_bandwidth(device)
    result: dict[str, Any] = {
        "benchmark": "ar",
        "command": f"python benchmarks/ar.py --sizes {sizes} --device {device} --repeats {repeats}",
        "date": date.today().isoformat(),
        "hardware": hardware(device),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": str(chosen).removeprefix("torch."),
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "sizes": {},
    }
    for name in sizes.split(","):
        with torch.inference_mode():
            result["sizes"][name] = _measure(SIZES[name], device, chosen, repeats, bandwidth)
    _print(result)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _measure(size: Size, device: str, dtype: torch.dtype, repeats: int, bandwidth: float) -> dict[str, Any]:
    decoder = random_decoder(size.llama, dtype=dtype, device=device)
    reference = transformers_llama(decoder)
    prompt = torch.randn(PROMPT, size.llama.hidden_size, device=device, dtype=dtype)
    ring = new_ring(decoder, slots=1, slot_rows=304)
    contestants: dict[str, Callable[[], Any]] = {
        "prefill": lambda: _ours(decoder, ring, prompt, 1),
        "action": lambda: _ours(decoder, ring, prompt, TOKENS),
        "transformers_prefill": lambda: _generate(reference, prompt, 1),
        "transformers_action": lambda: _generate(reference, prompt, TOKENS),
    }
    times = take_turns(contestants, repeats, device)
    same = _ours(decoder, ring, prompt, TOKENS) == _generate(reference, prompt, TOKENS)
    vision = _vision(size, device, dtype, max(3, repeats // 3))
    step = (times["action"] - times["prefill"]) / (TOKENS - 1)
    reference_step = (times["transformers_action"] - times["transformers_prefill"]) / (TOKENS - 1)
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
        "transformers_prefill_s": times["transformers_prefill"],
        "transformers_decode_step_s": reference_step,
        "transformers_language_model_s": times["transformers_action"],
        "speedup_over_transformers": times["transformers_action"] / times["action"],
    }


def _ours(decoder: LlamaDecoder, ring: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    segment = Segment(0, 0, prompt)
    out: list[int] = []
    while True:
        out.append(int(packed_forward(decoder, [segment], ring).logits[0].argmax()))
        if len(out) == tokens:
            return out
        root = torch.tensor(out[-1:], device=prompt.device)
        segment = Segment(0, len(prompt) + len(out) - 1, root, ancestry=Ancestry.of((-1,)))


def _generate(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    mask = torch.ones(1, len(prompt), dtype=torch.int64, device=prompt.device)
    out = model.generate(
        inputs_embeds=prompt[None], attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    return out[0].tolist()


def _vision(size: Size, device: str, dtype: torch.dtype, repeats: int) -> float:
    torch.manual_seed(0)
    towers = [VisionTower(tower).to(device, dtype) for tower in size.towers]
    for tower in towers:
        for parameter in tower.parameters():
            parameter.normal_(std=0.02)
    width = sum(tower.embed_dim for tower in size.towers)
    projector = Projector(width, size.llama.hidden_size, fused=True).to(device, dtype)
    image = torch.randn(3, 224, 224, device=device, dtype=dtype)
    run = {"vision": lambda: projector(torch.cat([tower(image) for tower in towers], dim=1))}
    return take_turns(run, repeats, device)["vision"]


def take_turns(contestants: dict[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each, run in turns so that drift of the machine falls on all alike; one warm-up turn."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, run in contestants.items():
            synchronise(device)
            started = time.perf_counter()
            run()
            synchronise(device)
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def _read_bandwidth(device: str) -> float:
    """Bytes per second of the fastest of ten sums over 1 GiB."""
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


def synchronise(device: str) -> None:
    """Waits until a GPU is through with what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def hardware(device: str) -> str:
    """Its name."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def _print(result: dict[str, Any]) -> None:
    title = f"plain decoder, {result['hardware']}, {result['dtype']}, {result['read_bandwidth_gb_s']:.1f} GB/s read"
    table = Table(title=title, caption=f"transformers {result['versions']['transformers']}, same weights, same run")
    table.add_column("")
    for name in result["sizes"]:
        table.add_column(name, justify="right")

    def row(label: str, text: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(label, *(text(figures) for figures in result["sizes"].values()))

    def milliseconds(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda figures: f"{figures[key] * 1e3:.2f} ms"

    row("language model parameters", lambda f: f"{f['parameters'] / 1e6:.0f} M")
    row("vision and projector", milliseconds("vision_s"))
    row("prefill (290)", milliseconds("prefill_s"))
    row("decode step", milliseconds("decode_step_s"))
    row("decode rate", lambda f: f"{f['decode_tokens_per_s']:.1f} tokens/s")
    row("share of bandwidth limit", lambda f: f"{f['decode_share_of_bandwidth']:.0%}")
    row("language model per action", milliseconds("language_model_s"))
    row("transformers: prefill", milliseconds("transformers_prefill_s"))
    row("transformers: decode step", milliseconds("transformers_decode_step_s"))
    row("transformers: per action", milliseconds("transformers_language_model_s"))
    row("ours is faster by", lambda f: f"{f['speedup_over_transformers']:.2f} x")
    row("same tokens", lambda f: "yes" if f["same_tokens"] else "no")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
