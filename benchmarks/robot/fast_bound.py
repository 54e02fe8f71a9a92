# SPDX-License-Identifier: Apache-2.0
"""The part of an answer in FAST tokens that must be known before the position of its first action is.

python -m benchmarks.robot.fast_bound

An action is the inverse cosine transform of all its dimension's coefficients. The missing ones are only bounded by the
vocabulary: each lies between the lowest and the highest coefficient that a token can write. With half of that range a,
the transform C, the scale s and half the dimension's range h, a missing coefficient of frequency f moves the action
at time t by at most a |C[f, t]| h / s, and these add up. The answers are the bundled policy's, on images of its own
episodes.
"""

import statistics
from itertools import islice
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import FRAMES_FIRST_SEED, Out, finish, of_weights, result_head
from benchmarks.results_page import RESULTS
from specvla_ros import Action, Engine, EngineSettings, UserError
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.evaluation.frame_sources import lossless, simulation_source
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.codecs.fast_tokenizer import HALF, cosines

POLICY, USEFUL_MM = "fast", 5.0


def main(
    context: typer.Context,
    images: Annotated[int, typer.Option(help="Images from the policy's episodes.", min=1)] = 100,
    out: Out = RESULTS / "fast_bound.json",
) -> None:
    """Computes the bound for every prefix, and the tokens after which it is useful."""
    directory = bundled_policy(POLICY)
    policy = load_target(directory, device="cpu")
    codec = policy.codec
    assert isinstance(codec, FastCodec)
    dims, bounds_mm = len(codec.names), first_action_bounds_mm(codec)
    engine, taken = Engine(policy, lossless(policy, EngineSettings())), []
    for seen in islice(simulation_source(policy, FRAMES_FIRST_SEED), images):
        engine.reset()
        answer = engine.act(seen)
        if isinstance(answer, Action):
            known = [codec.position(answer.tokens[:n]) for n in range(len(answer.tokens) + 1)]
            useful = next(n for n, count in enumerate(known) if bounds_mm[count] <= USEFUL_MM)
            taken.append((useful, len(answer.tokens)))
    rows: list[dict[str, Any]] = [
        {"frequencies": n, "coefficients": n * dims, "bound_mm": bounds_mm[n * dims]} for n in range(codec.horizon + 1)
    ]
    useful_at = next(n for n, bound in enumerate(bounds_mm) if bound <= USEFUL_MM)
    result = result_head(context) | of_weights(directory) | {"policy": POLICY, "useful_mm": USEFUL_MM, "rows": rows}
    tokens = {"useful": statistics.fmean(n for n, _ in taken), "all": statistics.fmean(n for _, n in taken)}
    finish(result | {"useful_coefficients": useful_at, "coefficients": len(bounds_mm) - 1, "tokens": tokens}, out)


def first_action_bounds_mm(codec: FastCodec) -> list[float]:
    """Greatest distance of the first action's position from the middle of those that are still possible.

    By number of known coefficients, from 0 to all. Raises UserError if the vocabulary does not bound the others.
    """
    tokens = [token.decode("utf-8", errors="replace") for token in codec.tokenizer.token_bytes]
    if any(HALF in token for token in tokens):
        raise UserError("a vocabulary that splits characters does not bound their coefficients")
    half_span = max(map(ord, "".join(tokens))) / 2
    half_range_m = (codec.action_range[1] - codec.action_range[0])[:3] / 2
    moved = np.zeros((codec.horizon, len(codec.names)))  # by each coefficient, which are written row by row
    moved[:, :3] = np.abs(cosines(codec.horizon))[:, :1] * half_span / codec.tokenizer.scale * half_range_m
    number = np.arange(moved.size).reshape(moved.shape)
    left_m = [np.where(number >= known, moved, 0.0).sum(axis=0) for known in range(moved.size + 1)]
    return [float(np.linalg.norm(each)) * 1e3 for each in left_m]


if __name__ == "__main__":
    typer.run(main)
