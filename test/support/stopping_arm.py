# SPDX-License-Identifier: Apache-2.0
"""A guard and its black box on a made-up clock, before an arm that brakes at a known rate."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.serialization import serialize_message
from rclpy.time import Time
from std_msgs.msg import Bool, Empty, Float64MultiArray
from support.guarding import BASE, UPRIGHT
from support.guarding import settings as guard_settings

from specvla_ros.control.guard.commands import Instant, SentTwist, Stamp, ToolPose, TwistCommand
from specvla_ros.control.guard.guard import Guard, State
from specvla_ros.msg import VlaAction
from specvla_ros.ros.guard import black_box

BRAKES_M_S2 = 1.0  # half of what the guard sends
_PERIOD_S = 0.01
_PARTS = 10  # of a period, in which the arm moves
# In the order in which the guard announces its topics; the robot's are named as a user remaps them.
_TOPICS = {
    "/servo/command": TwistStamped,
    "/driver/gripper": Float64MultiArray,
    "/arm/pose": PoseStamped,
    "/policy/action": VlaAction,
    "/guard/enable": Bool,
    "/guard/stop": Empty,
    "/diagnostics": DiagnosticArray,
    "/servo/twist": TwistStamped,
    "/hand/command": Float64MultiArray,
}


@dataclass
class StoppingArm:
    """Everybody around a guard of twists, 100 times a second. The arm follows velocities at BRAKES_M_S2."""

    directory: Path
    speed: float  # m/s, along y
    start: tuple[float, float, float] = (0.5, -0.3, 0.3)
    noise_m: float = 0.0
    now_s: float = 1000.0
    velocity: float = 0.0
    sent: float = 0.0
    braked_s: float = 0.0  # when the guard first let nothing through
    silent: set[str] = field(default_factory=set)
    held: bool = True

    def __post_init__(self) -> None:
        self.guard = Guard(guard_settings("twist"))
        self.position = np.array(self.start)
        self._random = np.random.default_rng(0)

    def until_at_speed(self) -> None:
        while self.velocity < self.speed - 1e-9:
            self.step()
        self.run(0.2)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / _PERIOD_S)):
            self.step()

    def step(self) -> None:
        """Everybody speaks, the guard ticks, the arm moves for a period."""
        self._speak()
        outcome = self.guard.tick(self.instant)
        if isinstance(outcome.sent, SentTwist):
            self.sent = float(outcome.sent.velocity[1])
            self._record("/servo/twist", self._twist(self.sent))
        if outcome.stopped is not None and self.guard.state is not State.PASSING:
            self.braked_s = self.braked_s or self.now_s
            self.box.stop(outcome.stopped.cause.value, outcome.stopped.detail)
        for _ in range(_PARTS):
            part_s = _PERIOD_S / _PARTS
            change = np.clip(self.sent - self.velocity, -BRAKES_M_S2 * part_s, BRAKES_M_S2 * part_s)
            self.position[1] += (self.velocity + change / 2) * part_s
            self.velocity += change
        self.now_s += _PERIOD_S

    def command(self, speed: float) -> None:
        self.guard.command(TwistCommand(self._stamp, np.array([0, speed, 0, 0, 0, 0])), self.instant)
        self._record("/servo/command", self._twist(speed))

    def press_stop(self) -> None:
        self.guard.press_stop("topic", self.instant)
        self._record("/guard/stop", Empty())

    @property
    def instant(self) -> Instant:
        return Instant(self.now_s, self.clock_ns)

    @property
    def clock_ns(self) -> int:
        return round(self.now_s * 1e9)

    @property
    def _stamp(self) -> Stamp:
        return Stamp(self.clock_ns, BASE)

    def _speak(self) -> None:
        said: dict[str, Callable[[], None]] = {
            "tool": self._measure,
            "action": self._act,
            "enable": self._enable,
            "command": lambda: self.command(self.speed),
        }
        for name, say in said.items():
            if name not in self.silent:
                say()

    def _measure(self) -> None:
        seen = self.position + self.noise_m * self._random.normal(size=3)
        self.guard.tool(ToolPose(self._stamp, seen, UPRIGHT), self.instant)
        pose = PoseStamped()
        self._stamped(pose)
        pose.pose.position.x, pose.pose.position.y, pose.pose.position.z = seen.tolist()
        pose.pose.orientation.w = 1.0
        self._record("/arm/pose", pose)

    def _act(self) -> None:
        self.guard.action(self._stamp, "lift", self.instant)
        self._record("/policy/action", self._stamped(VlaAction()))

    def _enable(self) -> None:
        self.guard.enable(self.held, self.instant)
        self._record("/guard/enable", Bool(data=self.held))

    def _twist(self, speed: float) -> TwistStamped:
        twist = TwistStamped()
        twist.twist.linear.y = speed
        return self._stamped(twist)  # type: ignore[no-any-return]

    def _stamped(self, message: Any) -> Any:
        message.header.stamp, message.header.frame_id = Time(nanoseconds=self.clock_ns).to_msg(), BASE
        return message

    def _record(self, topic: str, message: Any) -> None:
        self.box.record(topic, serialize_message(message))

    def open(self, monkeypatch: pytest.MonkeyPatch) -> "StoppingArm":
        """Begins its black box, which takes this arm's time for the time."""
        monkeypatch.setattr(black_box, "time", SimpleNamespace(time_ns=lambda: self.clock_ns))
        self.box = black_box.BlackBox(self.directory, 120.0, 20, "twist")
        for topic, kind in _TOPICS.items():
            self.box.add_topic(topic, f"{kind.__module__.partition('.')[0]}/msg/{kind.__name__}")
        return self

    def close(self) -> None:
        assert self.box.close()
        assert not self.box.lost
