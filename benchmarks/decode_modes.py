"""Every decoding mode end to end beside transformers' generate: same weights, same prompt, taking turns in one run.

Ours is the real engine with a frame always waiting. Random weights: time does not depend on their values, but
acceptance does, so it comes from a named trace. A turn of an engine fills the pipeline first and then times so many
actions; latency runs from the moment a frame is taken, which is the moment it is admitted.

    python benchmarks/decode_modes.py                                  # this CPU: tiny
    python benchmarks/decode_modes.py --device cuda --sizes 7b         # a GPU: OpenVLA-7B's shapes
"""

import json
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from acceptance_trace import TRACE_HELP, Trace, describe, trace_lengths
from shapes import PROMPT, SIZES, TOKENS, Size
from speed_benchmark import hardware
from timing import synchronise
from gpu_memory import GpuMemory
from random_policy import TEXT_TOKENS, RandomPolicy, frame, random_policy
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from saturated import Turns, add_turn, settings_of, timing
from transformers_baseline import transformers_llama

from specvla_ros.models.policy import DTYPES
from specvla_ros.planning.acceptance_lengths import AcceptanceLengths

CHUNKS = (1, 2, 3)
BASELINE, COMPILED, PLAIN = "transformers", "transformers, compiled", "ar"
_LOSSLESS = ("ar", "pipeline")
_WARM = 2  # actions of generate in front of a turn: a captured decode step is recorded in its second run


def main(
    sizes: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(SIZES)}.")] = "tiny",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; empty: float32 on CPU, else bfloat16.")
    ] = "",
    trace: Annotated[str, typer.Option(help=TRACE_HELP)] = "goal",
    nodes: Annotated[int, typer.Option(help="Of a draft tree, the root included.", min=8)] = 16,
    vision: Annotated[bool, typer.Option(help="Every frame goes through the vision towers.")] = True,
    actions: Annotated[int, typer.Option(help="Timed in each turn.", min=1)] = 40,
    repeats: Annotated[int, typer.Option(help="Turns of each contestant.", min=1)] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Rate, latency and memory of every mode, beside transformers' generate."""
    chosen = DTYPES[dtype or ("float32" if device == "cpu" else "bfloat16")]
    lengths = trace_lengths(trace)
    result: dict[str, Any] = {
        "benchmark": "decode_modes",
        "command": f"python benchmarks/decode_modes.py --sizes {sizes} --device {device} --trace {trace} "
        f"--nodes {nodes} --actions {actions} --repeats {repeats}" + ("" if vision else " --no-vision"),
        "date": date.today().isoformat(),
        "hardware": hardware(device),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": str(chosen).removeprefix("torch."),
        "acceptance": describe(lengths),
        "expected_forwards_per_action": 1 + lengths.verifications(TOKENS - 1),
        "prompt_rows": PROMPT,
        "tokens": TOKENS,
        "tree_nodes": nodes,
        "vision": vision,
        "sizes": {},
    }
    for name in sizes.split(","):
        with tempfile.TemporaryDirectory() as directory:
            policy = random_policy(
                Path(directory),
                SIZES[name],
                prompt_rows=PROMPT,
                tokens=TOKENS,
                vision=vision,
                dtype=chosen,
                device=device,
            )
            result["sizes"][name] = _shapes(SIZES[name], policy) | _measure(policy, lengths, nodes, actions, repeats)
    _print(result)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _shapes(size: Size, policy: RandomPolicy) -> dict[str, Any]:
    llama = size.llama
    return {
        "parameters": sum(p.numel() for p in policy.decoder.parameters()),
        "shapes": {
            "hidden_size": llama.hidden_size,
            "layers": llama.num_hidden_layers,
            "heads": llama.num_attention_heads,
            "kv_heads": llama.num_key_value_heads,
            "intermediate_size": llama.intermediate_size,
            "vocab_size": llama.vocab_size,
        },
    }


