"""What the benchmarks over simulated episodes share: options, and the head of their JSON file."""

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

from specvla_ros.evaluation.provenance import cpu_name, software

_RESULTS = Path(__file__).parent / "results"


def parser(doc: str | None, *, work: str, out: str, episodes: int, of: str = "per task") -> argparse.ArgumentParser:
    """The options of all of them.

    Args:
        doc: what the script says of itself.
        work: directory for the episodes.
        out: file among the results.
        episodes: how many, if nothing else is said.
        of: what the number of episodes means.
    """
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--episodes", type=int, default=episodes, help=of)
    options.add_argument("--seed", type=int, default=0, help="of the first start; training's begin at 1000000")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--work", type=Path, default=Path(work), help="episodes; goes on where it was")
    options.add_argument("--out", type=Path, default=_RESULTS / out)
    return options


def result_head(benchmark: str, options: argparse.Namespace) -> dict[str, Any]:
    """How, when and on what a script ran."""
    return {
        "command": f"python benchmarks/{benchmark}.py --episodes {options.episodes} --workers {options.workers}",
        "date": date.today().isoformat(),
        "hardware": cpu_name(),
        "software": software(),
    }


def write_result(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes the JSON file."""
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
