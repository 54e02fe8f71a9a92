# SPDX-License-Identifier: Apache-2.0
"""`specvla replay`: decodes a recording and writes actions, figures, a report and a bag of the actions."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from specvla_ros.control.convention import ActionConvention, ConventionSettings
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, DropReason, StageTimings
from specvla_ros.errors import UserError, missing_package
from specvla_ros.lab.bags.frames import (
    DEFAULT_TOPICS,
    BagFrame,
    ReplayTopics,
    TopicChoice,
    bag_frames,
    choose_topics,
    rgb_from_message,
)
from specvla_ros.lab.bags.reader import Bag, open_bag
from specvla_ros.lab.bags.recorder import BagRecorder
from specvla_ros.lab.evaluation.replay_page import Pictures, write_replay_report
from specvla_ros.lab.evaluation.replay_summary import FrameRecord, ReplayColumns, ReplaySummary, compare, summarise
from specvla_ros.lab.evaluation.rerun_recording import RerunRecording, RerunSettings
from specvla_ros.lab.evaluation.run_directory import (
    REPORT_FILE,
    SUMMARY_FILE,
    RunDirectory,
    checkpoint_hashes,
    file_hashes,
    head,
    write_line,
)
from specvla_ros.lab.jobs.hosted_engine import HostedEngine
from specvla_ros.lab.planning.measure import CpuTimes, busy_machine
from specvla_ros.lab.plans import Thresholds
from specvla_ros.lab.terminal import progress_bar
from specvla_ros.messages.action_message import ActionMeaning, decode_stats_fields, vla_action_fields
from specvla_ros.messages.image_message import is_grey, stamp_ns
from specvla_ros.messages.state_message import StateReader
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PolicyFacts

FRAMES_FILE, BAG_DIRECTORY = "frames.jsonl", "actions_bag"
INTERRUPTED = "interrupted"  # prefix of a summary's `incomplete` after a signal
_NS = 1e-9
_KNOWN_DATASET = ConventionSettings()
_BASE_FRAME = "base_link"  # not named in a bag
_HINT = "; finished frames are kept, and the same command resumes"


class ReplayRun:
    """Answers the frames of a bag in order and writes the results.

    A replay resumes from frames.jsonl: its frames are not decoded again, and the bag of actions is rewritten from them.
    Before the first missing frame the engine decodes the newest of them again, to restore the last stamp and action.
    Where answers follow from earlier ones, it decodes all of them again: its answers are then those of one run.
    """

    def __init__(
        self,
        engine: Engine | HostedEngine,
        directory: RunDirectory,
        pictures: Pictures,
        meaning: ActionMeaning,
        shown: RerunSettings | None,
    ) -> None:
        self._engine, self._directory, self._pictures = engine, directory, pictures
        self._columns = ReplayColumns(engine.target.codec.names, pictures.start_ns)
        self._kept = directory.resume_lines(FRAMES_FILE, lambda line: FrameRecord(**line))
        self._newest: list[Observation] = []  # kept frames: the one of the newest action, and the newest of all
        # A relaxed answer depends on its drafts; a text or actions may be given, and chunks averaged.
        self._has_history = not engine.settings.lossless or engine.settings.ensemble > 1
        bag = directory.path / BAG_DIRECTORY
        shutil.rmtree(bag, ignore_errors=True)
        described = {key: str(value) for key, value in engine.target.describe().items()}
        self._recorder = BagRecorder(bag, described, meaning)
        self._lines = directory.append_to(FRAMES_FILE)
        self._meaning = meaning
        self._shown = RerunRecording(shown) if shown is not None else None

    def play(self, frame: BagFrame) -> bool:
        """Answers one frame and writes the result immediately; returns True if the frame was missing."""
        received_ns = time.monotonic_ns()
        observed = _observe(frame, received_ns, self._engine.target)
        if frame.index < len(self._kept):
            self._restore(self._kept[frame.index], frame, observed)
            return False
        for observation in self._newest:
            self._engine.act(observation)
        self._newest.clear()
        action, record = None, observed
        if isinstance(observed, Observation):
            outcome = self._engine.act(observed)
            if isinstance(outcome, Action):
                action, record = outcome, self._answered(frame, outcome, received_ns)
            else:
                record = _dropped(frame, received_ns, outcome.reason, outcome.detail, observed.stamp_ns)
        assert isinstance(record, FrameRecord)
        write_line(self._lines, record.as_json())
        self._add(record, observed, action)
        return True

    def finish(self, thresholds: Thresholds, context: Mapping[str, Any], incomplete: str) -> ReplaySummary:
        """Writes the end of the bag, the report and, last, the summary."""
        with closing(self._recorder):
            self._lines.close()
        if self._shown is not None and (lost := self._shown.close()):
            tell(lost)
        summary = summarise(self._columns, self._pictures.frames, thresholds, incomplete, context)
        with report_if_possible():
            write_replay_report(self._directory.path / REPORT_FILE, summary, self._columns, self._pictures)
        self._directory.write_json(SUMMARY_FILE, summary.as_json())
        return summary

    def _answered(self, frame: BagFrame, action: Action, received_ns: int) -> FrameRecord:
        record = action.record
        return FrameRecord.from_frame(
            frame,
            stamp_ns=action.observation.stamp_ns,
            total_s=(action.finished_ns - received_ns) * _NS,
            seq=len(self._columns.frame),
            publish_s=(time.monotonic_ns() - action.finished_ns) * _NS,
            tokens=list(action.tokens),
            values=action.values.tolist(),
            timings=asdict(action.timings),
            decode={**asdict(record), "forwards": record.forwards, "tau": record.tau},
            **compare(self._engine.target.codec, action, frame.recorded),
        )

    def _restore(self, record: FrameRecord, frame: BagFrame, observed: Observation | FrameRecord) -> None:
        """Takes a frame from the results of the resumed replay."""
        if (record.frame, record.time_ns) != (frame.index, frame.image.time_ns):
            raise UserError(
                f"line {frame.index + 1} of {self._directory.path / FRAMES_FILE} does not belong to frame {frame.index}"
                " of the bag; remove that directory"
            )
        action = None
        if isinstance(observed, Observation):
            action = _action(record, observed, self._columns.names)
            if self._has_history:
                self._engine.act(observed)
            elif action is not None:
                self._newest = [observed]
            elif record.drop is None or record.drop["reason"] != DropReason.OUT_OF_ORDER.value:
                self._newest = [*self._newest[:1], observed]
        self._add(record, observed, action)

    def _add(self, record: FrameRecord, observed: Observation | FrameRecord, action: Action | None) -> None:
        self._columns.add(record)
        image = next(iter(observed.cameras.values())) if isinstance(observed, Observation) else None
        self._pictures.add(record, image)
        if self._shown is not None and isinstance(observed, Observation) and image is not None:
            self._shown.add_image(observed.stamp_ns, image)
        if action is None or record.seq is None or record.publish_s is None:
            return
        counts, stamp = self._columns.drops.by_name(), action.observation.stamp_ns
        published: dict[str, Any] = dict(
            seq=record.seq, publish_s=record.publish_s, latency_s=record.total_s + record.publish_s
        )
        self._recorder.record(action, time_ns=record.time_ns, drop_counts=counts, **published)
        if self._shown is not None:
            self._shown.add_action(stamp, SimpleNamespace(**vla_action_fields(action, self._meaning, **published)))
            stats = decode_stats_fields(action, seq=record.seq, drop_counts=counts)
            self._shown.add_stats(stamp, SimpleNamespace(**stats))


def _observe(frame: BagFrame, received_ns: int, policy: PolicyFacts) -> Observation | FrameRecord:
    """Checks images and state as the node does, in the same order, without ROS."""
    lead, *others = policy.cameras
    reason = DropReason.BAD_IMAGE
    try:
        message = frame.image.message()
        images = {lead: rgb_from_message(message)}
        images |= {name: rgb_from_message(frame.others[name].message()) for name in others if not frame.missing}
        reason = DropReason.BAD_STAMP
        stamp = stamp_ns(message.header)
    except UserError as error:
        return _dropped(frame, received_ns, reason, str(error))
    if frame.missing:
        return _dropped(frame, received_ns, DropReason.INCOMPLETE, frame.missing, stamp)
    if not frame.epoch:
        return _dropped(frame, received_ns, DropReason.NO_INSTRUCTION, "recorded before any instruction", stamp)
    return Observation(
        images=images,
        state=frame.state,
        instruction=frame.instruction,
        stamp_ns=stamp,
        frame_id=message.header.frame_id,
        epoch=frame.epoch,
        received_ns=received_ns,
    )


def _dropped(
    frame: BagFrame, received_ns: int, reason: DropReason, detail: str, stamp: int | None = None
) -> FrameRecord:
    total_s = (time.monotonic_ns() - received_ns) * _NS
    drop = {"reason": reason.value, "detail": detail}
    return FrameRecord.from_frame(frame, stamp_ns=stamp, total_s=total_s, drop=drop)


def _action(record: FrameRecord, observation: Observation, names: tuple[str, ...]) -> Action | None:
    """The action in a line of frames.jsonl; None if the frame was dropped."""
    if record.values is None or record.tokens is None or record.timings is None or record.decoding is None:
        return None
    return Action(
        observation=observation,
        names=names,
        actions=np.array(record.values)[None],
        tokens=tuple(record.tokens),
        timings=StageTimings(**record.timings),
        record=record.decoding,
        finished_ns=observation.received_ns,
    )


def replay(
    engine: Engine | HostedEngine,
    bag_path: str | Path,
    out_dir: str | Path,
    *,
    topics: TopicChoice = DEFAULT_TOPICS,
    action: ConventionSettings = _KNOWN_DATASET,
    thresholds: Thresholds | None = None,
    shown: RerunSettings | None = None,
    progress: bool = True,
) -> ReplaySummary:
    """Decodes an action for every image of a bag and writes frames.jsonl, summary.json, report.html and actions_bag/.

    Each frame is written immediately. If the bag is truncated, Ctrl-C ends the replay, or an error occurs, summary and
    report are still written, and the summary's `failures` states what is missing. A repeated call with the same
    settings decodes the missing frames.

    Args:
        engine: warmed up, without a staleness limit, since recorded images have no age.
        out_dir: created if missing; refused if it holds a complete replay or other results.
        action: the actions' convention, for unknown datasets.
        shown: the output for Rerun; None: none.
    """
    directory = _open_output(out_dir)
    policy = engine.target
    check_senses(policy, topics.cameras, topics.state_topic)
    topics = replace(topics, action=action).of(policy)
    with open_bag(bag_path) as bag:
        chosen = choose_topics(bag, topics)
        if chosen.note:
            tell(chosen.note)
        _tell_of_grey(bag, chosen.image.name)
        instruction = topics.instruction
        convention = action.convention(policy.unnorm_key, policy.codec.dt_s, policy.codec.names)
        if instruction is not None:
            engine.check_instruction(instruction)
        engine.reset()
        context = _context(bag, chosen, engine, instruction, convention)
        content = {name: value for name, value in context["bag"].items() if name != "path"}  # bags may move
        deciding = {"bag": content, "settings": context["settings"], "policy": context["policy"]}
        directory.begin(deciding | checkpoint_hashes(policy.directory, engine.settings))
        if shown is not None and shown.out:
            context["recording"] = Path(shown.out).name
        meaning = ActionMeaning(convention, policy.unnorm_key, _BASE_FRAME)
        pictures = Pictures(chosen.image.count, bag.start_ns)
        run = ReplayRun(engine, directory, pictures, meaning, shown)
        before = CpuTimes.now()

        def finish(incomplete: str) -> ReplaySummary:
            context["refused_states"] = _refused(chosen.states)
            context["busy"] = busy_machine(before, CpuTimes.now()) or None
            return run.finish(thresholds or Thresholds(), context, incomplete)

        try:
            incomplete = _play_all(run, bag, chosen, instruction, progress=progress)
        except BaseException as error:
            # Keep the finished frames; if writing fails too, report the first error.
            with suppress(OSError):
                finish(f"{type(error).__name__}: {error}")
            if isinstance(error, OSError):
                raise UserError(f"replaying {bag.path} to {directory.path} failed: {error}{_HINT}") from error
            raise
        with directory.reporting_errors(_HINT):
            return finish(incomplete)


def _refused(states: StateReader) -> str:
    """The states that no image got, in words; empty if there are none."""
    if not states.refused:
        return ""
    return f"refused states: {states.refused}, whose images got another or none; the first: {states.first_refusal}"


def check_senses(policy: PolicyFacts, cameras: Mapping[str, str], state_topic: str | None) -> None:
    """Raises UserError if the topics of other cameras and of the state do not match the policy's sensors."""
    lead, *others = policy.cameras
    missing = [name for name in others if name not in cameras]
    if missing:
        raise UserError(
            f"{policy.directory} uses the cameras {', '.join(policy.cameras)}: the image topic is that of '{lead}'; "
            f"also give the topic of '{missing[0]}': --camera {missing[0]}=TOPIC"
        )
    unknown = [name for name in cameras if name not in others]
    if unknown:
        raise UserError(f"{policy.directory} has no other camera '{unknown[0]}'; remove --camera {unknown[0]}=…")
    if bool(policy.state_dims) != bool(state_topic):
        raise UserError(
            f"{policy.directory} uses the robot's state: give its topic, as in --state-topic /joint_states"
            if policy.state_dims
            else f"{policy.directory} does not use a state; remove --state-topic"
        )


