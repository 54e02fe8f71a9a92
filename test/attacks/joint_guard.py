# SPDX-License-Identifier: Apache-2.0
"""The guard of joint commands under hostile ones and floods, by each joint output, over real DDS.

A case is right where what goes out stays within the joints' limits throughout, and right commands pass again once the
stop is cleared.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attacks.arm import LIMITS, NUMBERS, PATIENT_GUARD
from attacks.process import Attacker, NodeProcess, attacker, running, stamp
from attacks.tally import Silent, Tally
from builtin_interfaces.msg import Duration
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Float64MultiArray
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from specvla_ros.control.guard.settings import JOINT_OUTPUTS, Output
from specvla_ros.lab.files import write_parameters
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.msg import GuardState, VlaAction
from specvla_ros.ros.qos import ACTION, COMMAND, LATCHED_STATE

_HOME = np.array(TABLE_ARM.home)
_SPEED, _ACCELERATION = 0.5, 10.0  # rad/s, rad/s²
_AHEAD_S, _PERIOD_S = 0.06, 0.02
_TOLERANCE = 1.1  # of a speed between two messages: they arrive a little apart


def attack_joint_guard(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Joint commands that are none, or wrong, or floods; arguments as of `attack_driver`, `limit` for each output."""
    tally, rng = Tally(slow_s=60.0), random.Random(seed)
    for number, output in enumerate(JOINT_OUTPUTS):
        with attacker(domain + number) as user:
            process = NodeProcess("guard", scratch / f"{output}.log", PATIENT_GUARD, files=(_file(scratch, output),))
            with running(process):
                arm, tally.pid = JointArm(user, output), str(process.pid)
                _pass(arm, process)
                cases = [*_wrong_commands(arm), *_broken(arm, rng)]
                if limit is not None:
                    cases = rng.sample(cases, min(limit, len(cases)))
                for name, send in cases:
                    tally.judge(f"{output}: {name}", partial(_one, arm, process, send))
                tally.judge(f"{output}: 1000 commands at once", partial(_burst, arm, process, rng))
    return tally


def _file(scratch: Path, output: str) -> Path:
    """Parameters of a guard of the table's arm."""
    model, path = scratch / "arm.xml", scratch / f"{output}.yaml"
    model.write_text(TABLE_ARM.kinematics(), encoding="utf-8")
    joints = {
        "joints.names": list(TABLE_ARM.joints),
        "joints.model": str(model),
        "joints.tool": "pinch",
        "joints.max_speed": [_SPEED],
        "joints.max_acceleration": [_ACCELERATION],
    }
    chosen = {"output": output, "base_frame": "base_link", "tool_pose_source": "joint_states", "black_box_s": 0.0}
    write_parameters(path, chosen | LIMITS | joints)
    return path


class JointArm(Attacker):
    """An arm whose joints are where they are sent, a right driver, policy and hand, and an eye on what is sent."""

    def __init__(self, other: Attacker, output: str) -> None:
        super().__init__(other.node, other._executor)
        self.output, self.joints, self.passing = Output(output), _HOME.copy(), False
        self.sent: list[tuple[float, np.ndarray]] = []  # arrival, and positions or velocities
        node, kind = self.node, Float64MultiArray if output.endswith("_array") else JointTrajectory
        self.kind: Any = kind
        self._arrived_s = time.monotonic()
        self.commands = node.create_publisher(kind, f"/command/{self.output.topic}", COMMAND)
        self._states = node.create_publisher(JointState, "/joint_states", 10)
        self._actions = node.create_publisher(VlaAction, "/action", ACTION)
        self._enables = node.create_publisher(Bool, "/guard/enable", 1)
        node.create_subscription(kind, f"/guard/{self.output.topic}", self._on_sent, 100)
        node.create_subscription(GuardState, "/guard/state", self._on_state, LATCHED_STATE)
        node.create_timer(_PERIOD_S, self._say)

    @property
    def by_velocity(self) -> bool:
        """Whether its joints are sent velocities."""
        return self.output is Output.VELOCITY_ARRAY

    def command(self, way: Any = 0.0, **changes: Any) -> Any:
        """To so far from where the joints are, or at such a velocity; right, but for the changes."""
        numbers = np.broadcast_to(np.asarray(way, dtype=float), _HOME.shape)
        values = (numbers if self.by_velocity else self.joints + numbers).tolist()
        if self.kind is Float64MultiArray:
            return Float64MultiArray(**{"data": values} | changes)
        end = JointTrajectoryPoint(positions=values, velocities=[0.0] * len(values), time_from_start=_seconds(_AHEAD_S))
        fields: dict[str, Any] = {"joint_names": list(TABLE_ARM.joints), "points": [end]}
        message = JointTrajectory(**fields | changes)
        message.header.stamp = stamp(time.time_ns())
        return message

    def check(self) -> None:
        """Whatever was sent is finite, in the joints' ranges, and no faster than the limits; then forgets it.

        Raises:
            Silent: it is not.
        """
        values, times_s = np.array([each for _, each in self.sent]), np.array([at_s for at_s, _ in self.sent])
        del self.sent[:-1]
        if not np.isfinite(values).all():
            raise Silent("something that is no number was sent")
        if self.by_velocity:
            if np.abs(values).max(initial=0.0) > _SPEED * _TOLERANCE:
                raise Silent(f"a velocity of {np.abs(values).max():.3f} rad/s was sent")
            return
        low, high = np.array([TABLE_ARM.model().joint(name).range for name in TABLE_ARM.joints]).T
        if len(values) and ((values < low - 1e-6) | (values > high + 1e-6)).any():
            raise Silent("a joint was sent out of its range")
        steps = np.abs(np.diff(values, axis=0)).max(axis=1, initial=0.0)
        allowed = _SPEED * _TOLERANCE * np.maximum(np.diff(times_s), 2 * _PERIOD_S) + _SPEED * _AHEAD_S
        if (steps > allowed).any():
            raise Silent(f"a step of {steps.max():.3f} rad was sent")

    def _on_sent(self, message: Any) -> None:
        now_s = time.monotonic()
        values = np.array(message.data if self.kind is Float64MultiArray else message.points[-1].positions)
        self.sent.append((now_s, values))
        passed_s, self._arrived_s = now_s - self._arrived_s, now_s
        if not np.isfinite(values).all():
            return
        self.joints = self.joints + values * min(passed_s, 0.1) if self.by_velocity else values

    def _on_state(self, message: GuardState) -> None:
        self.passing = message.state == GuardState.PASSING

    def _say(self) -> None:
        now = stamp(time.time_ns())
        states = JointState(name=list(TABLE_ARM.joints), position=self.joints.tolist())
        states.header.stamp = now
        self._states.publish(states)
        action = VlaAction(horizon=1, action_dt=0.2)
        action.header.stamp, action.header.frame_id = now, "base_link"
        self._actions.publish(action)
        self._enables.publish(Bool(data=True))
        self.commands.publish(self.command())


