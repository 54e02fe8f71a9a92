# SPDX-License-Identifier: Apache-2.0
"""The commands that answer recorded images, `replay` and `certify`, and `export` of recordings to a dataset."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.lerobot.export_plan import ExportPlan
from specvla_ros.lab.cli.options import (
    BagOptions,
    Bags,
    Images,
    Rerun,
    Viewer,
    check_output_file,
    output_folder,
    shown_in,
    tell_of_cpu,
    topics_of,
)
from specvla_ros.lab.cli.parameter_options import PolicyOptions, takes_plans, takes_policy
from specvla_ros.lab.plans import THIS_PROCESS, EngineSpread, Thresholds
from specvla_ros.lab.terminal import print_table, progress, progress_bar

if TYPE_CHECKING:
    from specvla_ros.lab.bags.finder import FoundBags
    from specvla_ros.lab.evaluation.replay_bags import ReplaySettings
    from specvla_ros.lab.evaluation.replay_summary import ReplaySummary

app = typer.Typer()

_OF_ONE_RUN = ("out", "instruction")  # options of certify that --verify takes from the certificate


@app.command()
@takes_policy(publishes=True)
def replay(
    chosen: PolicyOptions,
    bag: Annotated[
        list[Path],
        typer.Argument(
            help="ROS 2 bag: a directory, or an .mcap or .db3 file; or an episode of a LeRobot dataset, such as "
            "DATASET/episode_000012. Several, folders of bags, or whole datasets get a joint report.",
            show_default=False,
        ),
    ],
    of_bags: BagOptions,
    thresholds: Thresholds,
    spread: EngineSpread,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the results; an interrupted run resumes. Default: replay-NAME of the bag or folder; "
            "required for several.",
            callback=output_folder,
        ),
    ] = None,
    rerun: Rerun = False,
    viewer: Viewer = "",
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Decode an action for every image of a bag: frames.jsonl, summary.json, report.html and a bag of the actions.

    Several bags get a folder each, plus a joint summary and report; limits apply to all frames together. Exit code 1
    when a limit is broken or a bag could not be replayed to its end, 2 for invalid arguments.
    """
    from specvla_ros.engine.engine import Engine
    from specvla_ros.lab.bags.finder import find_bags
    from specvla_ros.lab.evaluation.replay import check_replay, replay
    from specvla_ros.lab.evaluation.replay_bags import ReplaySettings, folder_name
    from specvla_ros.lab.evaluation.rerun_recording import RECORDING_FILE

    if out is None and len(bag) > 1:
        raise UserError("several bags need a directory for their results: give --out DIRECTORY")
    out = out or Path(f"replay-{folder_name(bag[0])}")
    found, topics = find_bags(bag), topics_of(chosen, of_bags)
    for each in found.left_out:
        typer.echo(f"skipped: {each}", err=True)
    tell_of_cpu(chosen)
    settings = ReplaySettings(chosen.checkpoint, chosen.model, chosen.engine, chosen.action, topics)
    several = found.bags != (bag[0].expanduser(),)
    if several:
        if viewer:
            raise UserError("--viewer shows one bag only: give one bag, or use --rerun, which records each")
        rerun_file = RECORDING_FILE if shown_in(out, rerun, "") else ""
        _replay_bags(settings, found, out, thresholds, rerun_file, spread, progress)
        return
    if spread != THIS_PROCESS:
        raise UserError("--workers, --per-engine and --ray need more than one bag")
    check_replay(bag[0], out, topics)
    engine = Engine(chosen.load_with_text(publishes=True), chosen.engine)
    engine.warm_up()
    summary = replay(
        engine,
        bag[0],
        out,
        topics=topics,
        action=chosen.action,
        thresholds=thresholds,
        shown=shown_in(out, rerun, viewer),
        progress=progress,
    )
    _end(out, summary, summary.failures, chosen.engine.mode)


def _replay_bags(
    settings: "ReplaySettings",
    found: "FoundBags",
    out: Path,
    thresholds: Thresholds,
    rerun: str,
    spread: EngineSpread,
    bar: bool,
) -> None:
    from specvla_ros.lab.evaluation.replay_bags import named_bags, replay_bags
    from specvla_ros.lab.evaluation.replay_page import BAGS_HEAD, bag_cells
    from specvla_ros.models.checkpoint import leave_a_core

    bags = named_bags(found.bags)
    leave_a_core()
    with progress_bar(shown=bar) as shown:
        line = shown.add_task("replaying", total=len(bags))
        summary = replay_bags(
            settings,
            bags,
            out,
            left_out=found.left_out,
            thresholds=thresholds,
            rerun=rerun,
            spread=spread,
            on_bag=lambda name, done, wanted: shown.update(line, completed=done, total=wanted, description=name),
        )
    print_table(BAGS_HEAD, [bag_cells(row) for row in summary.rows])
    _end(out, summary.total, summary.failures, settings.engine.mode, f" of {len(bags)} bags")


def _end(out: Path, summary: "ReplaySummary", failures: Sequence[str], mode: str, whose: str = "") -> None:
    total = summary.latency_s.get("total", {})
    latency = f", p95 {total['p95'] * 1e3:.1f} ms, {summary.action_rate_hz:.1f} actions/s" if total else ""
    frames = max(summary.frames, summary.frames_in_bag)
    results = next(path for path in (out / "report.html", out / "summary.json") if path.exists())
    decoding = f", {summary.decode.words}" if summary.decode.words else ""
    typer.echo(f"{summary.actions} of {frames} frames{whose} answered in mode {mode}{latency}{decoding}; see {results}")
    if summary.drops_in_words and not failures:
        typer.echo(f"no action for {summary.drops_in_words}")
    for name in ("refused_states", "busy"):
        if found := summary.context.get(name):
            typer.echo(found, err=True)
    for failure in failures:
        typer.secho(f"specvla: {failure}", fg=typer.colors.RED, err=True)
    if failures:
        raise typer.Exit(1)


