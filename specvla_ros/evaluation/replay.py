"""Replays a bag through the engine in process: the same frames give the same actions, however busy the machine."""

from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.evaluation.bag_reader import Bag, open_bag
from specvla_ros.evaluation.bag_topics import ReplayTopics, TopicChoice, choose_topics
from specvla_ros.evaluation.interruption import deferred_interruption
from specvla_ros.evaluation.provenance import file_hashes, hardware, software
from specvla_ros.evaluation.replay_frames import bag_frames
from specvla_ros.evaluation.replay_run import BAG_DIRECTORY, FRAMES_FILE, REPORT_FILE, SUMMARY_FILE, ReplayRun
from specvla_ros.evaluation.replay_summary import ReplaySummary
from specvla_ros.evaluation.thresholds import Thresholds
from specvla_ros.models.policy import Policy

_NS = 1e-9
_USUAL = TopicChoice()


def replay(
    policy: Policy,
    settings: EngineSettings,
    bag_path: str | Path,
    out_dir: str | Path,
    *,
    topics: TopicChoice = _USUAL,
    action_dt: float = 0.2,
    thresholds: Thresholds | None = None,
    progress: bool = True,
) -> ReplaySummary:
    """Decodes an action for every image of a bag and writes frames.jsonl, summary.json, report.html and actions_bag/.

    Each frame is written at once. When the bag turns out to be cut off, when Ctrl-C ends the replay, or when something
    fails, summary and report are still written, and `failures` of the summary says what is missing.

    Args:
        policy: the target.
        settings: how to decode; `max_image_age_s` must be 0, as a recorded image has no age.
        bag_path: the bag's directory or file.
        out_dir: where the results go; made if missing, refused if it holds results.
        topics: which of the bag's to read.
        action_dt: seconds over which an action's displacements are meant.
        thresholds: limits that the replay must keep.
        progress: show a progress bar on stderr.

    Raises:
        UserError: the bag, a topic, the instruction or the output directory cannot be used.
    """
    out = _usable_output(out_dir)
    with open_bag(bag_path) as bag:
        chosen = choose_topics(bag, topics)
        instruction = topics.instruction
        engine = Engine(policy, settings)
        if instruction is not None:
            engine.check_instruction(instruction)
        engine.warm_up()
        context = _context(bag, chosen, engine, instruction=instruction, action_dt=action_dt)
        ending: dict[str, Any] = dict(
            frames_in_bag=chosen.image.count, thresholds=thresholds or Thresholds(), context=context
        )
        run = ReplayRun(engine, out, start_ns=bag.start_ns, action_dt=action_dt)
        try:
            incomplete = _play_all(run, bag, chosen, instruction, progress=progress)
        except BaseException as error:
            # What was replayed is worth keeping; if it cannot even be written, the first error says why.
            with suppress(OSError):
                run.finish(incomplete=f"{type(error).__name__}: {error}", **ending)
            if isinstance(error, OSError):
                raise UserError(f"replaying {bag.path} to {out} failed: {error}") from error
            raise
        return run.finish(incomplete=incomplete, **ending)


def check_replay(bag_path: str | Path, out_dir: str | Path, topics: TopicChoice = _USUAL) -> None:
    """Checks what can be checked before a policy is loaded, which may take minutes.

    Raises:
        UserError: as `replay` does for the bag, a topic or the output directory.
    """
    _usable_output(out_dir)
    with open_bag(bag_path) as bag:
        choose_topics(bag, topics)


def _play_all(run: ReplayRun, bag: Bag, topics: ReplayTopics, instruction: str | None, *, progress: bool) -> str:
    """Replays frame by frame; returns why not all of them, empty when all."""
    total = topics.image.count
    played = 0
    with deferred_interruption() as interrupted, _progress_bar(shown=progress) as bar:
        task = bar.add_task("replaying", total=total)
        try:
            for frame in bag_frames(bag, topics, instruction):
                run.play(frame)
                played += 1
                bar.advance(task)
                if interrupted():
                    return f"interrupted after {played} of {total} frames"
        except UserError as error:
            return f"stopped after {played} of {total} frames: {error}"
    return bag.damage


def _progress_bar(*, shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )


def _usable_output(out_dir: str | Path) -> Path:
    out = Path(out_dir).expanduser()
    if out.exists() and not out.is_dir():
        raise UserError(f"the output {out} is a file; give a directory")
    present = [name for name in (FRAMES_FILE, SUMMARY_FILE, REPORT_FILE, BAG_DIRECTORY) if (out / name).exists()]
    if present:
        raise UserError(
            f"{out} holds the result of an earlier replay ({', '.join(present)}); give another directory with --out, "
            "or remove that one"
        )
    return out


def _context(
    bag: Bag, topics: ReplayTopics, engine: Engine, *, instruction: str | None, action_dt: float
) -> dict[str, Any]:
    """What summary.json says of what was replayed, with what, on what."""
    return {
        "bag": {
            "path": str(bag.path),
            "sha256": file_hashes(bag.files),
            "duration_s": (bag.end_ns - bag.start_ns) * _NS,
            "image_topic": topics.image.name,
            "instruction_topic": topics.instruction.name if topics.instruction else None,
            "action_topic": topics.action.name if topics.action else None,
        },
        "settings": {**asdict(engine.settings), "instruction": instruction, "action_dt": action_dt},
        "policy": engine.policy.describe(),
        "software": software(),
        "hardware": hardware(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
