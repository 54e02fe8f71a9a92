"""One replay under way: every frame is answered, written and counted before the next one."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Action, DropReason
from specvla_ros.errors import UserError
from specvla_ros.evaluation.bag_recorder import BagRecorder
from specvla_ros.evaluation.bag_topics import RAW_IMAGE
from specvla_ros.evaluation.replay_frames import BagFrame
from specvla_ros.evaluation.replay_report import write_report
from specvla_ros.evaluation.replay_result import FrameResult, compare
from specvla_ros.evaluation.replay_summary import ReplayColumns, ReplaySummary, summarise
from specvla_ros.evaluation.thresholds import Thresholds
from specvla_ros.image_message import rgb_from_compressed, rgb_from_image, stamp_ns

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
        self._columns = ReplayColumns(engine.policy.action_names, start_ns)
        origin = {key: str(value) for key, value in engine.policy.describe().items()}
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
            image=rgb,
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
            comparison=compare(self._engine.policy, action, frame.recorded),
        )


def _dropped(frame: BagFrame, stamp: int | None, received_ns: int, reason: DropReason, detail: str) -> FrameResult:
    total_s = (time.monotonic_ns() - received_ns) * _NS
    return FrameResult(frame=frame, stamp_ns=stamp, total_s=total_s, reason=reason, detail=detail)
