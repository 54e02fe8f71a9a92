# SPDX-License-Identifier: Apache-2.0
"""Draft heads trained by the paper's recipe and by the shipped head's: same answers, same passes.

    pip install -r requirements/train.txt
    python -m benchmarks.speculation.head_recipes

Spec-VLA's table 4: learning rate 5e-5, batch 16, 2000 warm-up steps, clipping at 0.5, regression 1.0 and cross-entropy
0.1, on the target's own features. Ours has another learning rate and trains on the head's own features, five tokens
deep. The target answers images of its own episodes at the table; at the end all heads draft for images of other
episodes, in turns. Takes about 30 minutes on one CPU core. Heads that draft in one forward: one_pass_drafts.py.
"""

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import FRAMES_FIRST_SEED, Out, Work, finish, of_weights, result_head, take_turns
from benchmarks.results_page import RESULTS
from specvla_ros import Action, Engine, EngineSettings, Observation
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.terminal import progress_bar
from specvla_ros.lab.training.train_draft import DraftTraining, DraftValidation, collect_features, train_draft
from specvla_ros.lab.training.trainer import Progress
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.openvla.target import require_openvla
from specvla_ros.models.target import Target
from specvla_ros.speculation.settings import DraftSettings

_MAX_BYTES = 20e9
_IMAGES = 100
_TURNS = 9
_PLAIN = "ar"


def main(
    context: typer.Context,
    frames: Annotated[int, typer.Option(help="Images for the target to answer.", min=256)] = 12000,
    epochs: Annotated[int, typer.Option(help="Passes over them with each recipe.", min=1)] = 8,
    work: Work = Path("head-recipes"),
    out: Out = RESULTS / "head_recipes.json",
) -> None:
    """Trains the missing heads."""
    target = require_openvla(load_target(nano_policy(), device="cpu"))
    recipes = {
        "Spec-VLA's": DraftTraining(epochs),
        "Spec-VLA's, with the shipped head's rate": DraftTraining(epochs, learning_rate=1e-3),
        "the shipped head's": DraftTraining(epochs, learning_rate=1e-3, own_steps=5),
    }
    rows: list[dict[str, Any]] = []
    with progress_bar() as bar:
        asking = bar.add_task("querying the target", total=frames)
        shards = collect_features(
            target,
            None,
            work,
            seed=0,
            frames=frames,
            max_bytes=_MAX_BYTES,
            on_frame=lambda done: bar.update(asking, completed=done),
        )
        for number, (name, recipe) in enumerate(recipes.items()):
            line = bar.add_task(name, total=None)

            def show(progress: Progress[DraftValidation], line: Any = line) -> None:
                bar.update(line, completed=progress.step, total=progress.steps)

            found = train_draft(target, shards, work / f"head-{number}", recipe, show)
            rows.append(
                {
                    "name": name,
                    "learning_rate": recipe.learning_rate,
                    "own_steps": recipe.own_steps,
                    "tau_by_epoch": [each.tau for each in found],
                    "accept_length_by_place": [list(each) for each in found[-1].accept_length_by_place],
                    "held_out_answers": found[-1].samples,
                }
            )
    heads = {row["name"]: str(work / f"head-{number}") for number, row in enumerate(rows)}
    timed = _timed(target, heads, list(islice(simulation_source(target, FRAMES_FIRST_SEED), _IMAGES)))
    ar_s = timed[_PLAIN]["action_s"]
    rows = [row | timed[row["name"]] for row in rows]
    figures = {"frames": frames, "epochs": epochs, "images": _IMAGES, "ar_s": ar_s, "rows": rows}
    finish(result_head(context) | of_weights(nano_policy()) | figures, out)


def _timed(target: Target, heads: dict[str, str], images: list[Observation]) -> dict[str, dict[str, float]]:
    """Forwards and seconds per action of each head, strict, on the same images, in turns."""
    settings = {name: EngineSettings("spec", draft=DraftSettings(head=head)) for name, head in heads.items()}
    engines = {_PLAIN: Engine(target, EngineSettings("ar"))}
    engines |= {name: Engine(target, each) for name, each in settings.items()}
    forwards: dict[str, int] = {}

    def run(name: str) -> None:
        engine = engines[name]
        outcomes = [engine.act(replace(image, stamp_ns=number)) for number, image in enumerate(images, start=1)]
        engine.reset()
        forwards[name] = sum(each.record.forwards for each in outcomes if isinstance(each, Action))

    seconds = take_turns({name: partial(run, name) for name in engines}, _TURNS, "cpu")
    turns = 1 + _TURNS
    return {
        name: {
            "action_s": seconds[name] / len(images),
            "forwards_per_action": forwards[name] / len(images),
            "head_forwards_per_action": engine.drafter.work.head_forwards / turns / len(images),
        }
        for name, engine in engines.items()
    }


if __name__ == "__main__":
    typer.run(main)
