# SPDX-License-Identifier: Apache-2.0
"""Run where LIBERO is, with vla-eval behind this environment's packages: its LIBERO benchmark and a served policy.

python their_libero.py PORT SEEN.npz TOKEN SITE_PACKAGES
"""

import asyncio
import sys
from typing import Any

import numpy as np

_STEPS = 6


async def evaluate(benchmark: Any, url: str) -> dict[str, Any]:
    from vla_eval.connection import Connection
    from vla_eval.runners.sync_runner import SyncEpisodeRunner

    async with Connection(url) as connection:
        task = benchmark.get_tasks()[0]
        return await SyncEpisodeRunner().run_episode(benchmark, task, connection, max_steps=_STEPS)


def main() -> None:
    port, out, token, packages = sys.argv[1:]
    sys.path.append(packages)
    from vla_eval.benchmarks.libero.benchmark import LIBEROBenchmark

    class Recorded(LIBEROBenchmark):
        """Keeps what it shows and what it is told to do."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.seen: list[np.ndarray] = []
            self.done: list[np.ndarray] = []

        def make_obs(self, raw_obs: Any, task: Any) -> Any:
            shown = super().make_obs(raw_obs, task)
            (image,) = shown["images"].values()
            self.seen.append(image)
            return shown

        def step(self, action: Any) -> Any:
            self.done.append(np.asarray(action["actions"]))
            return super().step(action)

    benchmark = Recorded(suite="libero_goal", max_steps=_STEPS)
    result = asyncio.run(evaluate(benchmark, f"ws://robot:{token}@127.0.0.1:{port}/vla-eval"))
    assert result["steps"] == _STEPS, result
    told = benchmark.get_tasks()[0]["name"]
    np.savez(out, seen=benchmark.seen[:_STEPS], done=benchmark.done, instruction=told)


main()