def _seconds(time_s: float) -> Duration:
    return Duration(sec=math.floor(time_s), nanosec=round(time_s % 1 * 1e9))


def _pass(arm: JointArm, process: NodeProcess) -> None:
    """It lets right commands through, once the stop is cleared; RuntimeError if it does not."""
    for _ in range(20):
        arm.call(Trigger, "/guard/clear_stop", Trigger.Request(), 60.0)
        if arm.until(lambda: arm.passing and len(arm.sent) > 3, 3.0):
            arm.check()
            return
    raise RuntimeError(f"nothing passes any more: {process.new_output()[-400:]}")


def _one(arm: JointArm, process: NodeProcess, send: Callable[[], None]) -> str:
    before = arm.joints.copy()
    for _ in range(5):
        send()
        arm.spin(0.02)
    arm.spin(0.2)
    arm.check()
    moved = float(np.abs(arm.joints - before).max())
    if moved > _SPEED * 0.5:
        raise Silent(f"a joint moved by {moved:.3f} rad")
    stopped = not arm.passing
    _pass(arm, process)
    process.check()
    return "stopped" if stopped else "passed over or bounded"


def _wrong_commands(arm: JointArm) -> Iterator[tuple[str, Callable[[], None]]]:
    def command(name: str, make: Callable[[], Any]) -> tuple[str, Callable[[], None]]:
        return name, lambda: arm.commands.publish(make())

    for number in NUMBERS:
        for joint in range(len(_HOME)):
            way = np.where(np.arange(len(_HOME)) == joint, number, 0.0)
            yield command(f"{number} at joint {joint}", partial(arm.command, way))
    for size in (0.1, 0.3, 0.6, 3.0):
        yield command(f"all joints by {size}", partial(arm.command, size))
    for count in (0, 1, 6, 8, 10_000):
        if arm.kind is Float64MultiArray:
            yield command(f"{count} numbers", partial(arm.command, data=[0.0] * count))
        else:
            point = JointTrajectoryPoint(positions=[0.0] * count)
            yield command(f"{count} positions", partial(arm.command, points=[point]))
            yield command(f"{count} points", lambda count=count: _points(arm, [0.1 * i for i in range(count)]))  # type: ignore[misc]
    if arm.kind is Float64MultiArray:
        return
    names = list(TABLE_ARM.joints)
    for wrong in ([], names[:6], [*names[:6], names[0]], ["a"] * 7, [*names, "finger"], ["x" * 10_000] * 7):
        yield command(f"names {wrong!s:.40}", partial(arm.command, joint_names=wrong))
    for times_s in ([-1.0], [0.2, 0.1], [0.1, 0.1], [1e6], [0.1, 1e6]):
        yield command(f"points at {times_s}", partial(_points, arm, times_s))
    for count in (1, 6, 8):
        point = JointTrajectoryPoint(positions=_HOME.tolist(), velocities=[0.1] * count)
        yield command(f"{count} velocities", partial(arm.command, points=[point]))
    fast = JointTrajectoryPoint(positions=_HOME.tolist(), velocities=[100.0] * 7, time_from_start=_seconds(_AHEAD_S))
    yield command("an end in full motion", partial(arm.command, points=[fast]))


def _points(arm: JointArm, times_s: list[float]) -> JointTrajectory:
    here = arm.joints.tolist()
    points = [JointTrajectoryPoint(positions=here, time_from_start=_seconds(each)) for each in times_s]
    return arm.command(points=points)


def _broken(arm: JointArm, rng: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    for size in (0, 1, 7, 60, 1000):
        yield f"{size} bytes", partial(arm.commands.publish, b"\0\1\0\0" + rng.randbytes(size))


def _burst(arm: JointArm, process: NodeProcess, rng: random.Random) -> str:
    for number in range(1000):
        arm.commands.publish(arm.command([rng.uniform(-1.0, 1.0) for _ in _HOME]))
        if number % 50 == 0:
            arm.spin(0.001)
    arm.spin(0.3)
    arm.check()
    _pass(arm, process)
    process.check()
    return "lived"
