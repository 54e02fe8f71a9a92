# SPDX-License-Identifier: Apache-2.0
"""The faults of the running stack: what is done to processes, topics and people, and from when a stop is promised."""

import copy
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from faults.robot_process import CLOCKS, LIES, LINK_LOST, PROTECTIVE_STOP, STUCK

from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.settings import GuardSettings, Output
from specvla_ros.lab.simulation.controllers import COMMAND_TIMEOUT_S

if TYPE_CHECKING:
    from faults.watch import Watch

_MESSAGE_S = 0.05  # on its way, on a machine with nothing to spare, and a tick of who gets it
_SILENT_S = 3.5  # longer than an answer that was begun, the guard's timeout and a stop
_GRAPH_S = 0.5  # between two looks of the guard at who publishes what
_PULSES, _BETWEEN_S = 5, 0.3
_CLOSED, _OPEN = 0.0, 1.0  # an action's number
_OLD_NS = 3 * 10**9
_FLOOD = 50


@dataclass
class Hands:
    """What a fault is done with.

    Args:
        watch: hears what happens, says what people and policies say.
        send: a signal to a process by its name.
        random: of the round.

    Attributes:
        began_s: when it was done, on the arm's time.
        asked_s: when motion was allowed again, on the arm's time; None: it never was taken away.
    """

    watch: "Watch"
    send: Callable[[str, signal.Signals], None]
    random: Random
    began_s: float = 0.0
    asked_s: float | None = None

    def mark(self) -> None:
        """It is done now."""
        self.began_s = self.watch.now_s


Act = Callable[[Hands], Any]
# From when a stop is promised, from the hands after the fault and the guard's settings, on the arm's time.
Notice = Callable[[Hands, GuardSettings], float]


def _nothing(hands: Hands) -> None:
    pass


@dataclass(frozen=True)
class RealFault:
    """One kind.

    Args:
        begin: does it.
        end: undoes it.
        lasts_s: between the two.
        noticed: from when a stop is promised; None: it need not end motion, only stay within limits.
        latches: causes for which the guard may latch.
        halts: whether Servo gets no more twists, and halts the arm by itself.
        pauses: whether commands stay away for some periods: an arm that is sent positions alone stands meanwhile.
        brakes: whether the arm itself brakes, as hard as it can.
        of_joints: whether it is about joint outputs alone.
        stays: whether somebody stays away, so that motion does not go on.
        on_clock: whether the nodes have their time from the arm.
        fills_disk: whether the black box has a disk that is full with its first stop.
    """

    begin: Act
    end: Act = _nothing
    lasts_s: float = 2.0
    noticed: Notice | None = None
    latches: frozenset[Cause] = field(default_factory=frozenset)
    halts: bool = False
    pauses: bool = False
    brakes: bool = False
    of_joints: bool = False
    stays: bool = False
    on_clock: bool = False
    fills_disk: bool = False


def _after(timeout: Callable[[GuardSettings], float]) -> Notice:
    return lambda hands, settings: hands.began_s + timeout(settings)


def _silence_of_actions(hands: Hands, settings: GuardSettings) -> float:
    """What the policy has begun still comes."""
    return hands.watch.action_s + settings.action_timeout_s


def _alone_s(settings: GuardSettings) -> float:
    """How long an arm continues that hears nothing: Servo's timeout, or to the end of a chunk."""
    return settings.joints.chunk_s if settings.kind is Output.JOINT_TRAJECTORY_CHUNK else COMMAND_TIMEOUT_S


_AT_ONCE = _after(lambda settings: _MESSAGE_S)
_STATE = _after(lambda settings: settings.state_timeout_s)
_ENABLE = _after(lambda settings: settings.enable_timeout_s)
_OF_PROCESS: dict[str, Notice] = {
    "camera": _silence_of_actions,
    "policy": _silence_of_actions,
    "driver": _after(lambda settings: settings.command_timeout_s),
    "guard": _after(_alone_s),
    "operator": _ENABLE,
}
_OF_LIE: dict[str, Notice] = {"silent": _STATE, "of NaN": _AT_ONCE, "old": _STATE, "leaps": _AT_ONCE}
_OF_CLOCK: dict[str, Notice | None] = {
    "clock still": _after(lambda settings: settings.clock_timeout_s + _MESSAGE_S),
    "clock slow": None,
    "clock fast": None,
}
_STOPS = frozenset({Cause.STOP})
# What stands in the way of an arm, or does not let it hear, is met as if it did not follow.
_HELD = frozenset({Cause.NOT_FOLLOWING, Cause.ROBOT_STOPPED, Cause.NOT_OBEYING})
_LEAPS = frozenset({Cause.POSE_JUMP, Cause.NOT_FOLLOWING})
# By a clock that is three times as fast, a driver's commands are that much too fast.
_FAST = frozenset({Cause.OVER_SPEED, Cause.OVER_ACCELERATION})
# Another driver's command may be none that this one could have sent.
_STRANGE = frozenset({Cause.OVER_SPEED, Cause.OVER_ACCELERATION, Cause.BAD_FORM})


