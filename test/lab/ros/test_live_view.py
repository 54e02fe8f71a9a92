# SPDX-License-Identifier: Apache-2.0
"""The live view writes what a policy sees, is told and does; and says what it needs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rclpy
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from support.driving import LIMITS
from support.patience import wait_until
from support.ros import rgb_image, robot

from specvla_ros.lab.ros import live_view
from specvla_ros.lab.ros.live_view import LiveView
from specvla_ros.msg import DecodeStats, VlaAction
from specvla_ros.ros.qos import ACTION, COMMAND, DIAGNOSTICS

PERIOD_NS = 10_000_000


class Noted:
    """Takes what is shown, in place of the library."""

    def __init__(self, chosen: Any) -> None:
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.states: list[tuple[str, str]] = []

    def add_action(self, stamp_ns: int, action: Any) -> None:
        self.add_curves(stamp_ns, {"action": float(action.values[0])})

    def add_stats(self, stamp_ns: int, stats: Any) -> None:
        self.add_curves(stamp_ns, {"tau": stats.tau})

    def add_curves(self, stamp_ns: int, values: dict[str, float]) -> None:
        for path, value in values.items():
            self.curves.setdefault(path, []).append((stamp_ns, value))

    def add_state(self, stamp_ns: int, path: str, text: str) -> None:
        self.states.append((path, text))

    def close(self) -> str:
        return ""


def stamped(message: Any, ns: int) -> Any:
    message.header.stamp = Time(sec=ns // 10**9, nanosec=ns % 10**9)
    return message


def test_commands_are_shown_against_the_limits_they_are_held_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "RerunRecording", Noted)
    rclpy.init()
    limits = [Parameter(name, value=value) for name, value in LIMITS.items()]
    view = LiveView(parameter_overrides=[Parameter("out", value="run.rrd"), *limits])
    noted: Any = view._recording
    user = rclpy.create_node("user", enable_rosout=False)
    poses = user.create_publisher(PoseStamped, "guard/pose", COMMAND)
    twists = user.create_publisher(TwistStamped, "driver/twist", COMMAND)
    actions = user.create_publisher(VlaAction, "policy/action", ACTION)
    stats = user.create_publisher(DecodeStats, "policy/decode_stats", ACTION)
    diagnostics = user.create_publisher(DiagnosticArray, "/diagnostics", DIAGNOSTICS)
    executor = SingleThreadedExecutor()
    for node in (view, user):
        executor.add_node(node)

    def until(condition: Any) -> None:
        wait_until(condition, meanwhile=lambda: executor.spin_once(timeout_sec=0.02))

    try:
        publishers = (poses, twists, actions, stats, diagnostics)
        until(lambda: all(each.get_subscription_count() for each in publishers))
        for step in range(20):
            pose = stamped(PoseStamped(), 10**9 + step * PERIOD_NS)
            pose.pose.position.x, pose.pose.orientation.w = 0.002 * step, 1.0  # 0.2 m/s
            poses.publish(pose)
            executor.spin_once(timeout_sec=0.02)
        poses.publish(stamped(PoseStamped(), 0))  # no stamp: not shown, and no end of it
        twist = stamped(TwistStamped(), 10**9)
        twist.twist.linear.x, twist.twist.linear.y, twist.twist.angular.z = 0.3, 0.4, -1.0
        twists.publish(twist)
        actions.publish(stamped(VlaAction(values=[0.01]), 10**9))
        stats.publish(stamped(DecodeStats(tau=2.5), 10**9))
        said = [("guard: gate", "passing"), ("policy: model", "loaded"), ("arm/driver: motion", "following actions")]
        status = [DiagnosticStatus(name=name, message=message) for name, message in said]
        diagnostics.publish(stamped(DiagnosticArray(status=status), 10**9))
        wanted = ("speed/linear/guard", "speed/linear/driver", "speed/linear/limit", "tau")
        until(lambda: all(path in noted.curves for path in wanted) and len(noted.states) == 2)
    finally:
        executor.shutdown()
        for node in (view, user):
            node.destroy_node()
        rclpy.try_shutdown()
    assert np.allclose([speed for _, speed in noted.curves["speed/linear/guard"]], 0.2)
    assert noted.curves["speed/linear/driver"] == [(10**9, pytest.approx(0.5))]
    assert noted.curves["speed/angular/driver"] == [(10**9, pytest.approx(1.0))]
    assert noted.curves["speed/linear/limit"] == [(10**9, LIMITS["limits.linear_speed"])]
    assert noted.curves["tau"] == [(10**9, 2.5)]
    assert noted.states == [("state/guard", "passing"), ("state/driver", "following actions")]


def test_a_running_policy_is_written_to_a_file(checkpoint: Path, tmp_path: Path) -> None:
    chunks = pytest.importorskip("rerun.chunk", reason="pip install -r requirements/rerun.txt")
    out = tmp_path / "run.rrd"
    with robot(checkpoint, instruction="put carrot on plate") as r:
        view = LiveView(parameter_overrides=[Parameter("out", value=str(out))])
        logged: dict[str, int] = {}
        stream = view._recording._stream
        log = stream.log

        def note(path: str, *shown: object) -> None:
            logged[path] = logged.get(path, 0) + 1
            log(path, *shown)

        stream.log = note
        r.executor.add_node(view)
        r.start()
        r.until(lambda: r.images.get_subscription_count() == 2 and view.count_publishers("policy/action"))
        for seed in range(3):
            r.act(rgb_image(r.now_ns(), seed=seed))
        r.images.publish(rgb_image(r.now_ns(), encoding="hsv12"))  # refused here too, and no end of it
        r.until(lambda: logged.get("decoding/tau") == 3 and logged.get("camera", 0) >= 1)
        assert view.close()
        view.destroy_node()
    assert logged["instruction"] == 1 and logged["action/x"] == logged["latency/latency_s"] == 3
    with_paths = {str(chunk.entity_path) for chunk in chunks.RrdReader(str(out)).stream()}
    assert {"/camera", "/instruction", "/action/x", "/latency/latency_s", "/decoding/tau"} <= with_paths
