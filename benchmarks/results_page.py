"""Writes docs/results.md from the JSON files in benchmarks/results: no figure is typed by hand.

python benchmarks/results_page.py
"""

import json
from pathlib import Path
from typing import Any

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
_LINEAR = """## One row through a linear layer on a CPU

A decode step is matrix-vector products. torch's runs on one core; `specvla_kernels.linear` gives each thread its
share of the rows.

"""
_TAIL = """
Not yet measured: any GPU. The command is `python benchmarks/ar.py --device cuda --sizes 7b --out
benchmarks/results/ar_gpu.json`; this page shows every JSON file it finds.
"""


def main() -> None:
    """Writes the page."""
    parts = [_HEAD]
    for path in sorted((ROOT / "benchmarks" / "results").glob("ar_*.json")):
        parts.append(_table(json.loads(path.read_text(encoding="utf-8")), path.name))
    linear = ROOT / "benchmarks" / "results" / "linear_cpu.json"
    parts.append(_linear(json.loads(linear.read_text(encoding="utf-8"))))
    (ROOT / "docs" / "results.md").write_text("\n".join(parts) + _TAIL, encoding="utf-8")


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
    rates = result["gb_per_s"]
    return (
        f"{_LINEAR}{rates['torch']:.1f} GB/s become {rates['ours']:.1f} GB/s: **{result['speedup']:.2f}** times as fast"
        f" ({result['shape'][0]} × {result['shape'][1]} float32, {result['hardware']}, `{result['command']}`, "
        f"{result['date']}, torch {result['torch']}; `linear_cpu.json`).\n"
    )


if __name__ == "__main__":
    main()