def _send(who: str, number: signal.Signals, hands: Hands) -> None:
    hands.send(who, number)


def _processes() -> dict[str, RealFault]:
    found = {}
    for who, noticed in _OF_PROCESS.items():
        halts = who == "guard"
        lasts_s = _SILENT_S if noticed is _silence_of_actions else 2.0
        kill = RealFault(partial(_send, who, signal.SIGKILL), lasts_s=lasts_s, noticed=noticed, halts=halts, stays=True)
        found[f"kill {who}"] = kill
        stop, go_on = partial(_send, who, signal.SIGSTOP), partial(_send, who, signal.SIGCONT)
        found[f"freeze {who}"] = replace(kill, begin=stop, end=go_on, stays=False)
    return found


def _late(who: str, hands: Hands) -> None:
    """Again and again late by 10 to 99 ms, as of a page fault, a collection of garbage, or more load than cores."""
    for _ in range(_PULSES):
        hands.send(who, signal.SIGSTOP)
        hands.watch.spin(hands.random.uniform(0.01, 0.099))
        hands.send(who, signal.SIGCONT)
        hands.watch.spin(_BETWEEN_S)


def _robot() -> dict[str, RealFault]:
    def kind(name: str, noticed: Notice | None, latches: frozenset[Cause] = frozenset(), **how: Any) -> RealFault:
        def begin(hands: Hands) -> None:
            hands.began_s = hands.watch.tell_robot(name)

        return RealFault(begin, lambda hands: hands.watch.tell_robot(""), 2.0, noticed, latches, **how)

    found = {}
    for name, (topic, _) in LIES.items():
        noticed = _OF_LIE.get(name.removeprefix(f"{topic} "))
        latches = _LEAPS if name.endswith("leaps") else frozenset()
        found[name] = kind(name, noticed, latches, of_joints=topic == "joint_states")
    for name in CLOCKS:
        latches = _FAST if name == "clock fast" else frozenset()
        found[name] = kind(name, _OF_CLOCK.get(name, _AT_ONCE), latches, halts=True, on_clock=True)
    return found | {
        LINK_LOST: kind(LINK_LOST, _after(_alone_s), _HELD, halts=True),
        PROTECTIVE_STOP: kind(PROTECTIVE_STOP, _AT_ONCE, _HELD, brakes=True),
        STUCK: kind(STUCK, _AT_ONCE, _HELD, brakes=True),
    }


def _people() -> dict[str, RealFault]:
    def press(how: str) -> Act:
        return lambda hands: hands.watch.press_stop(how)

    def button(level: bool) -> Act:
        return lambda hands: hands.watch.hold_button(level)

    def silence(hands: Hands) -> None:
        """The button was heard, and falls silent."""
        hands.watch.hold_button(False)
        hands.watch.spin(1.0)
        hands.watch.let_go_of_button()
        hands.mark()

    return {
        "press stop": RealFault(press("reliable"), noticed=_AT_ONCE, latches=_STOPS),
        "press stop, best effort": RealFault(press("best effort"), noticed=_AT_ONCE, latches=_STOPS),
        "stop by service": RealFault(press("service"), noticed=_AT_ONCE, latches=_STOPS),
        "stop button pressed": RealFault(button(True), button(False), noticed=_AT_ONCE, latches=_STOPS),
        "stop button silent": RealFault(silence, button(False), noticed=_ENABLE),
        "fill disk": RealFault(press("reliable"), noticed=_AT_ONCE, latches=_STOPS, fills_disk=True),
    }


def _twins() -> dict[str, RealFault]:
    def command(hands: Hands) -> None:
        hands.watch.second_driver()

    def action(hands: Hands) -> None:
        hands.watch.second_policy()

    counted = _after(lambda settings: _GRAPH_S + _MESSAGE_S)

    def end(hands: Hands) -> None:
        hands.watch.end_second()

    return {
        "two drivers": RealFault(command, end, noticed=_AT_ONCE, latches=_STRANGE),
        "two policies": RealFault(action, end, noticed=counted),
    }


