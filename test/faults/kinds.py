# SPDX-License-Identifier: Apache-2.0
"""The faults: what each does to a scene, for how long, and when the guard, or the arm's interface, must know of it."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
from support.fault_scene import DRIVER_GRAPH_S, GRAPH_S, IMAGE_DELAY_S, ActionMessage, Frame, Scene

from specvla_ros.control.guard.commands import JointCommand, JointVelocities, Stamp, ToolPose, TwistCommand
from specvla_ros.control.guard.settings import Output
from specvla_ros.lab.simulation.controllers import COMMAND_TIMEOUT_S
from specvla_ros.lab.simulation.tasks import TASKS

_MESSAGE_S = 0.02  # a message on its way, and a tick of who gets it
_RESPAWN_S = (2.0, 2.0)  # who was killed is started again, as a launch file does
_WHILE_S = (0.05, 1.5)
_FLOOD_S = 0.005
_LEAP_M, _LEAP_RAD = 0.3, 0.6

Act = Callable[[Scene], None]
Notice = Callable[[Scene, float, float], float]


@dataclass(frozen=True)
class Fault:
    """One kind.

    Args:
        name: as `kill driver`.
        begin: does it.
        end: undoes it.
        lasts_s: shortest and longest time between the two.
        noticed: from the scene, and when the fault began and ended: steady time from which the promised stop counts;
            None: it need not end motion, only stay within limits.
        needs_guard: whether without a guard there is nothing that it could be done to.
        of_joints: whether it is about joint outputs alone.
        deaf: whether the arm hears nothing meanwhile: what the guard promises, it can keep from the end on.
    """

    name: str
    begin: Act
    end: Act
    lasts_s: tuple[float, float] = _WHILE_S
    noticed: Notice | None = None
    needs_guard: bool = False
    of_joints: bool = False
    deaf: bool = False


def silent_for(topic: str, timeout: Callable[[Scene], float]) -> Notice:
    """A timeout after the last message on a topic that came before the fault was over."""
    return lambda scene, began_s, ended_s: scene.time.last_heard_s(topic, ended_s) + timeout(scene)


def at_once(scene: Scene, began_s: float, ended_s: float) -> float:
    """With the next message, or tick."""
    return began_s + _MESSAGE_S


def _alone_s(scene: Scene) -> float:
    """How long an arm goes on without the guard: Servo's timeout, to the end of a chunk, or for ever by velocities."""
    if scene.settings.kind is Output.VELOCITY_ARRAY:
        return math.inf
    chunks = scene.settings.kind is Output.JOINT_TRAJECTORY_CHUNK
    return scene.settings.joints.chunk_s if chunks else COMMAND_TIMEOUT_S


# How long the guard waits for whom, by its own settings; for the guard itself the arm's interface waits (Servo: 0.1 s).
_NOTICED = {
    "policy": silent_for("action", lambda scene: scene.settings.action_timeout_s),
    "camera": silent_for("action", lambda scene: scene.settings.action_timeout_s),
    "driver": silent_for("command", lambda scene: scene.settings.command_timeout_s),
    "robot_driver": silent_for("tool_pose", lambda scene: scene.settings.state_timeout_s),
    "operator": silent_for("enable", lambda scene: scene.settings.enable_timeout_s),
    "guard": silent_for("guard/command", _alone_s),
}
_WHO_SENDS = {
    "action": "policy",
    "image": "camera",
    "command": "driver",
    "tool_pose": "robot_driver",
    "enable": "operator",
    "guard/command": "guard",
}
_GUARD_ONLY = ("guard", "operator")


def _processes() -> list[Fault]:
    found = []
    for who, noticed in _NOTICED.items():
        only = who in _GUARD_ONLY
        found.append(
            Fault(
                f"kill {who}",
                partial(_to_process, "kill", who),
                partial(_to_process, "start", who),
                _RESPAWN_S,
                noticed,
                needs_guard=only,
            )
        )
        found.append(
            Fault(
                f"freeze {who}",
                partial(_to_process, "freeze", who),
                partial(_to_process, "resume", who),
                noticed=noticed,
                needs_guard=only,
            )
        )
    return found


def _to_process(what: str, who: str, scene: Scene) -> None:
    getattr(scene.time, what)(who)


def _lose(topic: str, scene: Scene) -> None:
    scene.time.silent.add(topic)


def _find(topic: str, scene: Scene) -> None:
    scene.time.silent.discard(topic)


def _lateness() -> list[Fault]:
    """Who runs late and goes on: a page fault, a collection of garbage; and a machine with more load than cores."""
    busy: set[int] = set()

    def hold(scene: Scene, who: str) -> None:
        if id(scene) not in busy:
            return
        time, until_s = scene.time, scene.time.clocks.steady_s + scene.time.random.uniform(0.005, 0.08)
        time.freeze(who)
        time.at(until_s, partial(time.resume, who))
        time.at(until_s + time.random.uniform(0.01, 0.1), partial(hold, scene, who))

    def begin(scene: Scene) -> None:
        busy.add(id(scene))
        for who in ("driver", "guard"):
            hold(scene, who)

    late = [
        Fault(
            f"late {who}",
            partial(_to_process, "freeze", who),
            partial(_to_process, "resume", who),
            (0.01, 0.099),
            needs_guard=True,
        )
        for who in ("guard", "driver")
    ]
    return [*late, Fault("busy machine", begin, lambda scene: busy.discard(id(scene)), needs_guard=True)]


