# SPDX-License-Identifier: Apache-2.0
"""Counts strict answers that differ from plain decoding's, and their distance, by dtype on the bundled policies.

python -m benchmarks.speculation.near_ties

Plain decoding and the drafting modes answer the same images, decoded according to each policy's decoding.yaml.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import FRAMES_FIRST_SEED, Out, finish, result_head
from benchmarks.results_page import RESULTS, weights_digest
from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import DECODING_FILE, bundled_policy
from specvla_ros.lab.evaluation.certificate import Comparison, Finding
from specvla_ros.lab.evaluation.compare import compare
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.models.checkpoint import load_target

_PLAIN, _MODES = "ar", ("spec", "specpipe")


def main(
    context: typer.Context,
    frames: Annotated[
        str, typer.Option(help="Images per policy, comma-separated.")
    ] = "nano=100,reasoning=30,fast=24,digits=10",
    dtypes: Annotated[str, typer.Option(help="Dtypes, comma-separated.")] = "float32,float16,bfloat16",
    out: Out = RESULTS / "near_ties.json",
) -> None:
    """Decodes the same images plainly and with drafts in every dtype."""
    rows = []
    for name, _, count in (each.partition("=") for each in frames.split(",")):
        directory = bundled_policy(name)
        settings = _settings(directory)
        source = simulation_source(load_target(directory, device="cpu"), FRAMES_FIRST_SEED, engine=settings)
        pictures = list(islice(source, int(count)))
        rows += [
            {"policy": name, "weights": weights_digest(directory)} | row
            for dtype in dtypes.split(",")
            for row in _rows(directory, dtype, settings, pictures)
        ]
    finish(result_head(context) | {"rows": rows}, out)


def _settings(directory: Path) -> EngineSettings:
    """The policy's own decoding settings, in order, so that both sides answer every image."""
    file = directory / DECODING_FILE
    return replace(engine_settings_from(params_file=file if file.exists() else None), in_order=True)


def _rows(
    directory: Path, dtype: str, settings: EngineSettings, pictures: Sequence[Observation]
) -> list[dict[str, Any]]:
    target = load_target(directory, device="cpu", dtype=dtype)
    engines = {mode: Engine(target, replace(settings, mode=mode)) for mode in (_PLAIN, *_MODES)}
    found = {mode: (Comparison(target), Finding()) for mode in _MODES}
    for seen, answers in compare(engines, pictures, in_flight=True):
        for mode, (comparison, finding) in found.items():
            comparison.add(finding, directory.name, seen, answers[_PLAIN].outcome, answers[mode].outcome)
    return [{"dtype": dtype, "mode": mode} | _row(*each) for mode, each in found.items()]


def _row(comparison: Comparison, finding: Finding) -> dict[str, Any]:
    counts = {name: getattr(finding, name) for name in ("actions", "tokens", "near_ties", "differing", "ties")}
    widest = max((each["margin"] or 0.0 for each in comparison.differences), default=0.0)
    return counts | {"tie": comparison.tie, "widest_tie": widest} | (comparison.deviation() or {})


if __name__ == "__main__":
    typer.run(main)
