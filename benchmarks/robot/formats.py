# SPDX-License-Identifier: Apache-2.0
"""Effect of quantised weights on the nano policy's answers and success, on a CPU.

`python -m benchmarks.robot.formats --pictures 200 --episodes 20`

Every format of `model.quantization` answers the same images by plain decoding and is compared with float32: tokens, and
the deviation of the commanded motion. Then each acts from the same starts, in lockstep, paired with float32. Nothing is
timed: on a CPU some formats are only computed for their rounding.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Annotated, Any

import typer

from benchmarks.harness import FRAMES_FIRST_SEED, Episodes, Out, Seed, finish, of_weights, result_head, show_progress
from benchmarks.random_policy import VISION
from benchmarks.results_page import RESULTS
from specvla_ros import Action, Engine, EngineSettings, Observation
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.deviation import deviation
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.evaluation.simulate import TABLE, make_robot, tasks_of
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes, summarise_episodes
from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult, Rollout, tick_time
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder
from specvla_ros.models.families.openvla.target import require_openvla
from specvla_ros.models.quantization import QUANTIZATIONS, fast_format, quantize_layer, quantize_products
from specvla_ros.models.target import Target

Episode = tuple[str, int]
Answers = list[Action]

PLAIN = "none"
"""The reference format: float32."""


def policy_in(weights: str) -> Target:
    """Returns the nano policy in a format.

    Policies refuse float8 on a CPU, which has no product for it; the operators' references compute it here.
    """
    chosen, vision = weights.removesuffix(VISION), weights.endswith(VISION)
    if chosen != "fp8":
        return load_target(nano_policy(), device="cpu", quantization=chosen, quantize_vision=vision)
    policy = require_openvla(load_target(nano_policy(), device="cpu"))
    for layer in policy.decoder.layers:
        assert isinstance(layer, DecoderLayer)
        quantize_layer(layer, chosen)
    if vision:
        for part in (policy.model.towers, policy.model.projector):
            quantize_products(part, chosen)
    return policy


def _decoder(policy: Target) -> PackedDecoder:
    assert isinstance(policy.decoder, PackedDecoder)
    return policy.decoder


def how_it_runs(weights: str, policy: Target) -> str:
    """Describes how a format's products are computed here, and what differs on a GPU."""
    packed = "a packed product in int8" if fast_format(_decoder(policy)) else "the reference of the int8 product"
    return {
        "none": "float32",
        "int4": "unpacked to float32 for every product; uniform steps, where torchao searches for better ones on a GPU",
        "w8a8": f"{packed}, with the rounding of the GPU's kernel",
        "w8a8_hadamard": f"{packed}, with the rounding of the GPU's kernel, after rotating the channels",
        "fp8": "the reference of the GPU's kernel, which a policy on a CPU refuses",
    }[weights.removesuffix(VISION)] + (", in the vision too" if weights.endswith(VISION) else "")


def answers(policy: Target, frames: Sequence[Observation]) -> Answers:
    """Returns the plain decoder's answers, one after the other."""
    engine, found = Engine(policy, EngineSettings("ar")), []
    for frame in frames:
        outcome = engine.act(frame)
        assert isinstance(outcome, Action), outcome
        found.append(outcome)
    return found


def agreement(plain: Answers, own: Answers) -> dict[str, Any]:
    """Compares answers with the plain ones to the same images."""
    pairs = [(one.tokens, other.tokens) for one, other in zip(plain, own, strict=True)]
    same = [[a == b for a, b in zip(one, other, strict=True)] for one, other in pairs]
    return {
        "tokens": sum(map(len, same)),
        "same_tokens": sum(map(sum, same)),
        "answers": len(same),
        "same_answers": sum(map(all, same)),
        "deviation": asdict(deviation([each.values for each in plain], [each.values for each in own])),
    }


def episodes_of(name: str, policy: Target, wanted: Sequence[Episode]) -> dict[Episode, EpisodeResult]:
    """Lets a policy act from each start while the world waits for it."""
    rollout = Rollout(Engine(policy, EngineSettings("ar")), make_robot(TABLE), Clock.LOCKSTEP, tick_time())
    done: dict[Episode, EpisodeResult] = {}
    for task, seed in wanted:
        done[task, seed] = rollout.run(task, seed)
        show_progress(name, None, len(done), len(wanted))
    return done


def main(
    context: typer.Context,
    pictures: Annotated[int, typer.Option(help="Images that every format answers.", min=1)] = 200,
    episodes: Episodes = 20,
    seed: Seed = 0,
    out: Out = RESULTS / "formats_cpu.json",
) -> None:
    """Compares every weight format with float32."""
    policies = {weights: policy_in(weights) for weights in (*QUANTIZATIONS, f"w8a8{VISION}", f"fp8{VISION}")}
    seen = islice(simulation_source(policies[PLAIN], FRAMES_FIRST_SEED), pictures)
    frames = [replace(frame, stamp_ns=number) for number, frame in enumerate(seen, start=1)]
    wanted = [(task, seed + i) for i in range(episodes) for task in tasks_of(TABLE, ())]
    said = {weights: answers(policy, frames) for weights, policy in policies.items()}
    did = {weights: episodes_of(weights, policy, wanted) for weights, policy in policies.items()}
    formats = {
        weights: {
            "how": how_it_runs(weights, policy),
            "agreement": agreement(said[PLAIN], said[weights]),
            **_success(did[PLAIN], did[weights]),
        }
        for weights, policy in policies.items()
    }
    chosen = {"pictures": pictures, "episodes_per_task": episodes, "first_seed": seed}
    width = {"hidden_size": policies[PLAIN].decoder.config.hidden_size}
    finish(result_head(context) | of_weights(nano_policy()) | chosen | width | {"formats": formats}, out)


def _success(plain: dict[Episode, EpisodeResult], own: dict[Episode, EpisodeResult]) -> dict[str, Any]:
    summary = summarise_episodes(list(own.values()), context={})
    return {
        "success": summary.success.as_json(),
        "tasks": {name: task.success.as_json() for name, task in summary.tasks.items()},
        "against": compare_episodes(plain, own).as_json(),
    }


if __name__ == "__main__":
    typer.run(main)
