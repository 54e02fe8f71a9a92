# SPDX-License-Identifier: Apache-2.0
"""The command that answers recorded images: `replay`, of one bag or of many."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specvla_ros.cli.options import PolicyOptions, takes_policy
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.options import (
    Cameras,
    PerEngine,
    Ray,
    Rerun,
    StateNames,
    StateTopic,
    Viewer,
    Workers,
    camera_topics,
    names_of,
    shown_in,
)
from specvla_ros.messages.synchronizer import TOLERANCE_S

if TYPE_CHECKING:
    from specvla_ros.lab.evaluation.replay_bags import ReplaySettings
    from specvla_ros.lab.evaluation.replay_summary import ReplaySummary, Thresholds

app = typer.Typer()


@app.command()
@takes_policy(publishes=True)
def replay(
    chosen: PolicyOptions,
    bag: Annotated[
        list[Path],
        typer.Argument(
            help="ROS 2 bag: a directory, or an .mcap or .db3 file. Several, or folders of bags: one report of all.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the results; one that was cut short goes on. Default: replay-NAME of the bag or folder; "
            "several need one."
        ),
    ] = None,
    image_topic: Annotated[str, typer.Option(help="Empty: /camera/image_raw, or the only one.")] = "",
    instruction_topic: Annotated[str, typer.Option(help="Empty: /instruction.")] = "",
    instruction: Annotated[str, typer.Option(help="In place of the bag's instruction topic.")] = "",
    action_topic: Annotated[
        str, typer.Option(help="Recorded actions; empty: /ground_truth/action if it is there.")
    ] = "",
    camera: Cameras = None,
    state_topic: StateTopic = "",
    state_names: StateNames = "",
    sync_tolerance_s: Annotated[
        float, typer.Option(help="How far the others' stamps may lie from the first camera's.", min=0.0)
    ] = TOLERANCE_S,
    max_p95_latency_s: Annotated[float | None, typer.Option(help="Limit: 95 % of the frames answer in time.")] = None,
    max_drop_fraction: Annotated[float | None, typer.Option(help="Limit: frames without an action, 0 to 1.")] = None,
    max_bin_distance: Annotated[
        float | None, typer.Option(help="Limit: mean distance to the recorded action, in bins: 255 to a dimension.")
    ] = None,
    min_action_rate_hz: Annotated[float | None, typer.Option(help="Limit: actions per second of decoding.")] = None,
    rerun: Rerun = False,
    viewer: Viewer = "",
    workers: Workers = 0,
    per_engine: PerEngine = 0,
    ray: Ray = "",
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Decode an action for every image of a bag: frames.jsonl, summary.json, report.html and a bag of the actions.

    Of several bags these lie in a folder for each, beside a summary and a report of all; limits are over all frames.
    Exit code 1 when a limit is broken or a bag could not be replayed to its end, 2 when something given is wrong.
    """
    from specvla_ros.engine.engine import Engine
    from specvla_ros.lab.bags.frames import TopicChoice
    from specvla_ros.lab.evaluation.replay import check_replay, replay
    from specvla_ros.lab.evaluation.replay_bags import ReplaySettings, is_folder_of_bags
    from specvla_ros.lab.evaluation.replay_summary import Thresholds
    from specvla_ros.lab.evaluation.rerun_recording import RECORDING_FILE

    several = len(bag) > 1 or is_folder_of_bags(bag[0])
    if out is None and len(bag) > 1:
        raise UserError("several bags have no name of their own: say where their results shall be: --out DIRECTORY")
    out = out or Path(f"replay-{bag[0].resolve().stem}")
    thresholds = Thresholds(
        max_p95_latency_s=max_p95_latency_s,
        max_drop_fraction=max_drop_fraction,
        max_bin_distance=max_bin_distance,
        min_action_rate_hz=min_action_rate_hz,
    )
    topics = TopicChoice(
        image_topic=image_topic or None,
        instruction_topic=instruction_topic or None,
        instruction=instruction or None,
        action_topic=action_topic or None,
        cameras=camera_topics(camera),
        state_topic=state_topic or None,
        sync_tolerance_s=sync_tolerance_s,
    )
    settings = ReplaySettings(
        chosen.checkpoint, chosen.model, chosen.engine, chosen.action, topics, names_of(state_names)
    )
    if several:
        if viewer:
            raise UserError("--viewer shows one bag: give one, or --rerun, which writes a recording of each")
        rerun_file = RECORDING_FILE if shown_in(out, rerun, "") else ""
        spread = {"workers": workers, "ray": ray, "per_engine": per_engine}
        _replay_bags(settings, bag, out, thresholds, rerun_file, spread=spread, progress=progress)
        return
    if workers or ray or per_engine:
        raise UserError("one bag is replayed by one process: --workers, --per-engine and --ray are of several bags")
    check_replay(bag[0], out, topics)
    engine = Engine(chosen.load(), chosen.engine)
    engine.warm_up()
    summary = replay(
        engine,
        bag[0],
        out,
        topics=topics,
        state_names=settings.state_names,
        action=chosen.action,
        thresholds=thresholds,
        shown=shown_in(out, rerun, viewer),
        progress=progress,
    )
    _end(out, summary, summary.failures)


def _replay_bags(
    settings: "ReplaySettings",
    given: Sequence[Path],
    out: Path,
    thresholds: "Thresholds",
    rerun: str,
    *,
    spread: dict[str, Any],
    progress: bool,
) -> None:
    from specvla_ros.cli.terminal import print_table, progress_bar
    from specvla_ros.lab.evaluation.replay_bags import find_bags, replay_bags
    from specvla_ros.lab.evaluation.report.replay_bags import BAGS_HEAD, bag_cells
    from specvla_ros.models.checkpoint import leave_a_core

    bags, left_out = find_bags(given)
    for each in left_out:
        typer.echo(f"{each} is no bag: it is left out", err=True)
    leave_a_core()
    with progress_bar(shown=progress) as bar:
        line = bar.add_task("replaying", total=len(bags))
        summary = replay_bags(
            settings,
            bags,
            out,
            left_out=left_out,
            thresholds=thresholds,
            rerun=rerun,
            **spread,
            on_bag=lambda name, done, wanted: bar.update(line, completed=done, total=wanted, description=name),
        )
    print_table(BAGS_HEAD, [bag_cells(row) for row in summary.rows])
    _end(out, summary.total, summary.failures, f" of {len(bags)} bags")


def _end(out: Path, summary: "ReplaySummary", failures: Sequence[str], whose: str = "") -> None:
    """Says what came out; exit code 1 where the replay failed."""
    total = summary.latency_s.get("total", {})
    latency = f", p95 {total['p95'] * 1e3:.1f} ms, {summary.action_rate_hz:.1f} actions/s" if total else ""
    frames = max(summary.frames, summary.frames_in_bag)
    results = next(path for path in (out / "report.html", out / "summary.json") if path.exists())
    typer.echo(f"{summary.actions} of {frames} frames{whose} answered{latency}; see {results}")
    for failure in failures:
        typer.secho(f"specvla: {failure}", fg=typer.colors.RED, err=True)
    if failures:
        raise typer.Exit(1)
