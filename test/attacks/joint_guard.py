# SPDX-License-Identifier: Apache-2.0
"""The guard of joint commands under hostile ones and floods, by each joint output, over real DDS.

A case is right where what goes out stays within the joints' limits throughout, and right commands pass again once the
stop is cleared.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attacks.arm import NUMBERS
from attacks.guard import burst, let_through, one_to_the_guard
from attacks.joint_arm import AHEAD_S, HOME, JOINTS, JointArm, joint_arm_beside, seconds
from attacks.tally import Tally
from rclpy.publisher import Publisher
from std_msgs.msg import Bool, Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from specvla_ros.control.guard.settings import JOINT_OUTPUTS


def attack_joint_guard(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Joint commands that are none, or wrong, or floods; arguments as of `attack_driver`, `limit` for each output."""
    tally, rng = Tally(slow_s=60.0), random.Random(seed)
    for number, output in enumerate(JOINT_OUTPUTS):
        with joint_arm_beside("guard", scratch, domain + number, output) as (arm, process):
            enables, tally.pid = arm.node.create_publisher(Bool, "/guard/enable", 1), str(process.pid)
            arm.driving = partial(_drive, arm, enables)
            let_through(arm, process)
            cases = [*_wrong_commands(arm), *_broken(arm, rng)]
            if limit is not None:
                cases = rng.sample(cases, min(limit, len(cases)))
            for name, send in cases:
                tally.judge(f"{output}: {name}", partial(one_to_the_guard, arm, process, send))
            tally.judge(f"{output}: 1000 commands at once", partial(burst, arm, process, 1000, rng))
    return tally


def _drive(arm: JointArm, enables: Publisher) -> None:
    """A right driver, policy and hand: nothing moves, and nothing is silent."""
    arm.actions.publish(arm.action())
    enables.publish(Bool(data=True))
    arm.commands.publish(arm.command())


def _wrong_commands(arm: JointArm) -> Iterator[tuple[str, Callable[[], None]]]:
    def command(name: str, make: Callable[[], Any]) -> tuple[str, Callable[[], None]]:
        return name, lambda: arm.commands.publish(make())

    for number in NUMBERS:
        for joint in range(len(HOME)):
            way = np.where(np.arange(len(HOME)) == joint, number, 0.0)
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
    names = list(JOINTS)
    for wrong in ([], names[:6], [*names[:6], names[0]], ["a"] * 7, [*names, "finger"], ["x" * 10_000] * 7):
        yield command(f"names {wrong!s:.40}", partial(arm.command, joint_names=wrong))
    for times_s in ([-1.0], [0.2, 0.1], [0.1, 0.1], [1e6], [0.1, 1e6]):
        yield command(f"points at {times_s}", partial(_points, arm, times_s))
    for count in (1, 6, 8):
        point = JointTrajectoryPoint(positions=HOME.tolist(), velocities=[0.1] * count)
        yield command(f"{count} velocities", partial(arm.command, points=[point]))
    fast = JointTrajectoryPoint(positions=HOME.tolist(), velocities=[100.0] * 7, time_from_start=seconds(AHEAD_S))
    yield command("an end in full motion", partial(arm.command, points=[fast]))


def _points(arm: JointArm, times_s: list[float]) -> JointTrajectory:
    here = arm.joints.tolist()
    points = [JointTrajectoryPoint(positions=here, time_from_start=seconds(each)) for each in times_s]
    return arm.command(points=points)


def _broken(arm: JointArm, rng: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    for size in (0, 1, 7, 60, 1000):
        yield f"{size} bytes", partial(arm.commands.publish, b"\0\1\0\0" + rng.randbytes(size))
