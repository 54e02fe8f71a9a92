# SPDX-License-Identifier: Apache-2.0
"""Shows a run in Rerun: camera, instruction, actions, speeds and limits, latency by stage, drafts. Needs no ROS.

The library, `rerun-sdk`, is optional and imported only here.
"""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.control.convention import Reference
from specvla_ros.control.pose import Pose
from specvla_ros.errors import UserError, missing_package
from specvla_ros.settings.parameter import parameter

RECORDING_FILE = "run.rrd"
SPAWN = "spawn"
_VIEWER = "rerun+http://127.0.0.1:9876/proxy"  # default address of a viewer
_TIMELINE = "stamp"  # the image's stamp for the image and its answers; a command's own stamp
_STAGES = ("receive_s", "wait_s", "vision_s", "prefill_s", "decode_s", "publish_s", "latency_s")
_CURVES = ("action", "speed/linear", "speed/angular", "age", "latency", "decoding", "dropped")
_JPEG_QUALITY = 80
_FLUSH_S = 5.0  # limits the delay by a viewer that hangs
_WINDOW_S, _SHORTEST_S = 0.1, 0.04
_FIGURE = re.compile(r"[-+]?[0-9.]+")


@dataclass(frozen=True)
class RerunSettings:
    """Outputs for Rerun."""

    out: str = parameter("", "File to write, such as run.rrd; open it with `rerun run.rrd`. Empty: none.")
    viewer: str = parameter(
        "",
        "Address of a running viewer, such as rerun+http://127.0.0.1:9876/proxy (`rerun` starts one), or spawn to open "
        "one. Empty: none.",
    )

    def check(self) -> None:
        """Raises UserError if no output is set or the file's folder is missing."""
        if not self.out and not self.viewer:
            raise UserError(
                "no output for Rerun: set 'out' to a file such as run.rrd, or 'viewer' to a viewer's address"
            )
        if self.out and not Path(self.out).expanduser().parent.is_dir():
            raise UserError(f"the folder of 'out', {Path(self.out).expanduser().parent}, does not exist; make it first")


def require_rerun() -> None:
    """Raises UserError if the library is missing."""
    try:
        import rerun.blueprint  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_package(error, "requirements/rerun.txt") from None


