# SPDX-License-Identifier: Apache-2.0
"""The guard under hostile commands and floods, and second publishers of what must have one, over real DDS.

A case is right where what goes out stays within the limits throughout, and right commands pass again once the stop is
cleared.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import rclpy
from attacks.arm import NUMBERS, STAMPS_S, STEP_M, Arm, arm_beside, wrong_poses
from attacks.driver import follow
from attacks.joint_arm import JointArm
from attacks.process import NodeProcess, stamp
from attacks.tally import Silent, Tally
from geometry_msgs.msg import PoseStamped
from std_msgs.msg import Bool, Float64MultiArray
from std_srvs.srv import Trigger

from specvla_ros.msg import VlaAction
from specvla_ros.ros.qos import ACTION


def attack_guard(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Commands that are none, or wrong, or floods; arguments as of `attack_driver`."""
    rng = random.Random(seed)
    with arm_beside("guard", scratch, domain) as (arm, process):
        let_through(arm, process)
        tally = Tally(slow_s=60.0, pid=str(process.pid))
        cases = [*_wrong_commands(arm), *wrong_poses(arm)]
        cases += [(f"bytes: {name}", send) for name, send in _broken_commands(arm, rng)]
        if limit is not None:
            cases = rng.sample(cases, min(limit, len(cases)))
        for name, send in cases:
            tally.judge(name, partial(one_to_the_guard, arm, process, send))
        for count in (1000, 3000):
            tally.judge(f"{count} commands at once", partial(burst, arm, process, count, rng))
    return tally


def let_through(arm: Arm | JointArm, process: NodeProcess) -> None:
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


def one_to_the_guard(arm: Arm | JointArm, process: NodeProcess, send: Callable[[], None]) -> str:
    """Sends a command among right ones; returns what became of it."""
    for _ in range(5):
        send()
        arm.spin(0.02)
    arm.spin(0.2)
    moved = arm.moved()
    arm.check()
    if moved > arm.far:
        raise Silent(f"it moved by {moved:.3f} {arm.unit}")
    stopped = not arm.passing
    let_through(arm, process)
    process.check()
    return "stopped" if stopped else "passed over or bounded"


def _wrong_commands(arm: Arm) -> Iterator[tuple[str, Callable[[], None]]]:
    for number in NUMBERS:
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
    for offset_s in STAMPS_S:

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


def burst(arm: Arm | JointArm, process: NodeProcess, count: int, rng: random.Random) -> str:
    """Sends random commands without a pause."""
    for number in range(count):
        arm.commands.publish(arm.random_command(rng))
        if number % 50 == 0:
            arm.spin(0.001)
    arm.spin(0.3)
    arm.check()
    let_through(arm, process)
    process.check()
    return "lived"


def attack_pairs(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """A second publisher of what must have one, and a second node of a name; arguments as of `attack_driver`."""
    tally = Tally(slow_s=120.0)
    with arm_beside("driver", scratch, domain) as (arm, process):
        follow(arm, process)
        tally.pid = str(process.pid)
        tally.judge("driver: two publishers of actions", partial(_second_policy, arm, process))
    with arm_beside("guard", scratch, domain + 1) as (arm, process):
        let_through(arm, process)
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
        arm.actions.publish(arm.action(0.0, STEP_M))
        arm.spin(0.1)
    moved = arm.moved()
    other.destroy_node()
    if not told or moved > arm.still:
        raise Silent(f"told: {told}; it moved by {moved:.3f} m")
    follow(arm, process)
    return "refused, and told"


def _second(arm: Arm, process: NodeProcess, name: str, topic: str, kind: type) -> str:
    other = rclpy.create_node(name, enable_rosout=False)
    other.create_publisher(kind, topic, ACTION)
    refused = arm.until(lambda: not arm.passing and "two_sources" in arm.gate, 30.0)
    other.destroy_node()
    if not refused:
        raise Silent(f"passing: {arm.passing}; it says {arm.gate}")
    let_through(arm, process)
    return "refused, and told"
