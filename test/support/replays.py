"""What tests of replays share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specvla_ros.evaluation.replay_summary import ReplaySummary

Run = Callable[..., tuple[ReplaySummary, list[dict[str, Any]], Path]]


def read_frames(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "frames.jsonl").read_text().splitlines()]


def drops_of(frames: list[dict[str, Any]]) -> list[str | None]:
    return [frame["drop"] and frame["drop"]["reason"] for frame in frames]
