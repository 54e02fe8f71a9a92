# SPDX-License-Identifier: Apache-2.0
"""Attacks on the package by classes: how many cases, and how many did what none may.

PYTHONPATH=test python -m attacks.attacks --out benchmarks/results/attacks.json

None may raise anything but an error in words, act otherwise in silence, take long or take gigabytes. Those of a running
node: attack_nodes.py.
"""

import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from attacks.bags import attack_bombs, attack_bytes, attack_descriptions, layouts
from attacks.checkpoints import attack_files, attack_json
from attacks.commands import attack_commands
from attacks.images import attack_images
from attacks.tally import Tally
from rich.console import Console
from support.checkpoints import shard

from benchmarks.harness import Out, finish, result_head
from specvla_ros.lab.plans import NanoShape
from specvla_ros.lab.training.nano import write_nano

_SHAPE = NanoShape(image_size=56, patch_size=14, vision_dim=32, vision_depth=2, hidden_size=64, layers=2, head_dim=32)
_STATISTICS = {"attack": {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}}}
_INSTRUCTIONS = ("lift the red cube", "lift the blue cube")
_LIBRARIES = ("pillow", "safetensors", "tokenizers", "rosbags", "mcap", "zstandard", "lz4", "typer")


def main(
    context: typer.Context,
    limit: Annotated[int, typer.Option(help="Cases of each class, drawn at random; 0: all.", min=0)] = 0,
    commands: Annotated[int, typer.Option(help="Cases of the commands, each a process; 0: all.", min=0)] = 1000,
    seed: Annotated[int, typer.Option(help="Of the drawing and the damage.")] = 0,
    only: Annotated[str, typer.Option(help="Comma-separated names of classes; empty: all.")] = "",
    out: Out = None,
) -> None:
    """Runs the classes one after the other."""
    result = result_head(context, None, **{name: metadata.version(name) for name in _LIBRARIES})
    console = Console(stderr=True)
    torch.set_num_threads(1)
    classes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="specvla_attacks_") as name:
        for label, attack in _classes(Path(name), limit or None, commands or None, seed).items():
            if not only or label in only.split(","):
                classes[label] = attack().as_json()
                console.print(label, {key: classes[label][key] for key in ("tried", "failed", "outcomes")})
    finish(result | {"classes": classes}, out)


def _classes(scratch: Path, limit: int | None, commands: int | None, seed: int) -> dict[str, Callable[[], Tally]]:
    def place(name: str) -> Path:
        (scratch / name).mkdir()
        return scratch / name

    checkpoint = _checkpoint(scratch / "checkpoint")
    bags = layouts(scratch / "bags")
    return {
        "checkpoint files": lambda: attack_files(checkpoint, place("files"), limit=limit, seed=seed),
        "checkpoint JSON": lambda: attack_json(checkpoint, place("json"), limit=limit, seed=seed),
        "bag bytes": lambda: attack_bytes(bags, place("bytes"), limit=limit, seed=seed),
        "bag descriptions": lambda: attack_descriptions(bags, place("descriptions"), limit=limit, seed=seed),
        "bag bombs": lambda: attack_bombs(place("bombs")),
        "image bytes": lambda: attack_images(limit=limit, seed=seed),
        "commands": lambda: attack_commands(place("commands"), limit=commands, seed=seed),
    }


def _checkpoint(directory: Path) -> Path:
    """A small one in two shards, as the Hub has large ones."""
    write_nano(directory, _SHAPE, _INSTRUCTIONS, _STATISTICS, seed=0)
    shard(directory)
    return directory


if __name__ == "__main__":
    typer.run(main)