def _silences() -> list[Fault]:
    topics: dict[str, Notice | None] = {topic: _NOTICED[who] for topic, who in _WHO_SENDS.items()}
    topics["joint_states"] = silent_for("joint_states", lambda scene: scene.settings.state_timeout_s)
    topics["guard/state"] = None
    return [
        Fault(
            f"lose {topic}",
            partial(_lose, topic),
            partial(_find, topic),
            noticed=noticed,
            needs_guard=topic.startswith("guard") or topic == "enable",
            of_joints=topic == "joint_states",
            deaf=topic == "guard/command",
        )
        for topic, noticed in topics.items()
    ]


def _clocks() -> list[Fault]:
    def change(name: str, noticed: Notice | None, lasts_s: tuple[float, float] = _WHILE_S, **how: float) -> Fault:
        return Fault(
            f"clock {name}",
            lambda scene: scene.time.clocks.change(**how),
            lambda scene: scene.time.clocks.change(),
            lasts_s,
            noticed,
        )

    def still(scene: Scene, began_s: float, ended_s: float) -> float:
        return began_s + scene.settings.clock_timeout_s + _MESSAGE_S

    return [
        change("still", still, rate=0.0),
        change("ahead 5 s", at_once, jump_s=5.0),
        change("back 5 s", at_once, jump_s=-5.0),
        change("slow", None, rate=0.3),
        change("fast", None, rate=3.0),
    ]


def _frames() -> list[Fault]:
    def change(name: str, frames: Callable[[Random], Callable[[Frame], list[Frame]]]) -> Fault:
        def begin(scene: Scene) -> None:
            scene.frame = frames(scene.time.random)

        def end(scene: Scene) -> None:
            scene.frame = lambda frame: [frame]

        return Fault(f"frames {name}", begin, end, (1.0, 2.0))

    def late(random: Random) -> Callable[[Frame], list[Frame]]:
        kept: list[Frame] = []

        def frames(frame: Frame) -> list[Frame]:
            kept.append(frame)
            return [kept.pop(0)] if len(kept) > 12 else []

        return frames

    def shuffled(random: Random) -> Callable[[Frame], list[Frame]]:
        kept: list[Frame] = []

        def frames(frame: Frame) -> list[Frame]:
            kept.append(frame)
            return [kept.pop(random.randrange(len(kept)))] if len(kept) > 6 else []

        return frames

    def lying(random: Random) -> Callable[[Frame], list[Frame]]:
        return lambda frame: [replace(frame, stamp_ns=frame.stamp_ns + round(random.uniform(-2, 2) * 1e9))]

    return [
        change("late", late),
        change("doubled", lambda random: lambda frame: [frame, frame]),
        change("out of order", shuffled),
        change("with lying stamps", lying),
    ]


def _numbers() -> list[Fault]:
    def policy(name: str, values: Callable[[np.ndarray, Random], np.ndarray]) -> Fault:
        def begin(scene: Scene) -> None:
            scene.values = lambda right: values(right, scene.time.random)

        def end(scene: Scene) -> None:
            scene.values = lambda right: right

        return Fault(f"actions {name}", begin, end, (1.0, 2.0))

    def any_direction(random: Random, length: float) -> np.ndarray:
        way = np.array([random.gauss(0, 1) for _ in range(3)])
        return way * (length / max(float(np.linalg.norm(way)), 1e-9))

    def leap(right: np.ndarray, random: Random) -> np.ndarray:
        return np.concatenate([any_direction(random, 0.29), any_direction(random, 1.4), [random.random()]])

    return [
        policy("of NaN", lambda right, random: np.where(random.random() < 0.5, np.nan, right)),
        policy("of infinity", lambda right, random: right * np.inf),
        policy("too large", lambda right, random: right * 1e6),
        policy("that leap", leap),
    ]


def _poses() -> list[Fault]:
    def pose(name: str, make: Callable[[Random], Callable[[ToolPose], ToolPose]], noticed: Notice | None) -> Fault:
        def begin(scene: Scene) -> None:
            scene.pose = make(scene.time.random)

        def end(scene: Scene) -> None:
            scene.pose = lambda right: right

        return Fault(f"tool pose {name}", begin, end, noticed=noticed)

    def still(random: Random) -> Callable[[ToolPose], ToolPose]:
        kept: list[ToolPose] = []

        def poses(right: ToolPose) -> ToolPose:
            kept.append(right)
            return kept[0]

        return poses

    def elsewhere(random: Random) -> Callable[[ToolPose], ToolPose]:
        away = np.array([random.choice([-1, 1]) * random.uniform(0.05, 0.2) for _ in range(3)])
        return lambda right: replace(right, position=right.position + away)

    def nan(random: Random) -> Callable[[ToolPose], ToolPose]:
        return lambda right: replace(right, position=right.position * np.nan)

    def frozen(scene: Scene, began_s: float, ended_s: float) -> float:
        return began_s + scene.settings.state_timeout_s + _MESSAGE_S

    return [pose("of NaN", nan, at_once), pose("still", still, frozen), pose("jumps", elsewhere, at_once)]


