"""What the speed benchmarks share: options, and the head of their JSON file."""

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from shapes import SIZES

from specvla_ros.evaluation.provenance import cpu_name
from specvla_ros.models.checkpoint import DTYPES

Sizes = Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(SIZES)}.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; empty: float32 on CPU, else bfloat16.")]
Out = Annotated[Path | None, typer.Option(help="JSON file for the figures.")]


def dtype_on(device: str, dtype: str) -> torch.dtype:
    """What `Dtype` names."""
    return DTYPES[dtype or ("float32" if device == "cpu" else "bfloat16")]


def result_head(
    benchmark: str, dtype: torch.dtype, options: Mapping[str, object], versions: dict[str, str] | None = None
) -> dict[str, Any]:
    """Which benchmark ran, how, when and on what.

    Args:
        benchmark: the script's name.
        dtype: of weights and activations.
        options: of the command, by name and in order, the device among them; see `command`.
        versions: of other libraries than torch that matter.
    """
    return {
        "benchmark": benchmark,
        "command": command(benchmark, options),
        "date": date.today().isoformat(),
        "hardware": hardware(str(options["device"])),
        "versions": {"torch": torch.__version__} | (versions or {}),
        "dtype": str(dtype).removeprefix("torch."),
    }


def command(benchmark: str, options: Mapping[str, object]) -> str:
    """What to type for the same figures.

    Args:
        benchmark: the script's name.
        options: what is true or empty is as it is by default, and left out; what is false becomes `--no-…`.
    """
    words = [f"python benchmarks/{benchmark}.py"]
    for name, value in options.items():
        if value is False:
            words.append(f"--no-{name}")
        elif value is not True and value != "":
            words.append(f"--{name} {value}")
    return " ".join(words)


def hardware(device: str) -> str:
    """Its name."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def write_result(result: dict[str, Any], out: Path | None) -> None:
    """Writes the JSON file, if one is wanted."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
