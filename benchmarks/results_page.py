"""Writes docs/results.md from the JSON files in benchmarks/results: no figure is typed by hand.

python benchmarks/results_page.py
"""

import json
from pathlib import Path
from typing import Any

from results_cells import ms, rate, source
from results_decoding import SECTIONS
from results_speed import ON_GPU

ROOT = Path(__file__).resolve().parents[1]

_HEAD = """# Results

Written by `python benchmarks/results_page.py` from the JSON files in `benchmarks/results`, which name hardware and
versions. Every comparison was measured side by side in one run.

## The plain decoder (`ar`) beside transformers' generate

Both decode 7 tokens greedily behind the same 290 prompt embeddings, with the same weights in memory, taking turns in
one process; medians. Random weights, since time does not depend on their values. *tiny* and *1b* name the language
model; the vision towers of *1b* are OpenVLA's (DINOv2 ViT-L and SigLIP So400m). The bandwidth limit of a decode step
is one read of all weights at the measured read bandwidth.
"""
_LINEAR = """## A few rows through a linear layer on a CPU

A decode step is matrix-vector products. torch's runs on one core; `specvla_kernels.linear` gives each thread its
share of the weight's rows. For the few rows of a draft tree's level it multiplies from the other side. Float32, GB of
weights read per second; {hardware}, `{command}`, {date}, torch {torch}; `linear_cpu.json`.

| | rows | torch | ours | ratio |
|---|---|---|---|---|
"""
_SIMULATION = """
## What latency costs in closed loop

The nano policy at the simulated table, plain decoder, {episodes} held-out starts per task, the same for every column
(seeds {first} to {last}; training's begin at 1000000). In *lockstep* the world waits for each action; in *realtime* it
moves on while the policy thinks, for as long as OpenVLA-7B would need on that device. **The devices are emulated**:
none of them ran; each stage counted for the time in `specvla_ros/planning/devices/`, assumed from a roofline.
Intervals are Wilson's at 95 %; p is the exact McNemar test against lockstep over the same starts.

"""
_TAIL = """
Not yet measured: any GPU. What would be, each with `--device cuda --sizes 7b --out benchmarks/results/NAME_gpu.json`:
`ar.py` and `decode_modes.py` (every mode beside transformers' generate, with and without static cache and
torch.compile, and on quantised weights), `kernels.py` (kernels and stages against the roofline), `tick_cost.py`,
`kv_layouts.py`, `sensitivity.py`; and `soak.py --device cuda --dtype float32`. This page shows every JSON file it
finds.
"""


def main() -> None:
    """Writes the page."""
    parts = [_HEAD]
    for path in sorted((ROOT / "benchmarks" / "results").glob("ar_*.json")):
        parts.append(_table(json.loads(path.read_text(encoding="utf-8")), path.name))
    linear = ROOT / "benchmarks" / "results" / "linear_cpu.json"
    parts.append(_linear(json.loads(linear.read_text(encoding="utf-8"))))
    simulation = ROOT / "benchmarks" / "results" / "simulation_nano.json"
    if simulation.exists():
        parts.append(_simulation(json.loads(simulation.read_text(encoding="utf-8"))))
    for name, section in SECTIONS.items():
        path = ROOT / "benchmarks" / "results" / name
        if path.exists():
            parts.append(section(json.loads(path.read_text(encoding="utf-8"))))
    gpus = [path for ending in ON_GPU for path in (ROOT / "benchmarks" / "results").glob(f"*_{ending}.json")]
    (ROOT / "docs" / "results.md").write_text("\n".join(parts) + ("" if gpus else _TAIL), encoding="utf-8")


def _table(result: dict[str, Any], file: str) -> str:
    sizes = result["sizes"]
    rows = [
        ("language model parameters", lambda f: f"{f['parameters'] / 1e6:.0f} M"),
        ("vision and projector", lambda f: f"{f['vision_s'] * 1e3:.1f} ms"),
        ("prefill of 290 rows", lambda f: f"{f['prefill_s'] * 1e3:.1f} ms"),
        ("decode step", lambda f: f"{f['decode_step_s'] * 1e3:.2f} ms"),
        ("decode rate", lambda f: f"{f['decode_tokens_per_s']:.1f} tokens/s"),
        ("share of the bandwidth limit", lambda f: f"{f['decode_share_of_bandwidth']:.0%}"),
        ("language model per action, ours", lambda f: f"{f['language_model_s'] * 1e3:.1f} ms"),
        ("language model per action, transformers", lambda f: f"{f['transformers_language_model_s'] * 1e3:.1f} ms"),
        ("**transformers' time / ours**", lambda f: f"**{f['speedup_over_transformers']:.2f}**"),
        ("same tokens", lambda f: "yes" if f["same_tokens"] else "no"),
    ]
    lines = [
        f"### {result['hardware']}, {result['dtype']}",
        "",
        f"`{result['command']}` on {result['date']}; torch {result['versions']['torch']}, transformers "
        f"{result['versions']['transformers']}; read bandwidth {result['read_bandwidth_gb_s']:.1f} GB/s. "
        f"Data: `{file}`.",
        "",
        "| | " + " | ".join(sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    lines += [f"| {label} | " + " | ".join(text(figures) for figures in sizes.values()) + " |" for label, text in rows]
    return "\n".join(lines) + "\n"


def _linear(result: dict[str, Any]) -> str:
    rows = [
        f"| {each['matrix']}, {each['shape'][0]} × {each['shape'][1]} | {each['rows']} "
        f"| {each['gb_per_s']['torch']:.1f} | {each['gb_per_s']['ours']:.1f} | **{each['speedup']:.2f}** |"
        for each in result["cases"]
    ]
    return _LINEAR.format(**result) + "\n".join(rows) + "\n"


def _simulation(result: dict[str, Any]) -> str:
    columns = result["results"]
    devices = result["devices"]
    heads = ["lockstep" if name == "lockstep" else f"realtime, emulated {devices[name]['name']}" for name in columns]
    rows = [("**success**", lambda each: f"**{rate(each['success'])}**")]
    rows += [
        (task, lambda each, task=task: rate(each["tasks"][task]["success"])) for task in columns["lockstep"]["tasks"]
    ]
    rows += [
        ("moved what the instruction names", lambda each: rate(each["listened"])),
        ("latency p50 / p95", lambda each: f"{ms(each, 'p50')} / {ms(each, 'p95')} ms"),
        ("actions per second", lambda each: f"{each['action_rate_hz']:.1f}"),
        ("median time to success", lambda each: f"{_median_time(each):.1f} s"),
        ("p against lockstep", lambda each: f"{each['against_lockstep']['p']:.2g}"),
    ]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for label, text in rows:
        cells = [
            "" if label.startswith(("p against", "latency")) and name == "lockstep" else text(each)
            for name, each in columns.items()
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    text = _SIMULATION.format(
        episodes=result["episodes_per_task"],
        first=result["first_seed"],
        last=result["first_seed"] + result["episodes_per_task"] - 1,
    )
    return text + "\n".join(lines) + "\n\n" + source(result, "simulation_nano.json")


def _median_time(each: dict[str, Any]) -> float:
    """Mean over the tasks of the median world time of their successes."""
    times = [task["time_to_success_s"] for task in each["tasks"].values() if task["time_to_success_s"] is not None]
    return sum(times) / len(times) if times else float("nan")


if __name__ == "__main__":
    main()
