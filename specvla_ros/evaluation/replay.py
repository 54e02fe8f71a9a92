"""`specvla replay`: a recording in; actions, figures, a report and a bag of the actions out."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specvla_ros.bags.frames import BagFrame, bag_frames
from specvla_ros.bags.image_message import rgb_from_compressed, rgb_from_image, stamp_ns
from specvla_ros.bags.reader import Bag, open_bag
from specvla_ros.bags.recorder import BagRecorder
from specvla_ros.bags.topics import RAW_IMAGE, ReplayTopics, TopicChoice, choose_topics
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Action, DropReason
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.evaluation.provenance import file_hashes, hardware, software
from specvla_ros.evaluation.replay_summary import (
    FrameResult,
    ReplayColumns,
    ReplaySummary,
    Thresholds,
    compare,
    summarise,
)
from specvla_ros.evaluation.report.replay import write_report
from specvla_ros.models.checkpoint import Target

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interruption() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether somebody asked to stop.

    The first signal is only noted, so that nothing is left half written; a second one acts as ever. Signals reach the
    main thread only: elsewhere they are left alone.
    """
    asked: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: bool(asked)
    finally:
        restore()


FRAMES_FILE, SUMMARY_FILE, REPORT_FILE, BAG_DIRECTORY = "frames.jsonl", "summary.json", "report.html", "actions_bag"

_NS = 1e-9


class ReplayRun:
    """Answers frames and writes what comes of it.

    Args:
        engine: warm, and used by nobody else meanwhile.
        out: the output directory; made if missing.
        start_ns: bag time that counts as 0 s.
        action_dt: seconds over which an action's displacements are meant.

    Raises:
        UserError: the output directory cannot be written.
    """

    def __init__(self, engine: Engine, out: Path, *, start_ns: int, action_dt: float) -> None:
        self._engine = engine
        self._out = out
        self._action_dt = action_dt
        self._columns = ReplayColumns(engine.target.codec.names, start_ns)
        origin = {key: str(value) for key, value in engine.target.describe().items()}
        self._recorder = BagRecorder(out / BAG_DIRECTORY, origin)
        self._lines = (out / FRAMES_FILE).open("w", encoding="utf-8")

    def play(self, frame: BagFrame) -> None:
        """Answers one frame and writes the result at once."""
        received_ns = time.monotonic_ns()
        answer = self._answer(frame, received_ns)
        result = answer if isinstance(answer, FrameResult) else self._accept(frame, answer, received_ns)
        self._columns.add(result)
        self._lines.write(json.dumps(result.as_json(), allow_nan=False) + "\n")
        self._lines.flush()
        if result.action is not None and result.seq is not None:
            self._recorder.record(
                result.action,
                seq=result.seq,
                time_ns=frame.image.time_ns,
                action_dt=self._action_dt,
                publish_s=(time.monotonic_ns() - result.action.finished_ns) * _NS,
                latency_s=(time.monotonic_ns() - received_ns) * _NS,
                drop_counts=self._columns.drops.by_name(),
            )

    def finish(
        self, *, frames_in_bag: int, thresholds: Thresholds, incomplete: str, context: Mapping[str, Any]
    ) -> ReplaySummary:
        """Writes the summary, the report and the end of the bag."""
        self._lines.close()
        self._recorder.close()
        summary = summarise(
            self._columns,
            frames_in_bag=frames_in_bag,
            thresholds=thresholds,
            incomplete=incomplete,
            context=context,
        )
        text = json.dumps(summary.as_json(), indent=2, allow_nan=False)
        (self._out / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")
        write_report(self._out / REPORT_FILE, summary, self._columns)
        return summary

    def _answer(self, frame: BagFrame, received_ns: int) -> Action | FrameResult:
        """What the node does with an image, without ROS: checks in the same order, then the engine."""
        try:
            message = frame.image.message()
            to_rgb = rgb_from_image if frame.image.msgtype == RAW_IMAGE else rgb_from_compressed
            rgb = to_rgb(message)
        except UserError as error:
            return _dropped(frame, None, received_ns, DropReason.BAD_IMAGE, str(error))
        try:
            stamp = stamp_ns(message.header)
        except UserError as error:
            return _dropped(frame, None, received_ns, DropReason.BAD_STAMP, str(error))
        if not frame.epoch:
            return _dropped(frame, stamp, received_ns, DropReason.NO_INSTRUCTION, "recorded before any instruction")
        observation = Observation(
            images=rgb,
            instruction=frame.instruction,
            stamp_ns=stamp,
            frame_id=message.header.frame_id,
            epoch=frame.epoch,
            received_ns=received_ns,
        )
        outcome = self._engine.act(observation)
        if isinstance(outcome, Action):
            return outcome
        return _dropped(frame, stamp, received_ns, outcome.reason, outcome.detail)

    def _accept(self, frame: BagFrame, action: Action, received_ns: int) -> FrameResult:
        return FrameResult(
            frame=frame,
            stamp_ns=action.observation.stamp_ns,
            total_s=(action.finished_ns - received_ns) * _NS,
            action=action,
            seq=len(self._columns.frame),
            comparison=compare(self._engine.target.codec, action, frame.recorded),
        )


def _dropped(frame: BagFrame, stamp: int | None, received_ns: int, reason: DropReason, detail: str) -> FrameResult:
    total_s = (time.monotonic_ns() - received_ns) * _NS
    return FrameResult(frame=frame, stamp_ns=stamp, total_s=total_s, reason=reason, detail=detail)


_NS = 1e-9
_USUAL = TopicChoice()


def replay(
    policy: Target,
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
        "policy": engine.target.describe(),
        "software": software(),
        "hardware": hardware(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
