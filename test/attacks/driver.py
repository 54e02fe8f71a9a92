# SPDX-License-Identifier: Apache-2.0
"""Driver and simulated robot under hostile actions, poses and floods, over real DDS.

A case is right where what is wrong moves nothing, what goes out stays within the limits throughout, and the next right
message is followed.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attacks.arm import NUMBERS, STAMPS_S, STEP_M, Arm, arm_beside, wrong_poses
from attacks.joint_arm import JointArm
from attacks.process import Attacker, NodeProcess, attacker, running, stamp
from attacks.tally import Silent, Tally
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image

from specvla_ros.msg import VlaAction
from specvla_ros.ros.qos import ACTION


def attack_driver(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Actions and poses that are none, or wrong, or floods.

    Args:
        scratch: directory for files.
        domain: of DDS.
        limit: number of cases, drawn at random; None: all.
        seed: of the drawing.
    """
    rng = random.Random(seed)
    with arm_beside("driver", scratch, domain) as (arm, process):
        follow(arm, process)
        tally = Tally(pid=str(process.pid))
        cases = [*wrong_actions(arm), *wrong_poses(arm), *broken(_right(arm), rng)]
        if limit is not None:
            cases = rng.sample(cases, min(limit, len(cases)))
        for name, send in cases:
            tally.judge(name, partial(one_to_the_driver, arm, process, send))
        for count in (1000, 3000):
            tally.judge(f"{count} actions at once", partial(flood, arm, process, arm.actions, arm.action, count))
            tally.judge(f"{count} poses at once", partial(flood, arm, process, arm.poses, arm.pose, count))
    return tally


def follow(arm: Arm | JointArm, process: NodeProcess) -> None:
    """A right action moves the arm.

    Raises:
        RuntimeError: it does not.
    """
    arm.check()
    act, followed = arm.next_move()
    for _ in range(60):
        act()
        if arm.until(followed, 0.5):
            break
    else:
        raise RuntimeError(f"no right action is followed any more: {process.new_output()[-300:]}")
    arm.until(arm.rests, 5.0)
    arm.check()


def one_to_the_driver(arm: Arm | JointArm, process: NodeProcess, send: Callable[[], None]) -> str:
    """Sends something wrong to a robot at rest, which must stay, and then follow a right action."""
    send()
    arm.spin(0.3)
    moved = arm.moved()
    arm.check()
    if moved > arm.still:
        raise Silent(f"it moved by {moved:.4f} {arm.unit}")
    follow(arm, process)
    process.check()
    return "moved nothing"


def wrong_actions(arm: Arm | JointArm) -> Iterator[tuple[str, Callable[[], None]]]:
    """Actions of the tool that are none, too large, of another convention, too old or from the future, by name."""

    def action(name: str, *values: float, **changes: Any) -> tuple[str, Callable[[], None]]:
        return f"action: {name}", lambda: arm.actions.publish(arm.action(*values, **changes))

    for number in NUMBERS:
        yield from (action(f"{number} in column {i}", *[0.0] * i, number) for i in range(6))
    for dt in (0.0, -0.2, math.nan, math.inf, 1e-9, 1e9):
        yield action(f"action_dt {dt}", 0.0, STEP_M, action_dt=dt)
    for field in ("reference", "action_frame", "rotation", "gripper"):
        for word in ("", "other", "x" * 10_000):
            yield action(f"{field} {word:.10}", 0.0, STEP_M, **{field: word})
    for horizon, count in ((0, 0), (0, 7), (2, 7), (2**32 - 1, 7), (1, 0), (1, 6), (1, 8), (7, 7), (1000, 7)):
        yield action(f"horizon {horizon}, {count} values", horizon=horizon, values=[STEP_M] * count)
    yield action("no names", names=[])
    yield action("names that nobody knows", 0.0, STEP_M, names=["a"] * 7)
    for frame in ("", "camera_optical", "x" * 10_000):

        def framed(frame: str = frame) -> None:
            message = arm.action(0.0, STEP_M)
            message.header.frame_id = frame
            arm.actions.publish(message)

        yield f"action: frame {frame:.20}", framed
    for offset_s in STAMPS_S:

        def dated(offset_s: float = offset_s) -> None:
            message = arm.action(0.0, STEP_M)
            message.header.stamp = stamp(time.time_ns() + int(offset_s * 1e9))
            arm.actions.publish(message)

        yield f"action: stamp {offset_s} s from now", dated


def broken(publishers: Sequence[tuple[Any, Any]], rng: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    """Parts of messages, wrong lengths in them, and random bytes; `publishers`: each with a right message."""
    for publisher, message in publishers:
        whole = serialize_message(message)
        raws = [whole[:at] for at in range(4, len(whole), max(8, len(whole) // 12))]
        raws += [whole[:at] + b"\xff\xff\xff\x7f" + whole[at + 4 :] for at in (12, 16)]
        raws += [b"\0\1\0\0" + rng.randbytes(size) for size in (1, 40, 400)]
        for raw in raws:
            yield f"{len(raw)} bytes as {type(message).__name__}", partial(publisher.publish, raw)


def _right(arm: Arm) -> tuple[tuple[Any, Any], ...]:
    return (arm.actions, arm.action(0.0, STEP_M)), (arm.poses, arm.pose(0.3))


def flood(arm: Arm | JointArm, process: NodeProcess, publisher: Any, make: Callable[[], Any], count: int) -> str:
    """Sends a right message so many times without a pause."""
    message = make()
    for number in range(count):
        publisher.publish(message)
        if number % 50 == 0:
            arm.spin(0.001)
    arm.check()
    follow(arm, process)
    process.check()
    return "lived"


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
            cases = [*wrong_actions(arm), *broken(_right(arm), rng)]
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
