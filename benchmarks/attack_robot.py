# SPDX-License-Identifier: Apache-2.0
"""Driver, guard and simulated robot under hostile messages, floods, and second publishers, over real DDS.

A case is right where what is wrong moves nothing, what goes out stays within the limits throughout, and the next right
message is followed.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from attack_process import Attacker, NodeProcess, attacker, ns_of, running, stamp
from attack_tally import Silent, Tally
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image
from std_msgs.msg import Bool, Float64MultiArray
from std_srvs.srv import Trigger

from specvla_msgs.msg import VlaAction
from specvla_ros.ros.qos import ACTION, COMMAND, DIAGNOSTICS, LATCHED_STATE
from specvla_ros.settings.profiles import write_parameters

_HOME = (0.5, 0.0, 0.2)
_DOWN = (0.0, 1.0, 0.0, 0.0)  # w x y z
_SPEED = 0.45  # m/s
_WORKSPACE = ((0.28, -0.32, 0.015), (0.80, 0.32, 0.45))
_LIMITS = {
    "limits.linear_speed": _SPEED,
    "limits.angular_speed": 2.5,
    "limits.linear_acceleration": 6.0,
    "limits.angular_acceleration": 30.0,
    "limits.linear_jerk": 300.0,
    "limits.angular_jerk": 1500.0,
    "limits.workspace_min": list(_WORKSPACE[0]),
    "limits.workspace_max": list(_WORKSPACE[1]),
    "gripper.output": "array",
    "gripper.open_value": 0.04,
    "gripper.closed_value": 0.0,
}
# A busy machine is late; what is asked here is what goes out, not when.
_PATIENT = {"tool_pose_timeout_s": 2.0}
_PATIENT_GUARD = {"command_timeout_s": 1.0, "state_timeout_s": 2.0, "enable_timeout_s": 2.0, "action_timeout_s": 5.0}
_STEP_M = 0.02
_STILL_M = 0.001
_TOLERANCE = 1.1  # of the speed between two commands: their stamps are taken a little apart
_NUMBERS = (math.nan, math.inf, -math.inf, 1e308, -1e308, 1e6, 5.0, -0.5)
_STAMPS_S = (-(10**9), -60.0, -3.0, 1.0, 60.0, 10**8)


def robot_file(scratch: Path) -> Path:
    """Parameters of driver and guard for the arm that is played here."""
    path = scratch / "robot.yaml"
    write_parameters(path, {"output": "pose", "base_frame": "base_link", **_LIMITS})
    return path


class Arm(Attacker):
    """A robot that is where it is sent, a policy with right actions, and an eye on what the robot is sent.

    Args:
        other: whose node it is.
        sent: topic of what the robot is sent.
    """

    def __init__(self, other: Attacker, sent: str) -> None:
        super().__init__(other.node, other._executor)
        node = self.node
        self.at = PoseStamped()
        self.at.pose.position.x, self.at.pose.position.y, self.at.pose.position.z = _HOME
        orientation = self.at.pose.orientation
        orientation.w, orientation.x, orientation.y, orientation.z = _DOWN
        self.sent: list[PoseStamped] = []
        self.passing = False
        self.gate = ""  # what the guard says of itself
        self.poses = node.create_publisher(PoseStamped, "/tool_pose", 10)
        self.actions = node.create_publisher(VlaAction, "/action", ACTION)
        self.commands = node.create_publisher(PoseStamped, "/command/pose", COMMAND)
        self.grippers = node.create_publisher(Float64MultiArray, "/command/gripper", COMMAND)
        self.enables = node.create_publisher(Bool, "/guard/enable", 1)
        node.create_subscription(PoseStamped, sent, self._on_sent, 100)
        node.create_subscription(Bool, "/guard/passing", self._on_passing, LATCHED_STATE)
        node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, DIAGNOSTICS)
        node.create_timer(0.02, self._on_timer)
        self.driving: Callable[[], None] = lambda: None  # what a right driver says, for the guard

    def pose(self, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> PoseStamped:
        """So far from where the arm is, stamped now."""
        message = PoseStamped()
        message.header.frame_id, message.header.stamp = "base_link", stamp(time.time_ns())
        here, there = self.at.pose.position, message.pose.position
        there.x, there.y, there.z = here.x + x, here.y + y, here.z + z
        message.pose.orientation = self.at.pose.orientation
        return message

    def action(self, *values: float, **changes: Any) -> VlaAction:
        """A right one, but for the changes."""
        numbers = [*values, *[0.0] * (7 - len(values))]
        message = VlaAction(names=["x", "y", "z", "roll", "pitch", "yaw", "gripper"], values=numbers, horizon=1)
        message.action_dt, message.reference, message.action_frame = 0.2, "delta", "base"
        message.rotation, message.gripper, message.mode = "rotation_vector", "open_high", "ar"
        message.header.stamp, message.header.frame_id = stamp(time.time_ns()), "base_link"
        for name, value in changes.items():
            setattr(message, name, value)
        return message

    def check(self) -> None:
        """Whatever was sent is finite, in the workspace, and no faster than the limits; then forgets it.

        Raises:
            Silent: it is not.
        """
        places = np.array([_place(each) for each in self.sent]).reshape(-1, 3)
        times_s = np.array([ns_of(each.header.stamp) * 1e-9 for each in self.sent])
        del self.sent[:-1]
        if not np.isfinite(places).all():
            raise Silent("something that is no number was sent")
        low, high = (np.array(bound) for bound in _WORKSPACE)
        if ((places < low - 1e-6) | (places > high + 1e-6)).any():
            raise Silent("something out of the workspace was sent")
        steps_m = np.linalg.norm(np.diff(places, axis=0), axis=1)
        allowed_m = _SPEED * _TOLERANCE * np.maximum(np.diff(times_s), 0.02)
        if (steps_m > allowed_m).any():
            raise Silent(f"a step of {steps_m.max():.3f} m was sent")

    def moved_m(self) -> float:
        """How far the arm has been sent since the last check."""
        places = np.array([_place(each) for each in self.sent]).reshape(-1, 3)
        return float(np.ptp(places, axis=0).max()) if len(places) else 0.0

    def _on_sent(self, message: PoseStamped) -> None:
        self.sent.append(message)
        if all(math.isfinite(each) for each in _place(message)):
            self.at = message

    def _on_passing(self, message: Bool) -> None:
        self.passing = message.data

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        self.gate = next((each.message for each in message.status if each.name.endswith(": gate")), self.gate)

    def _on_timer(self) -> None:
        self.poses.publish(self.pose())
        self.driving()


def _place(message: PoseStamped) -> tuple[float, float, float]:
    position = message.pose.position
    return position.x, position.y, position.z


@contextmanager
def _arm(name: str, scratch: Path, domain: int) -> Iterator[tuple[Arm, NodeProcess]]:
    """Driver or guard as a process, and everybody around it."""
    guard = name == "guard"
    parameters: dict[str, object] = {"black_box_s": 0.0, **_PATIENT_GUARD} if guard else {**_PATIENT}
    with attacker(domain) as user:
        process = NodeProcess(name, scratch / f"{name}.log", parameters, files=(robot_file(scratch),))
        with running(process):
            arm = Arm(user, f"/{name}/pose")
            if guard:
                arm.driving = partial(_drive, arm)
            else:
                arm.activate(name)
            yield arm, process


# The driver


def attack_driver(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Actions and poses that are none, or wrong, or floods.

    Args:
        scratch: directory for files.
        domain: of DDS.
        limit: number of cases, drawn at random; None: all.
        seed: of the drawing.
    """
    rng = random.Random(seed)
    with _arm("driver", scratch, domain) as (arm, process):
        _follow(arm, process)
        tally = Tally(pid=str(process.pid))
        cases = [*_wrong_actions(arm), *_wrong_poses(arm), *_broken(arm, rng)]
        if limit is not None:
            cases = rng.sample(cases, min(limit, len(cases)))
        for name, send in cases:
            tally.judge(name, partial(_one_to_the_driver, arm, process, send))
        for count in (1000, 3000):
            tally.judge(f"{count} actions at once", partial(_flood, arm, process, arm.actions, arm.action, count))
            tally.judge(f"{count} poses at once", partial(_flood, arm, process, arm.poses, arm.pose, count))
    return tally


