# SPDX-License-Identifier: Apache-2.0
"""The process of benchmarks/speed/revisions.py that decodes with one revision's code, which is on PYTHONPATH.

Uses only what the engine had at every revision compared. Each line of its input is a mode and a number of actions; its
answer is one line of JSON.
"""

import json
import pickle
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.checkpoint import load_target

PERIOD_NS = 200_000_000  # between the images, in their stamps
MAX_TEXT_TOKENS = 128  # as in config/common.yaml


class Decoding:
    """One mode's engine with its images."""

    def __init__(self, target: Any, mode: str, images: list[dict[str, Any]]) -> None:
        self._engine = Engine(target, EngineSettings(mode, max_text_tokens=MAX_TEXT_TOKENS))
        self._engine.warm_up()
        self._blank = replace(target.blank_observation(), prompt_ids=None)
        self._images, self._numbers = images, count(1)

    def action(self) -> tuple[list[int], list[tuple[float, float]]]:
        """The next action's tokens, and the CPU and wall seconds of its ticks."""
        number = next(self._numbers)
        seen = self._images[number % len(self._images)]
        self._engine.submit(replace(self._blank, stamp_ns=number * PERIOD_NS, **seen))
        ticks: list[tuple[float, float]] = []
        while True:
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            outcomes: Any = self._engine.tick()
            ticks.append((time.thread_time() - cpu_s, time.perf_counter() - wall_s))
            if outcomes:
                return list(outcomes[-1].tokens), ticks


def main() -> None:
    """Answers every line until the input ends."""
    policy, images, modes = sys.argv[1:]
    target, seen = load_target(Path(policy), device="cpu"), pickle.loads(Path(images).read_bytes())
    decoding = {mode: Decoding(target, mode, seen) for mode in modes.split(",")}
    for line in sys.stdin:
        mode, actions = line.split()
        answers = [decoding[mode].action() for _ in range(int(actions))]
        print(json.dumps({"tokens": [tokens for tokens, _ in answers], "ticks": [t for _, t in answers]}), flush=True)


if __name__ == "__main__":
    main()
