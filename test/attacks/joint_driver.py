# SPDX-License-Identifier: Apache-2.0
"""The driver of joints under hostile actions, chunks, joint states and floods, by each joint output, over real DDS.

A case is right where the arm ends where the right chunk leads, in which the wrong one came, where what goes out stays
within the limits throughout, and where nothing moves after the stop time.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attacks.arm import NUMBERS, POSE_TIMEOUT_S, STAMPS_S, STEP_M
from attacks.driver import broken, flood, follow, one_to_the_driver, wrong_actions
from attacks.joint_arm import CHUNK_DT_S, HOME, JOINTS, STEP_RAD, JointArm, joint_arm_beside
from attacks.process import NodeProcess, stamp
from attacks.tally import Silent, Tally
from std_srvs.srv import SetBool
from support.ros_domain import OWN_DOMAINS

from specvla_ros.control.guard.settings import JOINT_OUTPUTS
from specvla_ros.msg import VlaAction

_Cases = Iterator[tuple[str, Callable[[], None]]]
_ROWS = 4
_FAR = 1.6  # rad, more than max_step_rad
_RIGHT = tuple(f"action: -0.5 in column {axis}" for axis in (3, 4, 5))  # rad: a turn that the driver may follow
_STOPS_S = 1.0  # with these limits a stop takes less than 0.3 s


def attack_joint_driver(
    scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0, outputs: Sequence[str] = JOINT_OUTPUTS
) -> Tally:
    """Actions of joints, and of the tool, to the driver of joints; arguments as of `attack_driver`.

    `limit` is for each output and each kind of action.
    """
    tally, rng = Tally(slow_s=60.0), random.Random(seed)
    runs = [(output, of_joints) for output in outputs for of_joints in (True, False)]
    for number, (output, of_joints) in enumerate(runs):
        with joint_arm_beside("driver", scratch, domain + number % OWN_DOMAINS, output, of_joints=of_joints) as (
            arm,
            process,
        ):
            follow(arm, process)
            tally.pid = str(process.pid)
            for name, attack in _attacks(arm, process, rng, limit):
                tally.judge(f"{output}, actions of {'joints' if of_joints else 'the tool'}: {name}", attack)
    return tally


def _attacks(
    arm: JointArm, process: NodeProcess, rng: random.Random, limit: int | None
) -> Iterator[tuple[str, Callable[[], str]]]:
    right = partial(arm.chunk, STEP_RAD) if arm.of_joints else partial(arm.action, 0.0, STEP_M)
    actions = _wrong_chunks(arm) if arm.of_joints else wrong_actions(arm)
    cases = [*(case for case in actions if case[0] not in _RIGHT), *_wrong_states(arm)]
    cases += broken(((arm.actions, right()), (arm.states, arm.joint_state())), rng)
    attack = _one_in_motion if arm.of_joints else one_to_the_driver
    for name, send in cases if limit is None else rng.sample(cases, min(limit, len(cases))):
        yield name, partial(attack, arm, process, send)
    yield "1000 actions at once", partial(flood, arm, process, arm.actions, right, 1000)
    yield "1000 random actions at once", partial(_burst, arm, process, rng)
    yield "a hold while actions arrive", partial(_hold, arm, process)
    yield "no joint states while actions arrive", partial(_silence, arm, process)


def _one_in_motion(arm: JointArm, process: NodeProcess, send: Callable[[], None]) -> str:
    """Sends something wrong while a right chunk is followed, which the arm must follow all the same.

    On a busy machine the driver may come to rest on the way, as after a stall.
    """
    _set_in_motion(arm)
    send()
    arm.until(arm.rests, 5.0)
    arm.check()
    left = arm.goal - arm.joints
    on_the_way = np.abs(left[1:]).max() < arm.still and -arm.still < left[0] * arm.side < STEP_RAD + arm.still
    if not on_the_way:
        raise Silent(f"it rests {np.abs(left).max():.3f} rad from where the right chunk led, and not on its way there")
    process.check()
    return "moved nothing" if abs(left[0]) < arm.still else "rests on the right way"


def _wrong_chunks(arm: JointArm) -> _Cases:
    def chunk(name: str, way: Any = STEP_RAD, **changes: Any) -> tuple[str, Callable[[], None]]:
        return f"chunk: {name}", lambda: arm.actions.publish(arm.chunk(way, **changes))

    def values(name: str, change: Callable[[np.ndarray], Any], **changes: Any) -> tuple[str, Callable[[], None]]:
        def send() -> None:
            message = arm.chunk(STEP_RAD, **changes)
            rows = np.array(message.values).reshape(_ROWS, -1)
            message.values = np.ravel(change(rows)).tolist()
            arm.actions.publish(message)

        return f"chunk: {name}", send

    for number in (each for each in NUMBERS if not abs(each) < _FAR):
        for row, joint in ((0, 0), (_ROWS - 1, 3), (1, len(HOME) - 1)):
            yield values(f"{number} in row {row} of joint {joint}", partial(_put, row, joint, number))
    yield values("NaN for the gripper", partial(_put, 1, len(HOME), math.nan))
    for row in range(_ROWS):
        yield values(f"row {row} jumps", partial(_jump, row))
    yield values("degrees for radians", np.degrees)
    yield values("the motors' range in percent", lambda rows: 100 * rows / np.pi)
    yield values("the order of the joints turned round", lambda rows: rows[:, ::-1])
    yield values("twice the rows that it tells", lambda rows: np.vstack([rows, rows]))
    yield chunk("far away", _FAR * _ROWS)
    yield from _wrong_names(chunk)
    for dt in (0.0, -CHUNK_DT_S, math.nan, math.inf, 1e-9, 1e9, 2 * CHUNK_DT_S, 0.5 * CHUNK_DT_S):
        yield chunk(f"action_dt {dt}", action_dt=dt)
    for field, words in (
        ("reference", ("delta", "")),
        ("action_frame", ("base", "tool", "")),
        ("rotation", ("rpy", "x")),
    ):
        yield from (chunk(f"{field} '{word}'", **{field: word}) for word in words)
    for horizon in (0, 1, 3, 5, 2**32 - 1):
        yield chunk(f"horizon {horizon}", horizon=horizon)
    yield chunk("no values", values=[])
    yield chunk("10 000 rows", values=[0.0] * 10_000 * (len(HOME) + 1), horizon=10_000)
    yield "an action of the tool", lambda: arm.actions.publish(arm.action(0.0, STEP_M))
    yield from _wrong_stamps(arm)


def _jump(row: int, rows: np.ndarray) -> np.ndarray:
    return rows + _FAR * (np.arange(_ROWS) == row)[:, None]


def _put(row: int, column: int, number: float, rows: np.ndarray) -> np.ndarray:
    rows[row, column] = number
    return rows


def _wrong_names(chunk: Callable[..., tuple[str, Callable[[], None]]]) -> _Cases:
    names, ur5e = [*JOINTS, "gripper"], ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
    wrong = {
        "no names": [],
        "a name twice": [names[0], names[0], *names[2:]],
        "a name less": names[1:],
        "another robot's names": [*(f"{name}_joint" for name in ur5e), "flange", "gripper"],
        "names of the tool's axes": ["x", "y", "z", "roll", "pitch", "yaw", "gripper", "dim_7"],
        "names of a left arm": [f"left_{name}" for name in names],
        "two grippers": [*JOINTS[:-1], "gripper", "left_gripper"],
        "long names": ["x" * 10_000] * len(names),
        "names of other values": names[::-1],
    }
    return (chunk(name, names=words) for name, words in wrong.items())


def _wrong_stamps(arm: JointArm) -> _Cases:
    """Another way, of an image that is too old, from the future, or not newer than that of the last chunk."""

    def dated(since_last_s: float, **changes: Any) -> None:
        send(arm.newest_ns + int(since_last_s * 1e9), **changes)

    def send(stamp_ns: int, **changes: Any) -> None:
        message = arm.chunk(-STEP_RAD, **changes)
        message.header.stamp = stamp(stamp_ns)
        arm.actions.publish(message)

    for offset_s in STAMPS_S:
        words = f"chunk: stamp {offset_s} s from now"
        yield words, lambda offset_s=offset_s: send(time.time_ns() + int(offset_s * 1e9))  # type: ignore[misc]
    for since_last_s in (0.0, -0.01, -0.2):
        yield f"chunk: stamp {since_last_s} s after the last one's", partial(dated, since_last_s)
    yield "chunk: the last one's stamp, partial", partial(dated, 0.0, partial=True)


def _wrong_states(arm: JointArm) -> _Cases:
    """Joint states that are none, or of another arm, unit or time, among right ones."""
    here = arm.joints
    changes: dict[str, dict[str, Any]] = {
        **{f"{number} at a joint": {"position": [number, *here[1:]]} for number in NUMBERS[:6]},
        "degrees": {"position": np.degrees(here).tolist()},
        "no positions": {"position": []},
        "a position less": {"position": here[1:].tolist()},
        "no names": {"name": []},
        "a name twice": {"name": [JOINTS[1], *JOINTS[1:]]},
        "another robot's names": {"name": [f"other_{name}" for name in JOINTS]},
    }
    for name, changed in changes.items():
        yield f"joint states: {name}", lambda changed=changed: arm.states.publish(arm.joint_state(**changed))  # type: ignore[misc]
    for offset_s in STAMPS_S:

        def dated(offset_s: float = offset_s) -> None:
            message = arm.joint_state()
            message.header.stamp = stamp(time.time_ns() + int(offset_s * 1e9))
            arm.states.publish(message)

        yield f"joint states: stamp {offset_s} s from now", dated


def _burst(arm: JointArm, process: NodeProcess, rng: random.Random) -> str:
    """Random actions without a pause, then a right one."""
    for number in range(1000):
        way = [rng.uniform(-0.2, 0.2) for _ in range(6)]
        arm.actions.publish(_random_chunk(arm, rng) if arm.of_joints else arm.action(*way))
        if number % 50 == 0:
            arm.spin(0.001)
    arm.until(arm.rests, 20.0)
    arm.check()
    if arm.of_joints:
        arm.actions.publish(arm.chunk(HOME - arm.joints))
        arm.until(lambda: np.abs(HOME - arm.joints).max() < arm.still, 20.0)
    follow(arm, process)
    process.check()
    return "lived"


def _random_chunk(arm: JointArm, rng: random.Random) -> VlaAction:
    """Up to a radian away in each row but the last, which is near where it began."""
    message = arm.chunk(HOME - arm.joints)
    rows = np.array(message.values).reshape(_ROWS, -1)
    rows[:-1] += [[rng.uniform(-1.0, 1.0) for _ in row] for row in rows[:-1]]
    message.values = rows.ravel().tolist()
    return message


def _hold(arm: JointArm, process: NodeProcess) -> str:
    arm.call(SetBool, "/driver/hold", SetBool.Request(data=False))  # finds the service, before it matters
    _set_in_motion(arm)
    arm.call(SetBool, "/driver/hold", SetBool.Request(data=True))
    _stands(arm)
    arm.call(SetBool, "/driver/hold", SetBool.Request(data=False))
    follow(arm, process)
    process.check()
    return "stood"


def _silence(arm: JointArm, process: NodeProcess) -> str:
    _set_in_motion(arm)
    arm.measured = False
    _act_for(arm, POSE_TIMEOUT_S)
    _stands(arm)
    arm.measured = True
    follow(arm, process)
    process.check()
    return "stood"


def _set_in_motion(arm: JointArm) -> None:
    act, followed = arm.next_move()
    for _ in range(60):
        act()
        if arm.until(followed, 0.5):
            return
    raise RuntimeError("no right action is followed any more")


def _act_for(arm: JointArm, time_s: float) -> None:
    """Right actions, as many as there may be."""
    end_s = time.monotonic() + time_s
    while time.monotonic() < end_s:
        arm.next_move()[0]()
        arm.spin(0.05)


def _stands(arm: JointArm) -> None:
    """Nothing moves after the stop time, whatever the driver is told."""
    _act_for(arm, _STOPS_S)
    arm.check()
    _act_for(arm, _STOPS_S)
    moved = arm.moved()
    arm.check()
    if moved > arm.still:
        raise Silent(f"after the stop time it moved by {moved:.3f} rad")