@app.command()
@takes_plans
def export(
    bag: Annotated[list[Path], typer.Argument(help="Bags, or folders of bags.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory of the new dataset.", callback=output_folder)],
    of_bags: BagOptions,
    plan: ExportPlan,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="Results of `specvla replay` of the same bags, for the features policy.action and policy.latency_s. "
            "Default: the answers in the bags, if any."
        ),
    ] = None,
) -> None:
    """Write bags as a LeRobot dataset (v3.0): an episode per bag, a frame per image, never resampled.

    Exit code 2 if the images are unevenly spaced, or the bags differ in cameras, state or actions.
    """
    from specvla_ros.lab.bags.finder import bags_in
    from specvla_ros.lab.bags.lerobot.export import export as run
    from specvla_ros.lab.evaluation.replay_bags import answer_bags

    bags = bags_in(bag)
    replayed = answer_bags(answers, bags) if answers is not None else None
    with progress("exporting") as advance:
        result = run(bags, out, plan, of_bags.topics, replayed, lambda done: advance(done, len(bags), "bags"))
    typer.echo(
        f"wrote {result.frames} frames of {result.episodes} episodes at {result.fps} fps to {out}; the images came at "
        f"{result.rate_hz:.2f} Hz, a period differs by at most {result.jitter_s * 1e3:.1f} ms from 1 / fps"
    )
    if result.answered:
        typer.echo(f"{result.answered} frames have an answer of the policy")
    for reason, count in result.dropped.items():
        typer.echo(f"no frame for {count} images: {reason}", err=True)
    for note in result.notes:
        typer.echo(note, err=True)


@app.command()
@takes_policy()
def certify(
    chosen: PolicyOptions,
    data: Bags,
    of_bags: Images,
    out: Annotated[Path, typer.Option(help="File of the certificate.")] = Path("certificate.json"),
    verify: Annotated[
        Path | None, typer.Option(help="Certificate to repeat with its own settings and compare with.")
    ] = None,
) -> None:
    """Compare a setting with plain decoding over bags, token by token, and write the result as a certificate.

    Exit code 1 when strict answers differ, an image is answered by only one of the two, or a certificate does not hold.
    """
    from specvla_ros.lab.bags.finder import bags_in
    from specvla_ros.lab.evaluation import certificate
    from specvla_ros.lab.evaluation.deviation import Deviation
    from specvla_ros.lab.evaluation.frame_sources import count_frames
    from specvla_ros.lab.evaluation.replay import check_senses

    given = certificate.read_certificate(verify) if verify is not None else None
    if given is None and chosen.engine.mode == "ar" and chosen.engine.lossless:
        raise UserError("no setting to compare with plain decoding: give one, such as --mode spec")
    page = certificate.page_of(out)
    if given is None:
        for path in (out, page):
            check_output_file("--out", path)
    bags, topics = bags_in(data), topics_of(chosen, of_bags)
    if given is not None:
        if of_bags.instruction:
            raise UserError("--verify uses the certificate's instruction: omit --instruction")
        topics = replace(topics, instruction=given.content["instruction"] or None)
        certificate.refuse_others(given, chosen.engine, chosen.decoding)
    policy = chosen.load_with_text()
    check_senses(policy, topics.cameras, topics.state_topic)
    settings = chosen.engine if given is None else certificate.settings_of(given)
    pictures = sum(count_frames(bag, topics.of(policy)) for bag in bags)
    with progress("answering") as advance:
        found = certificate.certify(policy, settings, bags, topics, lambda done: advance(done, pictures, "answering"))
    result = found.content["result"]
    typer.echo(
        f"{result['actions']} of {result['frames']} images of {len(bags)} bags answered, {result['tokens']} tokens: "
        f"{result['differing']} answers differ from plain decoding's in {found.content['policy']['dtype']}, "
        f"{result['ties']} of them first at a near tie"
    )
    for what, reasons in (("plain decoding", result["unanswered"]), ("the setting", result["lost"])):
        for reason, number in reasons.items():
            detail = found.content["details"].get(reason)
            typer.echo(f"no action by {what} for {number} images: {reason}{f' ({detail})' if detail else ''}")
    far = result["deviation"]
    if result["differing"] and far is not None:
        typer.echo(f"difference: {Deviation(**far).words}")
        if not found.content["strict"]:
            typer.echo(certificate.MAY_DIFFER_BY_MORE)
    if result["closest"] is not None:
        ties = f"{result['near_ties']} tokens are near ties (below {found.content['tie']:g})"
        typer.echo(f"{ties}; smallest top-two logit margin: {result['closest']:.3g}")
    failures = found.failures
    if given is None:
        found.write(out)
        again = [word for name, words in chosen.typed.items() if name not in _OF_ONE_RUN for word in words]
        check = shlex.join(["specvla", "certify", *again, "--verify", str(out)])
        typer.echo(f"wrote the certificate to {out} and its page to {page}; verify it with: {check}")
    else:
        failures += certificate.differences(given, found)
        if not failures:
            typer.echo(f"{verify} holds")
        for condition in certificate.other_conditions(given, found):
            typer.echo(condition)
    for failure in failures:
        typer.echo(failure, err=True)
    if failures:
        raise typer.Exit(1)
