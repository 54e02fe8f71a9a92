# SPDX-License-Identifier: Apache-2.0
"""The node `live_view`: what the policy sees, is told, does and takes its time for, in Rerun's viewer or in a file.

It only listens, in a process of its own: neither a viewer that is slow nor its end reaches the robot. The library,
`rerun-sdk`, is optional and imported here alone.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

from specvla_msgs.msg import DecodeStats, VlaAction
from specvla_ros.bags.image_message import rgb_from_message, stamp_ns
from specvla_ros.errors import UserError
from specvla_ros.ros.parameters import declare_parameters, read_parameters, unknown_parameters
from specvla_ros.ros.qos import ACTION, NEWEST_IMAGE
from specvla_ros.ros.spinning import run_node
from specvla_ros.settings.parameter import parameter

_TIMELINE = "image_stamp"  # everything is shown at the stamp of the image that it belongs to
_STAGES = ("receive_s", "wait_s", "vision_s", "prefill_s", "decode_s", "publish_s", "latency_s")
_JPEG_QUALITY = 80


@dataclass(frozen=True)
class LiveViewParameters:
    """Every parameter of the live view."""

    out: str = parameter("", "File to write, such as run.rrd, for `rerun run.rrd`; empty: none.")
    viewer: str = parameter(
        "", "A viewer that listens, such as rerun+http://127.0.0.1:9876/proxy (`rerun` starts one); empty: none."
    )

    def check(self) -> None:
        """Whether there is anywhere to show it.

        Raises:
            UserError: there is not.
        """
        if not self.out and not self.viewer:
            raise UserError(
                "say where to show it: set 'out' to a file such as run.rrd, or 'viewer' to a viewer's address"
            )
        if self.out and not Path(self.out).expanduser().parent.is_dir():
            raise UserError(f"the folder of 'out', {Path(self.out).expanduser().parent}, does not exist; make it first")


class Recording:
    """What is shown, from messages. Needs no node.

    Args:
        chosen: where it goes.

    Raises:
        UserError: the library is missing, or the file cannot be written.
    """

    def __init__(self, chosen: LiveViewParameters) -> None:
        try:
            import rerun
            import rerun.blueprint as layout
        except ModuleNotFoundError as error:
            raise UserError(
                f"the Python package '{error.name}' is missing; `pip install -r requirements/rerun.txt` brings it"
            ) from None
        self._rerun = rerun
        self._stream: Any = rerun.RecordingStream("specvla_ros")
        sinks: list[Any] = [rerun.FileSink(str(Path(chosen.out).expanduser()))] if chosen.out else []
        sinks += [rerun.GrpcSink(chosen.viewer)] if chosen.viewer else []
        try:
            self._stream.set_sinks(*sinks, default_blueprint=_blueprint(layout))
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"the live view cannot be had: {error}; check 'out' and 'viewer'") from None
        self._instruction = ""

    def add_image(self, message: Any) -> None:
        """Shows an Image or CompressedImage.

        Raises:
            UserError: it cannot be read.
        """
        rgb = np.ascontiguousarray(rgb_from_message(message))
        self._at(message.header)
        self._stream.log("camera", self._rerun.Image(rgb).compress(jpeg_quality=_JPEG_QUALITY))

    def add_action(self, action: VlaAction) -> None:
        """Shows an action's first values by their names, its instruction, and its latency by stage."""
        self._at(action.header)
        if action.instruction != self._instruction:
            self._instruction = action.instruction
            self._stream.log("instruction", self._rerun.TextDocument(action.instruction))
        for name, value in zip(action.names, action.values, strict=False):
            self._stream.log(f"action/{name}", self._rerun.Scalars(float(value)))
        for stage in _STAGES:
            self._stream.log(f"latency/{stage}", self._rerun.Scalars(float(getattr(action, stage))))

    def add_stats(self, stats: DecodeStats) -> None:
        """Shows how many tokens were drafted and accepted, and which frames were dropped."""
        self._at(stats.header)
        figures = {
            "drafted": sum(stats.tree_nodes) - len(stats.tree_nodes),  # without the roots
            "accepted": sum(stats.accept_lengths),
            "tau": stats.tau,
            "forwards": stats.forwards,
            "in_flight": stats.in_flight,
        }
        for name, value in figures.items():
            self._stream.log(f"decoding/{name}", self._rerun.Scalars(float(value)))
        for reason, count in zip(stats.drop_reasons, stats.drop_counts, strict=True):
            if count:
                self._stream.log(f"dropped/{reason}", self._rerun.Scalars(float(count)))

    def close(self) -> bool:
        """Writes out what is held back."""
        self._stream.flush()
        self._stream.disconnect()
        return True

    def _at(self, header: Header) -> None:
        self._stream.set_time(_TIMELINE, timestamp=np.datetime64(stamp_ns(header), "ns"))


def _blueprint(layout: Any) -> Any:
    """Camera and instruction beside the curves."""
    curves = [layout.TimeSeriesView(origin=name, name=name) for name in ("action", "latency", "decoding", "dropped")]
    seen = layout.Vertical(
        layout.Spatial2DView(origin="camera", name="camera"),
        layout.TextDocumentView(origin="instruction", name="instruction"),
        row_shares=[4, 1],
    )
    return layout.Blueprint(layout.Horizontal(seen, layout.Vertical(*curves)))


class LiveView(Node):
    """Listens to a policy, and shows it.

    Args:
        node_arguments: those of rclpy.node.Node.

    Raises:
        UserError: a parameter is wrong, or the library is missing.
    """

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("live_view", **node_arguments)
        try:
            declare_parameters(self, LiveViewParameters)
            chosen = read_parameters(self, LiveViewParameters)
            chosen.check()
            self._recording = Recording(chosen)
        except UserError:
            self.destroy_node()
            raise
        for name, hint in unknown_parameters(self).items():
            self.get_logger().warning(f"there is no parameter '{name}'; {hint}")
        self.create_subscription(Image, "image", self._on_image, NEWEST_IMAGE)
        self.create_subscription(CompressedImage, "image/compressed", self._on_image, NEWEST_IMAGE)
        self.create_subscription(VlaAction, "policy/action", self._recording.add_action, ACTION)
        self.create_subscription(DecodeStats, "policy/decode_stats", self._recording.add_stats, ACTION)

    def close(self) -> bool:
        """Writes out what is held back."""
        return self._recording.close()

    def _on_image(self, message: Any) -> None:
        try:
            self._recording.add_image(message)
        except UserError as error:
            self.get_logger().warning(f"an image is not shown: {error}", throttle_duration_sec=5.0)


def main() -> None:
    """Runs the node; the exit code is 2 for a parameter that a user can mend."""
    sys.exit(run_node("live_view", LiveView, close=LiveView.close))