def _measure(
    policy: RandomPolicy, lengths: AcceptanceLengths, nodes: int, actions: int, repeats: int
) -> dict[str, Any]:
    generates = {BASELINE: _Generate(policy, compiled=False), COMPILED: _Generate(policy, compiled=True)}
    modes = {"ar": ("ar", 1), "spec": ("spec", 1)}
    modes |= {f"{mode}, {n} chunks" if n > 1 else mode: (mode, n) for mode in ("pipeline", "specpipe") for n in CHUNKS}
    turns = {name: Turns() for name in modes}
    traces = {name: Trace(lengths) for name in modes}
    for _ in range(repeats):
        for generate in generates.values():
            generate.add_turn(actions)
        for name, (mode, chunks) in modes.items():
            settings = settings_of(mode, lengths, tokens=TOKENS, nodes=nodes, chunks=chunks)
            add_turn(turns[name], policy, settings, traces[name], actions)
    rows = {name: generate.summary() for name, generate in generates.items()}
    rows |= {name: each.summary() for name, each in turns.items()}
    for name, (mode, _) in modes.items():
        if mode in _LOSSLESS:
            rows[name]["same_tokens"] = turns[name].tokens == generates[BASELINE].tokens
    for row in rows.values():
        for label, other in (("ar", PLAIN), ("transformers", BASELINE)):
            if "skipped" not in row:
                row[f"rate_over_{label}"] = row["action_rate_hz"] / rows[other]["action_rate_hz"]
                row[f"latency_over_{label}"] = row["latency_s"]["mean"] / rows[other]["latency_s"]["mean"]
    return {"modes": rows}


class _Generate:
    """transformers' generate with the policy's weights: one action after the other.

    Args:
        policy: whose weights.
        compiled: static cache, and its decode step compiled, as transformers does it where it can.
    """

    def __init__(self, policy: RandomPolicy, *, compiled: bool) -> None:
        self._policy = policy
        self._device = policy.decoder.device
        self._model = transformers_llama(policy.decoder)
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
        """Times so many actions, behind some that are not counted; the first of all compiles."""
        if self._skipped:
            return
        if self._on_gpu is not None:
            self._on_gpu.begin()
        try:
            for _ in range(_WARM):
                self._act()
        except Exception as error:  # a compiler that fails must not end the comparison
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
        """Figures for a result, or why there are none."""
        if self._skipped:
            return {"skipped": self._skipped}
        return timing(self._latency_s, self._rates_hz, self._peak_bytes)

    @torch.no_grad()
    def _act(self) -> float:
        """Seconds of one action; its tokens are read back, as an action's must be."""
        started = time.perf_counter()
        prompt = self._policy.prompt_embeddings(frame(1).image, (1,) * TEXT_TOKENS)
        mask = torch.ones(1, len(prompt), dtype=torch.int64, device=self._device)
        out = self._model.generate(
            inputs_embeds=prompt[None],
            attention_mask=mask,
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            **self._options,
        )
        self.tokens = tuple(out[0].tolist())
        return time.perf_counter() - started


def _print(result: dict[str, Any]) -> None:
    for name, size in result["sizes"].items():
        skipped = [f"{mode} skipped: {row['skipped']}" for mode, row in size["modes"].items() if "skipped" in row]
        caption = "; ".join([f"acceptance by trace: {result['acceptance']['name']}", *skipped])
        title = f"{name}, {result['hardware']}, {result['dtype']}; ms from frame to action"
        table = Table(title=title, caption=caption, box=SIMPLE, padding=(0, 0, 0, 1))
        table.add_column("", no_wrap=True)
        for head in ("actions/s", "x ar", "x transf.", "ms", "p50", "p95", "forwards", "lost", "MiB"):
            table.add_column(head, justify="right")
        for mode, row in size["modes"].items():
            if "skipped" not in row:
                table.add_row(mode, *_cells(row))
        Console().print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    latency = [f"{row['latency_s'][name] * 1e3:.1f}" for name in ("mean", "p50", "p95")]
    rates = [f"{row[key]:.2f}" for key in ("action_rate_hz", "rate_over_ar", "rate_over_transformers")]
    counts = [f"{row['forwards_per_action']:.2f}", f"{row['overtaken']:.0%}"] if "overtaken" in row else ["", ""]
    peak = row["peak_bytes"]
    return [*rates, *latency, *counts, "" if peak is None else f"{peak / 2**20:.0f}"]


if __name__ == "__main__":
    typer.run(main)
