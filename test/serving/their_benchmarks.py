# SPDX-License-Identifier: Apache-2.0
"""Run with an environment that has vla-eval and inspect-robots, and none of this package: evaluates a served policy.

python their_benchmarks.py PORT FRAMES.npz ANSWERS.npz TOKEN
"""

import asyncio
import sys
import tempfile
from typing import Any

import inspect_robots as ir
import numpy as np
from inspect_robots.mock import CubePickEmbodiment
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.cli.smoke import _make_stub_benchmark
from vla_eval.connection import Connection
from vla_eval.runners.sync_runner import SyncEpisodeRunner


class Frames(StepBenchmark):
    """Shows given frames, and keeps what it is told to do."""

    def __init__(self, images: np.ndarray, prompt: str) -> None:
        super().__init__()
        self.images, self.prompt = images, prompt
        self.actions: list[np.ndarray] = []

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": self.prompt}]

    def reset(self, task: dict[str, Any]) -> int:
        self.actions.clear()
        return 0

    def step(self, action: dict[str, Any]) -> StepResult:
        self.actions.append(action["actions"])
        n = len(self.actions)
        return StepResult(obs=min(n, len(self.images) - 1), reward=0.0, done=n == len(self.images), info={})

    def make_obs(self, raw_obs: int, task: dict[str, Any]) -> dict[str, Any]:
        image = self.images[raw_obs]
        return {"images": {"agentview": image, "wrist": image}, "task_description": task["name"], "state": np.zeros(8)}

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": step_result.done}


async def evaluate(benchmark: Any, url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    async with Connection(url) as connection:
        result = await SyncEpisodeRunner().run_episode(benchmark, benchmark.get_tasks()[0], connection, max_steps=50)
        return result, connection.server_info


class Served:
    """inspect-robots' policy protocol over openpi's client, as docs/how-to/serve.md shows it."""

    def __init__(self, client: WebsocketClientPolicy, space: ir.Box) -> None:
        self.info = ir.PolicyInfo(name="served", action_space=space)
        self.config = ir.PolicyConfig()
        self._client = client
        self.seen: list[np.ndarray] = []
        self.answers: list[np.ndarray] = []

    def reset(self, scene: ir.Scene) -> None:
        self.instruction = scene.instruction

    def act(self, observation: ir.Observation) -> ir.ActionChunk:
        image = observation.images["top"]
        actions = self._client.infer({"image": image, "prompt": self.instruction})["actions"]
        self.seen.append(image)
        self.answers.append(actions)
        return ir.ActionChunk(actions=[ir.Action(data=each[: self.info.action_space.dim]) for each in actions])


def main() -> None:
    port, frames, answers, token = sys.argv[1:]
    given = np.load(frames)
    url = f"ws://robot:{token}@127.0.0.1:{port}/vla-eval"
    benchmark = Frames(given["images"], str(given["instruction"]))
    result, told = asyncio.run(evaluate(benchmark, url))
    assert result["steps"] == len(given["images"]), result
    assert told["protocol_version"] == 1 and told["model_server"] == "specvla", told
    own, _ = asyncio.run(evaluate(_make_stub_benchmark({"name": "smoke_test"}), url))  # of `vla-eval test`
    assert own["metrics"] == {"success": True}, own

    robot = CubePickEmbodiment()
    policy = Served(WebsocketClientPolicy("127.0.0.1", int(port), api_key=token), robot.info.action_space)
    task = ir.resolve("task", "cubepick-reach", num_scenes=2, max_steps=3)
    with tempfile.TemporaryDirectory() as logs:
        (log,) = ir.eval(task, policy, robot, log_dir=logs)
    assert log.status == "success", log
    np.savez(answers, vla_eval=benchmark.actions, seen=policy.seen, inspect_robots=policy.answers)


main()