def _follow(arm: Arm, process: NodeProcess) -> None:
    """A right action moves the arm.

    Raises:
        RuntimeError: it does not.
    """
    way_m = -_STEP_M if arm.at.pose.position.y > 0 else _STEP_M
    arm.check()
    start = arm.at.pose.position.y

    def there() -> bool:
        return abs(arm.at.pose.position.y - start) > 0.5 * _STEP_M

    for _ in range(60):
        arm.actions.publish(arm.action(0.0, way_m))
        if arm.until(there, 0.5):
            break
    else:
        raise RuntimeError(f"no right action is followed any more: {process.new_output()[-300:]}")
    arm.until(lambda: _rests(arm), 5.0)
    arm.check()


def _rests(arm: Arm) -> bool:
    return len(arm.sent) > 10 and np.ptp([_place(each) for each in arm.sent[-10:]], axis=0).max() < 1e-5


def _one_to_the_driver(arm: Arm, process: NodeProcess, send: Callable[[], None]) -> str:
    send()
    arm.spin(0.3)
    moved_m = arm.moved_m()
    arm.check()
    if moved_m > _STILL_M:
        raise Silent(f"it moved by {moved_m:.4f} m")
    _follow(arm, process)
    process.check()
    return "moved nothing"


def _wrong_actions(arm: Arm) -> Iterator[tuple[str, Callable[[], None]]]:
    def action(name: str, *values: float, **changes: Any) -> tuple[str, Callable[[], None]]:
        return f"action: {name}", lambda: arm.actions.publish(arm.action(*values, **changes))

    for number in _NUMBERS:
        yield from (action(f"{number} in column {i}", *[0.0] * i, number) for i in range(6))
    for dt in (0.0, -0.2, math.nan, math.inf, 1e-9, 1e9):
        yield action(f"action_dt {dt}", 0.0, _STEP_M, action_dt=dt)
    for field in ("reference", "action_frame", "rotation", "gripper"):
        for word in ("", "other", "x" * 10_000):
            yield action(f"{field} {word:.10}", 0.0, _STEP_M, **{field: word})
    for horizon, count in ((0, 0), (0, 7), (2, 7), (2**32 - 1, 7), (1, 0), (1, 6), (1, 8), (7, 7), (1000, 7)):
        yield action(f"horizon {horizon}, {count} values", horizon=horizon, values=[_STEP_M] * count)
    yield action("no names", names=[])
    yield action("names that nobody knows", 0.0, _STEP_M, names=["a"] * 7)
    for frame in ("", "camera_optical", "x" * 10_000):

        def framed(frame: str = frame) -> None:
            message = arm.action(0.0, _STEP_M)
            message.header.frame_id = frame
            arm.actions.publish(message)

        yield f"action: frame {frame:.20}", framed
    for offset_s in _STAMPS_S:

        def dated(offset_s: float = offset_s) -> None:
            message = arm.action(0.0, _STEP_M)
            message.header.stamp = stamp(time.time_ns() + int(offset_s * 1e9))
            arm.actions.publish(message)

        yield f"action: stamp {offset_s} s from now", dated


