# SPDX-License-Identifier: Apache-2.0
"""The draft head by the paper's recipe and by that of the shipped head: same answers of the target, same passes.

    pip install -r requirements/train.txt
    python benchmarks/head_recipes.py

Spec-VLA's table 4: learning rate 5e-5, batch 16, 2000 steps of warm-up, clipping at 0.5, regression 1.0 and
cross-entropy 0.1, on the target's own features. Ours differs in the rate and learns from the head's own features, five
tokens deep. The target answers images of its own episodes at the table. About 40 minutes on one CPU core.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from harness import Out, Work, finish, of_weights, result_head
from results_page import RESULTS

from specvla_ros.evaluation.terminal import progress_bar
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.openvla.target import require_openvla
from specvla_ros.policies.bundled import nano_policy
from specvla_ros.training.draft_model import DraftValidation
from specvla_ros.training.train_draft import DraftTraining, collect_features, train_draft
from specvla_ros.training.trainer import Progress

_MAX_BYTES = 20e9


def main(
    context: typer.Context,
    frames: Annotated[int, typer.Option(help="Images that the target is asked about.", min=256)] = 12000,
    epochs: Annotated[int, typer.Option(help="Passes over them, by each recipe.", min=1)] = 8,
    work: Work = Path("head-recipes"),
    out: Out = RESULTS / "head_recipes.json",
) -> None:
    """Trains what is missing."""
    target = require_openvla(load_target(nano_policy(), device="cpu"))
    recipes = {
        "Spec-VLA's": DraftTraining(epochs),
        "Spec-VLA's, with the shipped head's rate": DraftTraining(epochs, learning_rate=1e-3),
        "the shipped head's": DraftTraining(epochs, learning_rate=1e-3, own_steps=5),
    }
    rows: list[dict[str, Any]] = []
    with progress_bar() as bar:
        asking = bar.add_task("asking the target", total=frames)
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
    finish(result_head(context) | of_weights(nano_policy()) | {"frames": frames, "epochs": epochs, "rows": rows}, out)


if __name__ == "__main__":
    typer.run(main)