def tell(text: str) -> None:
    """Prints a note on stderr."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _tell_of_grey(bag: Bag, topic: str) -> None:
    """Notes grey images, which the policy answers without an error."""
    first = next(iter(bag.messages([topic])), None)
    with suppress(UserError):  # reported for each frame
        if first is not None and is_grey(first.message()):
            tell(
                f"bag {bag.path}: the images of {topic} are grey, but policies are trained on colour: is it the right "
                "--image-topic?"
            )


@contextmanager
def report_if_possible() -> Iterator[None]:
    """Names the missing package in place of a report: a robot has no Plotly."""
    try:
        yield
    except ModuleNotFoundError as error:
        tell(f"cannot write {REPORT_FILE}: {missing_package(error)}")


def check_replay(bag_path: str | Path, out_dir: str | Path, topics: TopicChoice = DEFAULT_TOPICS) -> None:
    """Checks the output and the bag before the policy is loaded, which may take minutes."""
    _open_output(out_dir)
    with open_bag(bag_path) as bag:
        choose_topics(bag, topics)


def _play_all(run: ReplayRun, bag: Bag, topics: ReplayTopics, instruction: str | None, *, progress: bool) -> str:
    """Replays all frames; returns the reason for stopping early, or an empty string."""
    total, played = topics.image.count, 0
    with _deferred_interruption() as interrupted, progress_bar(shown=progress) as bar:
        task = bar.add_task("replaying", total=total)
        try:
            for frame in bag_frames(bag, topics, instruction):
                missing = run.play(frame)
                played += 1
                bar.advance(task)
                if interrupted() and missing:
                    return f"{INTERRUPTED} after {played} of {total} frames"
        except UserError as error:
            return f"stopped after {played} of {total} frames: {error}"
    return bag.damage


@contextmanager
def _deferred_interruption() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True once SIGINT or SIGTERM has arrived.

    The first signal is only recorded; a second one has its usual effect. Outside the main thread, the only one that
    receives signals, the handlers are not changed.
    """
    received: list[int] = []
    handlers: dict[int, Any] = {}

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        restore()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        restore()


def _open_output(out_dir: str | Path) -> RunDirectory:
    directory = RunDirectory(out_dir, "replay")
    directory.check()
    summary = directory.read_json(SUMMARY_FILE)
    if summary is not None and not summary.get("incomplete"):
        raise UserError(
            f"{directory.path} holds the result of an earlier replay; give another directory with --out, or remove "
            "this one"
        )
    return directory


def _context(
    bag: Bag, topics: ReplayTopics, engine: Engine | HostedEngine, instruction: str | None, convention: ActionConvention
) -> dict[str, Any]:
    return {
        "bag": {
            "path": str(bag.path),
            "sha256": file_hashes(bag.files),
            "duration_s": (bag.end_ns - bag.start_ns) * _NS,
            "image_topic": topics.image.name,
            "instruction_topic": topics.instruction.name if topics.instruction else None,
            "action_topic": topics.action.name if topics.action else None,
            **{f"{name}_topic": topic.name for name, topic in topics.sensors.items()},
        },
        "settings": {**asdict(engine.settings), "instruction": instruction, "action": asdict(convention)},
        "policy": engine.target.describe(),
        **head(),
    }
