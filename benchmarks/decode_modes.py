"""Every decoding mode end to end beside transformers' generate: same weights, same prompt, taking turns in one run.

Ours is the real engine with a frame always waiting. Random weights: time does not depend on their values, but
acceptance does, so it comes from a named trace. A turn of an engine fills the pipeline first and then times so many
actions; latency runs from the moment a frame is taken, which is the moment it is admitted. Some modes are then compared
on quantised weights, taking turns with the same modes on weights as they are.

    python benchmarks/decode_modes.py                                  # this CPU: tiny
    python benchmarks/decode_modes.py --device cuda --sizes 7b         # a GPU: OpenVLA-7B's shapes
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from acceptance_trace import TRACE_HELP, Trace, describe, trace_lengths
from generate_turns import GenerateTurns
from quantized_modes import UNQUANTISED, measure_quantized
from random_policy import RandomPolicy, random_policy
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from saturated import Run, Turns, add_turn, settings_of
from shapes import PROMPT, SIZES, TOKENS, Size
from speed_benchmark import Device, Dtype, Out, Sizes, dtype_on, result_head, write_result

from specvla_ros.models.quantization import QUANTIZATIONS

CHUNKS = (1, 2, 3)
BASELINE, COMPILED, PLAIN = "transformers", "transformers, compiled", "ar"
_LOSSLESS = ("ar", "pipeline")


def main(
    sizes: Sizes = "tiny",
    device: Device = "cpu",
    dtype: Dtype = "",
    trace: Annotated[str, typer.Option(help=TRACE_HELP)] = "goal",
    nodes: Annotated[int, typer.Option(help="Of a draft tree, the root included.", min=8)] = 16,
    quantization: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(QUANTIZATIONS)}.")] = (
        "none,w8a8,int4,fp8"
    ),
    vision: Annotated[bool, typer.Option(help="Every frame goes through the vision towers.")] = True,
    actions: Annotated[int, typer.Option(help="Timed in each turn.", min=1)] = 40,
    repeats: Annotated[int, typer.Option(help="Turns of each contestant.", min=1)] = 5,
    out: Out = None,
) -> None:
    """Rate, latency and memory of every mode, beside transformers' generate."""
    chosen, formats = dtype_on(device, dtype), _formats(quantization)
    lengths = trace_lengths(trace)
    options = {"sizes": sizes, "device": device, "dtype": dtype, "trace": trace, "nodes": nodes}
    options |= {"actions": actions, "repeats": repeats, "quantization": quantization, "vision": vision}
    result = result_head("decode_modes", chosen, options, {"transformers": transformers.__version__}) | {
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
            run = Run(lengths, nodes, actions, repeats)
            measured: dict[str, Any] = {"modes": _measure(policy, run)}
            if formats:
                measured["quantized"] = measure_quantized(policy, formats, run)
            result["sizes"][name] = _shapes(SIZES[name], policy) | measured
    _print(result)
    write_result(result, out)


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


def _formats(quantization: str) -> list[str]:
    """Those that are asked for, but `none`."""
    formats = quantization.split(",")
    unknown = [name for name in formats if name not in QUANTIZATIONS]
    if unknown:
        raise typer.BadParameter(f"there is no quantisation '{unknown[0]}'; known: {', '.join(QUANTIZATIONS)}")
    return [name for name in formats if name != UNQUANTISED]


def _measure(policy: RandomPolicy, run: Run) -> dict[str, Any]:
    generates = {BASELINE: GenerateTurns(policy, compiled=False), COMPILED: GenerateTurns(policy, compiled=True)}
    modes = {"ar": ("ar", 1), "spec": ("spec", 1)}
    modes |= {f"{mode}, {n} chunks" if n > 1 else mode: (mode, n) for mode in ("pipeline", "specpipe") for n in CHUNKS}
    turns = {name: Turns() for name in modes}
    traces = {name: Trace(run.lengths) for name in modes}
    for _ in range(run.repeats):
        for generate in generates.values():
            generate.add_turn(run.actions)
        for name, (mode, chunks) in modes.items():
            settings = settings_of(mode, run.lengths, tokens=TOKENS, nodes=run.nodes, chunks=chunks)
            add_turn(turns[name], policy, settings, traces[name], run.actions)
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
    return rows


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
        if "quantized" in size:
            _print_quantized(name, size["quantized"])


def _print_quantized(name: str, formats: dict[str, Any]) -> None:
    skipped = [f"{each} skipped: {found['skipped']}" for each, found in formats.items() if "skipped" in found]
    table = Table("weights, mode", "actions/s", "x ar", "ms", title=f"{name}, quantised", caption="; ".join(skipped))
    for each, found in formats.items():
        for mode, row in found.get("modes", {}).items():
            rates = [f"{row[key]:.2f}" for key in ("action_rate_hz", "rate_over_ar")]
            table.add_row(f"{each}, {mode}", *rates, f"{row['latency_s']['mean'] * 1e3:.1f}")
    Console().print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    latency = [f"{row['latency_s'][name] * 1e3:.1f}" for name in ("mean", "p50", "p95")]
    rates = [f"{row[key]:.2f}" for key in ("action_rate_hz", "rate_over_ar", "rate_over_transformers")]
    counts = [f"{row['forwards_per_action']:.2f}", f"{row['overtaken']:.0%}"] if "overtaken" in row else ["", ""]
    peak = row["peak_bytes"]
    return [*rates, *latency, *counts, "" if peak is None else f"{peak / 2**20:.0f}"]


if __name__ == "__main__":
    typer.run(main)