def _columns(message: Any) -> np.ndarray:
    """Its values, float64 [horizon, names]."""
    return np.array(message.values).reshape(max(1, message.horizon), -1)


def _actions() -> dict[str, RealFault]:
    """What one policy sends that has gone mad."""

    def values(change: Callable[[np.ndarray, Random], np.ndarray]) -> Callable[[Any, Random], list[Any]]:
        def changed(message: Any, random: Random) -> list[Any]:
            message.values = change(_columns(message), random).ravel().tolist()
            return [message]

        return changed

    def stamped(shift_ns: int) -> Callable[[Any, Random], list[Any]]:
        def changed(message: Any, random: Random) -> list[Any]:
            ns = message.header.stamp.sec * 10**9 + message.header.stamp.nanosec + shift_ns
            message.header.stamp.sec, message.header.stamp.nanosec = divmod(max(1, ns), 10**9)
            return [message]

        return changed

    def framed(message: Any, random: Random) -> list[Any]:
        message.header.frame_id = "tool0"
        return [message]

    def turned(rows: np.ndarray, random: Random) -> np.ndarray:
        return rows * np.where(np.arange(rows.shape[1]) < 6, random.choice((-1.0, 1.0)), 1.0)

    def leaping(rows: np.ndarray, random: Random) -> np.ndarray:
        way = np.array([random.gauss(0, 1) for _ in range(6)])
        way *= np.repeat([0.29 / np.linalg.norm(way[:3]), 1.4 / np.linalg.norm(way[3:])], 3)
        return np.concatenate([np.broadcast_to(way, (len(rows), 6)), rows[:, 6:]], axis=1)

    kinds: dict[str, Callable[[Any, Random], list[Any]]] = {
        "of NaN": values(lambda rows, random: rows * np.nan),
        "of infinity": values(lambda rows, random: rows * np.inf),
        "too large": values(lambda rows, random: rows * 1e6),
        "in millimetres": values(lambda rows, random: rows * np.repeat([1e3, 1.0], [3, rows.shape[1] - 3])),
        "that leap": values(leaping),
        "that flip": values(turned),
        "of another shape": values(lambda rows, random: rows[:, :5]),
        "in another frame": framed,
        "old": stamped(-_OLD_NS),
        "of the future": stamped(_OLD_NS),
        "a flood": lambda message, random: [message] * _FLOOD,
    }

    def kind(name: str, change: Callable[[Any, Random], list[Any]]) -> RealFault:
        def begin(hands: Hands) -> None:
            hands.watch.alter = lambda message: change(copy.deepcopy(message), hands.random)

        def end(hands: Hands) -> None:
            hands.watch.alter = lambda message: [message]

        if name in ("old", "of the future"):
            return RealFault(begin, end, _SILENT_S, noticed=_silence_of_actions)
        return RealFault(begin, end)

    return {f"actions {name}": kind(name, change) for name, change in kinds.items()}


def _gripper() -> dict[str, RealFault]:
    """What the gripper was told before a hold is not told it afterwards, when actions say something else."""

    def says(value: float) -> Callable[[Any], list[Any]]:
        def changed(message: Any) -> list[Any]:
            rows = _columns(message)
            rows[:, -1] = value
            message.values = rows.ravel().tolist()
            return [message]

        return changed

    def begin(hands: Hands) -> None:
        hands.watch.alter = says(_OPEN)
        hands.watch.spin(1.5)
        hands.send("operator", signal.SIGSTOP)
        hands.mark()
        hands.watch.spin(1.0)
        hands.watch.alter = lambda message: []

    def end(hands: Hands) -> None:
        hands.send("operator", signal.SIGCONT)
        hands.asked_s = hands.watch.now_s
        hands.watch.alter = says(_CLOSED)

    return {"gripper of yesterday": RealFault(begin, end, noticed=_ENABLE)}


REAL_FAULTS: dict[str, RealFault] = {
    "none": RealFault(_nothing),
    **_processes(),
    "late guard": RealFault(partial(_late, "guard"), lasts_s=0.0, pauses=True),
    "late driver": RealFault(partial(_late, "driver"), lasts_s=0.0),
    **_robot(),
    **_people(),
    **_twins(),
    **_actions(),
    **_gripper(),
}