def _commands() -> list[Fault]:
    """A driver that has gone mad."""

    def command(name: str, change: Callable[[Any, float], Any], noticed: Notice | None) -> Fault:
        def begin(scene: Scene) -> None:
            began_s = scene.time.clocks.steady_s
            scene.command = lambda right: change(right, scene.time.clocks.steady_s - began_s)

        def end(scene: Scene) -> None:
            scene.command = lambda right: right

        return Fault(f"commands {name}", begin, end, (0.3, 1.0), noticed)

    return [
        command("of NaN", lambda right, _: _moved(right, np.nan), at_once),
        command("that leap", lambda right, _: _moved(right, 1.0), at_once),
        command("that run away", lambda right, passed_s: _moved(right, 2.0 * passed_s / _LEAP_M), None),
    ]


def _moved(right: Any, share: float) -> Any:
    """A command somewhere else: by a share of 0.3 m, 0.6 rad, or as much per tenth of a second."""
    if isinstance(right, ToolPose):
        return replace(right, position=right.position + share * _LEAP_M)
    if isinstance(right, TwistCommand):
        return replace(right, velocity=right.velocity + share * 10 * _LEAP_M)
    if isinstance(right, JointVelocities):
        return replace(right, velocities=right.velocities + share * 10 * _LEAP_RAD)
    assert isinstance(right, JointCommand)
    return replace(right, positions=right.positions + share * _LEAP_RAD)


def _people() -> list[Fault]:
    def flood(scene: Scene) -> None:
        until_s = scene.time.clocks.steady_s + 1.0

        def ask() -> None:
            scene.task = scene.time.random.choice(TASKS)
            scene.time.publish("instruction", scene.task.instruction, "somebody")
            if scene.time.clocks.steady_s < until_s:
                scene.time.at(scene.time.clocks.steady_s + _FLOOD_S, ask)

        ask()

    def hold_again(scene: Scene) -> None:
        scene.held = True

    def nothing(scene: Scene) -> None:
        pass

    def press(scene: Scene) -> None:
        scene.time.publish("stop", None, "somebody")

    return [
        Fault("press stop", press, nothing, (1.0, 1.0), at_once, needs_guard=True),
        Fault("release enable", lambda scene: scene.release(), hold_again, (1.0, 1.0), at_once, needs_guard=True),
        Fault("flood instructions", flood, nothing, (1.0, 1.0)),
    ]


def _twins() -> list[Fault]:
    """A second publisher, which sends the commands of another way, or actions of another policy."""

    def twin(topic: str, period_s: float, make: Callable[[Scene, int], Any], noticed: Notice) -> Fault:
        def begin(scene: Scene) -> None:
            scene.publishers[topic] += 1
            count = itertools.count()

            def publish() -> None:
                if scene.publishers[topic]:
                    scene.time.publish(topic, make(scene, next(count)), "twin")
                    scene.time.at(scene.time.clocks.steady_s + period_s, publish)

            publish()

        def end(scene: Scene) -> None:
            scene.publishers[topic] = 0

        return Fault(f"twin of {topic}", begin, end, (0.3, 1.5), noticed)

    def command(scene: Scene, number: int) -> Any:
        """Slowly away from where the arm is: by itself a right command."""
        way = 0.1 * number * 0.01
        stamp, tool = scene.stamp(), scene.measured()
        if scene.setup.output == "pose":
            return replace(tool, position=tool.position + way)
        if scene.setup.output == "twist":
            return TwistCommand(stamp, np.full(6, 0.05))
        if scene.setup.output == "velocity_array":
            return JointVelocities(Stamp(None), np.full(len(scene.arm.joints), 0.05))
        names = None if scene.setup.output == "position_array" else scene.arm.joints
        return JointCommand(stamp, names, scene.joint_positions()[None] + way, np.full(1, 0.06 if names else 0.0))

    def action(scene: Scene, number: int) -> ActionMessage:
        stamp_ns = scene.time.clocks.ns - round(IMAGE_DELAY_S * 1e9)
        return ActionMessage(stamp_ns, np.array([0.0, -0.05, 0.02, 0.0, 0.0, 0.0, 1.0]), scene.task.instruction)

    def counted(scene: Scene, began_s: float, ended_s: float) -> float:
        return began_s + (GRAPH_S if scene.setup.guarded else DRIVER_GRAPH_S) + _MESSAGE_S

    return [twin("command", 0.01, command, at_once), twin("action", 0.1, action, counted)]


NONE = Fault("none", lambda scene: None, lambda scene: None, (1.0, 1.0))
FAULTS = {
    fault.name: fault
    for make in (_processes, _lateness, _silences, _clocks, _frames, _numbers, _poses, _commands, _people, _twins)
    for fault in make()
} | {NONE.name: NONE}
