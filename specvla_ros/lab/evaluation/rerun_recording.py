# SPDX-License-Identifier: Apache-2.0
"""A run in Rerun: camera, instruction, actions and speeds against limits, latency by stage, drafts. Needs no ROS.

The library, `rerun-sdk`, is optional and imported here alone.
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
_VIEWER = "rerun+http://127.0.0.1:9876/proxy"  # where a viewer listens that is started without options
_TIMELINE = "stamp"  # the image's, for it and for all that answers it; a command's own
_STAGES = ("receive_s", "wait_s", "vision_s", "prefill_s", "decode_s", "publish_s", "latency_s")
_CURVES = ("action", "speed/linear", "speed/angular", "age", "latency", "decoding", "dropped")
_JPEG_QUALITY = 80
_FLUSH_S = 5.0  # a viewer that hangs must not hold up the run
_WINDOW_S, _SHORTEST_S = 0.1, 0.04
_FIGURE = re.compile(r"[-+]?[0-9.]+")


@dataclass(frozen=True)
class RerunSettings:
    """Where a run is shown."""

    out: str = parameter("", "File to write, such as run.rrd, for `rerun run.rrd`; empty: none.")
    viewer: str = parameter(
        "",
        "A viewer that listens, such as rerun+http://127.0.0.1:9876/proxy (`rerun` starts one); spawn: opens one; "
        "empty: none.",
    )

    def check(self) -> None:
        """Raises a UserError where there is nowhere to show it."""
        if not self.out and not self.viewer:
            raise UserError(
                "say where to show it: set 'out' to a file such as run.rrd, or 'viewer' to a viewer's address"
            )
        if self.out and not Path(self.out).expanduser().parent.is_dir():
            raise UserError(f"the folder of 'out', {Path(self.out).expanduser().parent}, does not exist; make it first")


def require_rerun() -> None:
    """Raises a UserError where the library is missing."""
    try:
        import rerun.blueprint  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_package(error, "requirements/rerun.txt") from None


class RerunRecording:
    """Shows a run, or writes it to a file, or both.

    A UserError says that there is nowhere to, that the library is missing, or that file or viewer cannot be had.
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
            raise UserError(f"the live view cannot be had: {error}; check 'out' and 'viewer'") from None
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
        """Shows how an action was decoded: a DecodeStats, or an object with its fields."""
        self.add_curves(stamp_ns, decoding_curves(stats))

    def add_curves(self, stamp_ns: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve, by the curves' paths."""
        self._at(stamp_ns)
        for path, value in values.items():
            self._stream.log(path, self._rerun.Scalars(value))

    def add_state(self, stamp_ns: int, path: str, text: str) -> None:
        """Adds a line to a log when it differs from the one before in more than its numbers."""
        if self._is_new(path, _FIGURE.sub("", text)):
            self._at(stamp_ns)
            self._stream.log(path, self._rerun.TextLog(text))

    def close(self) -> str:
        """Writes out what is held back; returns in words what got lost, or nothing."""
        try:
            self._stream.flush(timeout_sec=_FLUSH_S)
        except (OSError, RuntimeError) as error:  # a viewer that was closed, or never listened
            return f"not all of the run is shown: {str(error).splitlines()[0]}"
        finally:
            self._stream.disconnect()
        return ""

    def _is_new(self, path: str, text: str) -> bool:
        before, self._texts[path] = self._texts.get(path), text
        return before != text

    def _at(self, stamp_ns: int) -> None:
        self._stream.set_time(_TIMELINE, timestamp=np.datetime64(stamp_ns, "ns"))


def action_curves(action: Any) -> dict[str, float]:
    """An action's first values by their names, the speed that they command, and the latency by stage."""
    first = dict(zip(action.names, map(float, action.values), strict=False))
    curves = {f"action/{name}": value for name, value in first.items()}
    if action.reference == Reference.DELTA.value and action.action_dt > 0:
        for kind, names in (("linear", ("x", "y", "z")), ("angular", ("roll", "pitch", "yaw"))):
            way = np.linalg.norm([first.get(name, 0.0) for name in names])
            curves[f"speed/{kind}/policy"] = float(way / action.action_dt)
    return curves | {f"latency/{stage}": float(getattr(action, stage)) for stage in _STAGES}


def decoding_curves(stats: Any) -> dict[str, float]:
    """The tokens drafted and accepted, and the frames dropped."""
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
    """The age of the image that a robot acts on: it grows until the next action is there."""

    def __init__(self) -> None:
        self._stamp_ns = 0  # of the image acted on

    def add(self, stamp_ns: int, latency_s: float) -> list[tuple[int, float]]:
        """Takes the next action, by its image's stamp; returns points of the curve, nanoseconds and seconds each.

        Of an answer in several messages the first counts: the robot moves by it.
        """
        before_ns, self._stamp_ns = self._stamp_ns, stamp_ns
        if stamp_ns == before_ns:
            return []
        out_ns = stamp_ns + round(latency_s * 1e9)
        grown = [(out_ns - 1, (out_ns - before_ns) * 1e-9)] if 0 < before_ns < stamp_ns else []
        return [*grown, (out_ns, latency_s)]


class PoseSpeed:
    """The speed of commanded poses, over a tenth of a second: the clock may tick too coarsely for two neighbours."""

    def __init__(self) -> None:
        self._poses: deque[tuple[int, Pose]] = deque()

    def add(self, stamp_ns: int, pose: Pose) -> tuple[float, float] | None:
        """Takes the next pose; returns m/s and rad/s, or None while there are too few poses."""
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