def _wrong_poses(arm: Arm) -> Iterator[tuple[str, Callable[[], None]]]:
    for number in _NUMBERS[:5]:
        for field in ("position", "orientation"):

            def pose(number: float = number, field: str = field) -> None:
                message = arm.pose()
                getattr(message.pose, field).x = number
                arm.poses.publish(message)

            yield f"pose: {number} in {field}", pose
    for frame in ("", "camera_optical"):

        def framed(frame: str = frame) -> None:
            message = arm.pose(1.0)
            message.header.frame_id = frame
            arm.poses.publish(message)

        yield f"pose: frame {frame}", framed


def _broken(arm: Arm, rng: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    for publisher, message in ((arm.actions, arm.action(0.0, _STEP_M)), (arm.poses, arm.pose(0.3))):
        whole = serialize_message(message)
        raws = [whole[:at] for at in range(4, len(whole), max(8, len(whole) // 12))]
        raws += [whole[:at] + b"\xff\xff\xff\x7f" + whole[at + 4 :] for at in (12, 16)]
        raws += [b"\0\1\0\0" + rng.randbytes(size) for size in (1, 40, 400)]
        for raw in raws:
            yield f"{len(raw)} bytes as {type(message).__name__}", partial(publisher.publish, raw)


def _flood(arm: Arm, process: NodeProcess, publisher: Any, make: Callable[[], Any], count: int) -> str:
    message = make()
    for number in range(count):
        publisher.publish(message)
        if number % 50 == 0:
            arm.spin(0.001)
    arm.check()
    _follow(arm, process)
    process.check()
    return "lived"


# The guard


def attack_guard(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Commands that are none, or wrong, or floods; arguments as of `attack_driver`."""
    rng = random.Random(seed)
    with _arm("guard", scratch, domain) as (arm, process):
        _pass(arm, process)
        tally = Tally(slow_s=60.0, pid=str(process.pid))
        cases = [*_wrong_commands(arm), *_wrong_poses(arm)]
        cases += [(f"bytes: {name}", send) for name, send in _broken_commands(arm, rng)]
        if limit is not None:
            cases = rng.sample(cases, min(limit, len(cases)))
        for name, send in cases:
            tally.judge(name, partial(_one_to_the_guard, arm, process, send))
        for count in (1000, 3000):
            tally.judge(f"{count} commands at once", partial(_burst, arm, process, count, rng))
    return tally


def _drive(arm: Arm) -> None:
    """A right driver, policy and hand: nothing moves, and nothing is silent."""
    arm.commands.publish(arm.pose())
    arm.grippers.publish(Float64MultiArray(data=[0.0]))
    arm.actions.publish(arm.action())
    arm.enables.publish(Bool(data=True))


def _pass(arm: Arm, process: NodeProcess) -> None:
    """It lets right commands through, once the stop is cleared.

    Raises:
        RuntimeError: it does not.
    """
    for _ in range(20):
        arm.call(Trigger, "/guard/clear_stop", Trigger.Request(), 60.0)
        if arm.until(lambda: arm.passing and len(arm.sent) > 3, 3.0):
            arm.check()
            return
    raise RuntimeError(f"nothing passes any more: {process.new_output()[-400:]}")


def _one_to_the_guard(arm: Arm, process: NodeProcess, send: Callable[[], None]) -> str:
    for _ in range(5):
        send()
        arm.spin(0.02)
    arm.spin(0.2)
    moved_m = arm.moved_m()
    arm.check()
    if moved_m > _SPEED * 0.5:
        raise Silent(f"it moved by {moved_m:.3f} m")
    stopped = not arm.passing
    _pass(arm, process)
    process.check()
    return "stopped" if stopped else "passed over or bounded"


def _wrong_commands(arm: Arm) -> Iterator[tuple[str, Callable[[], None]]]:
    for number in _NUMBERS:
        for axis in ("x", "y", "z"):

            def command(number: float = number, axis: str = axis) -> None:
                message = arm.pose()
                setattr(message.pose.position, axis, number)
                arm.commands.publish(message)

            yield f"command: {number} in {axis}", command
        yield f"gripper {number}", lambda number=number: arm.grippers.publish(Float64MultiArray(data=[number]))  # type: ignore[misc]
    for way_m in (0.05, 0.09, 0.2, 1.0):
        yield f"command {way_m} m away", lambda way_m=way_m: arm.commands.publish(arm.pose(way_m))  # type: ignore[misc]
    for quaternion in ((0.0, 0.0, 0.0, 0.0), (math.nan, 0.0, 0.0, 1.0), (2.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)):

        def turned(quaternion: tuple[float, ...] = quaternion) -> None:
            message, turn = arm.pose(), PoseStamped().pose.orientation
            turn.w, turn.x, turn.y, turn.z = quaternion
            message.pose.orientation = turn
            arm.commands.publish(message)

        yield f"command turned by {quaternion}", turned
    for offset_s in _STAMPS_S:

        def dated(offset_s: float = offset_s) -> None:
            message = arm.pose(0.05)
            message.header.stamp = stamp(time.time_ns() + int(offset_s * 1e9))
            arm.commands.publish(message)

        yield f"command: stamp {offset_s} s from now", dated
    for count in (0, 2, 10_000):
        yield (
            f"gripper of {count}",
            lambda count=count: arm.grippers.publish(Float64MultiArray(data=[0.0] * count)),  # type: ignore[misc]
        )


def _broken_commands(arm: Arm, rng: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    sizes = {
        "command": (0, 1, 7, 60, 1000),
        "gripper": (0, 1, 7, 60, 1000),
        "enable": (0, 1),
    }  # no more than it can hold
    for name, publisher in (("command", arm.commands), ("gripper", arm.grippers), ("enable", arm.enables)):
        for size in sizes[name]:
            yield f"{size} at {name}", partial(publisher.publish, b"\0\1\0\0" + rng.randbytes(size))


def _burst(arm: Arm, process: NodeProcess, count: int, rng: random.Random) -> str:
    for number in range(count):
        arm.commands.publish(arm.pose(*(rng.uniform(-0.3, 0.3) for _ in range(3))))
        if number % 50 == 0:
            arm.spin(0.001)
    arm.spin(0.3)
    arm.check()
    _pass(arm, process)
    process.check()
    return "lived"


# Two of a kind


def attack_pairs(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """A second publisher of what must have one, and a second node of a name; arguments as of `attack_driver`."""
    tally = Tally(slow_s=120.0)
    with _arm("driver", scratch, domain) as (arm, process):
        _follow(arm, process)
        tally.pid = str(process.pid)
        tally.judge("driver: two publishers of actions", partial(_second_policy, arm, process))
    with _arm("guard", scratch, domain + 1) as (arm, process):
        _pass(arm, process)
        tally.pid = str(process.pid)
        topics: list[tuple[str, type]] = [("/command/pose", PoseStamped), ("/tool_pose", PoseStamped)]
        topics += [("/action", VlaAction), ("/guard/enable", Bool), ("/guard/pose", PoseStamped)]
        topics += [("/command/gripper", Float64MultiArray)]
        for topic, kind in topics[:limit]:
            tally.judge(f"guard: another publisher of {topic}", partial(_second, arm, process, "intruder", topic, kind))
        for name in ("guard", "attacker"):
            tally.judge(f"guard: a second node /{name}", partial(_second, arm, process, name, "/other", Bool))
    return tally


def _second_policy(arm: Arm, process: NodeProcess) -> str:
    other = rclpy.create_node("intruder", enable_rosout=False)
    other.create_publisher(VlaAction, "/action", ACTION)
    said: list[str] = []
    told = arm.until(lambda: said.append(process.check()) or "2 nodes publish actions" in "".join(said), 30.0)  # type: ignore[func-returns-value]
    arm.check()
    for _ in range(5):
        arm.actions.publish(arm.action(0.0, _STEP_M))
        arm.spin(0.1)
    moved_m = arm.moved_m()
    other.destroy_node()
    if not told or moved_m > _STILL_M:
        raise Silent(f"told: {told}; it moved by {moved_m:.3f} m")
    _follow(arm, process)
    return "refused, and told"


def _second(arm: Arm, process: NodeProcess, name: str, topic: str, kind: type) -> str:
    other = rclpy.create_node(name, enable_rosout=False)
    other.create_publisher(kind, topic, ACTION)
    refused = arm.until(lambda: not arm.passing and "two_sources" in arm.gate, 30.0)
    other.destroy_node()
    if not refused:
        raise Silent(f"passing: {arm.passing}; it says {arm.gate}")
    _pass(arm, process)
    return "refused, and told"


# The simulated robot


def attack_sim_robot(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Wrong actions and broken bytes to the arm that obeys a policy; arguments as of `attack_driver`."""
    rng = random.Random(seed)
    with attacker(domain) as user:
        parameters = {"episodes": 0, "policy_lost_after_s": 3600.0}
        process = NodeProcess("sim_robot", scratch / "sim_robot.log", parameters)
        with running(process):
            images: list[Image] = []
            user.node.create_subscription(Image, "/camera/image_raw", images.append, 1)
            arm = Arm(user, "/nothing")
            arm.actions = user.node.create_publisher(VlaAction, "/policy/action", ACTION)
            if not user.until(lambda: images, 120.0):
                raise RuntimeError(f"the simulated robot sends no images: {process.new_output()[-300:]}")
            tally = Tally(pid=str(process.pid))
            cases = [*_wrong_actions(arm), *_broken(arm, rng)]
            if limit is not None:
                cases = rng.sample(cases, min(limit, len(cases)))
            for name, send in cases:
                tally.judge(name, partial(_one_to_the_simulation, user, process, images, send))
    return tally


def _one_to_the_simulation(user: Attacker, process: NodeProcess, images: list[Image], send: Callable[[], None]) -> str:
    send()
    images.clear()
    if not user.until(lambda: len(images) > 1, 15.0):
        raise RuntimeError(f"it sends no images any more: {process.new_output()[-300:]}")
    process.check()
    return "goes on"