class RerunRecording:
    """Sends a run to a viewer, a file, or both.

    Raises UserError if no output is set, the library is missing, or the file or viewer is not available.
    """

    def __init__(self, chosen: RerunSettings) -> None:
        chosen.check()
        require_rerun()
        import rerun
        import rerun.blueprint as layout

        self._rerun = rerun
        self._stream: Any = rerun.RecordingStream("specvla_ros")
        try:
            if chosen.viewer == SPAWN:
                rerun.spawn(connect=False, recording=self._stream)
            viewer = _VIEWER if chosen.viewer == SPAWN else chosen.viewer
            sinks: list[Any] = [rerun.FileSink(str(Path(chosen.out).expanduser()))] if chosen.out else []
            sinks += [rerun.GrpcSink(viewer)] if viewer else []
            self._stream.set_sinks(*sinks, default_blueprint=_blueprint(layout))
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"cannot start the live view: {error}; check 'out' and 'viewer'") from None
        self._texts: dict[str, str] = {}
        self._ages = ImageAge()

    def add_image(self, stamp_ns: int, rgb: np.ndarray) -> None:
        """Shows an image, RGB uint8 [height, width, 3]."""
        self._at(stamp_ns)
        self._stream.log("camera", self._rerun.Image(np.ascontiguousarray(rgb)).compress(jpeg_quality=_JPEG_QUALITY))

    def add_action(self, stamp_ns: int, action: Any) -> None:
        """Shows an action: a VlaAction, or an object with its fields."""
        self._at(stamp_ns)
        if self._is_new("instruction", action.instruction):
            self._stream.log("instruction", self._rerun.TextDocument(action.instruction))
        self.add_curves(stamp_ns, action_curves(action))
        for at_ns, age_s in self._ages.add(stamp_ns, float(action.latency_s)):
            self.add_curves(at_ns, {"age/image_s": age_s})

    def add_stats(self, stamp_ns: int, stats: Any) -> None:
        """Shows an action's decoding: a DecodeStats, or an object with its fields."""
        self.add_curves(stamp_ns, decoding_curves(stats))

    def add_curves(self, stamp_ns: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve, by the curves' paths."""
        self._at(stamp_ns)
        for path, value in values.items():
            self._stream.log(path, self._rerun.Scalars(value))

    def add_state(self, stamp_ns: int, path: str, text: str) -> None:
        """Adds a line to a log if it differs from the previous one in more than its numbers."""
        if self._is_new(path, _FIGURE.sub("", text)):
            self._at(stamp_ns)
            self._stream.log(path, self._rerun.TextLog(text))

    def close(self) -> str:
        """Flushes the stream; returns a message if data was lost, else an empty string."""
        try:
            self._stream.flush(timeout_sec=_FLUSH_S)
        except (OSError, RuntimeError) as error:  # the viewer was closed, or never listened
            return f"the Rerun output is incomplete: {str(error).splitlines()[0]}"
        finally:
            self._stream.disconnect()
        return ""

    def _is_new(self, path: str, text: str) -> bool:
        before, self._texts[path] = self._texts.get(path), text
        return before != text

    def _at(self, stamp_ns: int) -> None:
        self._stream.set_time(_TIMELINE, timestamp=np.datetime64(stamp_ns, "ns"))


def action_curves(action: Any) -> dict[str, float]:
    """The first values of an action by name, the speed that they command, and the latency by stage."""
    first = dict(zip(action.names, map(float, action.values), strict=False))
    curves = {f"action/{name}": value for name, value in first.items()}
    if action.reference == Reference.DELTA.value and action.action_dt > 0:
        for kind, names in (("linear", ("x", "y", "z")), ("angular", ("roll", "pitch", "yaw"))):
            way = np.linalg.norm([first.get(name, 0.0) for name in names])
            curves[f"speed/{kind}/policy"] = float(way / action.action_dt)
    return curves | {f"latency/{stage}": float(getattr(action, stage)) for stage in _STAGES}


def decoding_curves(stats: Any) -> dict[str, float]:
    """The numbers of drafted and accepted tokens, and of dropped frames."""
    figures = {
        "drafted": sum(stats.tree_nodes) - len(stats.tree_nodes),  # without the roots
        "accepted": sum(stats.accept_lengths),
        "tau": stats.tau,
        "forwards": stats.forwards,
        "in_flight": stats.in_flight,
    }
    dropped = zip(stats.drop_reasons, stats.drop_counts, strict=True)
    return {f"decoding/{name}": float(value) for name, value in figures.items()} | {
        f"dropped/{reason}": float(count) for reason, count in dropped if count
    }


def speed_curves(who: str, linear: float, angular: float) -> dict[str, float]:
    """A tool's commanded speeds or limits, m/s and rad/s."""
    return {f"speed/linear/{who}": linear, f"speed/angular/{who}": angular}


class ImageAge:
    """The age of the image that a robot acts on; it grows until the next action arrives."""

    def __init__(self) -> None:
        self._stamp_ns = 0  # of the image acted on

    def add(self, stamp_ns: int, latency_s: float) -> list[tuple[int, float]]:
        """Adds an action by its image's stamp; returns points of the curve: time in nanoseconds, age in seconds.

        If an answer has several messages, the first counts, since it moves the robot.
        """
        before_ns, self._stamp_ns = self._stamp_ns, stamp_ns
        if stamp_ns == before_ns:
            return []
        out_ns = stamp_ns + round(latency_s * 1e9)
        grown = [(out_ns - 1, (out_ns - before_ns) * 1e-9)] if 0 < before_ns < stamp_ns else []
        return [*grown, (out_ns, latency_s)]


class PoseSpeed:
    """The speed of commanded poses over 0.1 s: the clock may be too coarse for two consecutive poses."""

    def __init__(self) -> None:
        self._poses: deque[tuple[int, Pose]] = deque()

    def add(self, stamp_ns: int, pose: Pose) -> tuple[float, float] | None:
        """Adds a pose; returns m/s and rad/s, or None while there are too few poses."""
        poses = self._poses
        if poses and not 0 <= stamp_ns - poses[-1][0] < _WINDOW_S * 1e9:
            poses.clear()  # silence, or another clock
        poses.append((stamp_ns, pose))
        while stamp_ns - poses[0][0] > _WINDOW_S * 1e9:
            poses.popleft()
        passed_s = (stamp_ns - poses[0][0]) * 1e-9
        if passed_s < _SHORTEST_S:
            return None
        way_m, turn_rad = poses[0][1].distance(pose)
        return way_m / passed_s, turn_rad / passed_s


def _blueprint(layout: Any) -> Any:
    curves = [layout.TimeSeriesView(origin=name, name=name) for name in _CURVES]
    seen = layout.Vertical(
        layout.Spatial2DView(origin="camera", name="camera"),
        layout.TextDocumentView(origin="instruction", name="instruction"),
        layout.TextLogView(origin="state", name="driver and guard"),
        row_shares=[4, 1, 2],
    )
    return layout.Blueprint(layout.Horizontal(seen, layout.Vertical(*curves)))
