# SPDX-License-Identifier: Apache-2.0
"""A running policy under hostile clocks, starvation, and parameters that change while it loads, over real DDS.

An action of a picture that is too old, or out of order, is wrong motion.
"""

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from attacks.policy import TAUGHT, Robot, check_order, policy
from attacks.process import ns_of, stamp
from attacks.tally import Silent, Tally
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rcl_interfaces.msg import Parameter, ParameterValue
from rcl_interfaces.srv import SetParameters
from rosgraph_msgs.msg import Clock


def attack_clocks(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Simulated clocks that jump, stand still, crawl, run and wander; arguments as of `attack_live_images`."""
    jumps_s = (5.0, 50.0, 1e6, -0.5, -1.0, -60.0, 1.5, 0.0)
    limit_s = 1.0
    rng = random.Random(seed)
    with policy(scratch, domain, use_sim_time=True, max_image_age_s=limit_s, max_future_s=0.1) as robot:
        world = _World(robot)
        world.step_until(lambda: bool(robot.actions), 30.0)
        tally = Tally(pid=str(robot.process.pid))
        for jump_s in [*jumps_s, *jumps_s][:limit]:
            tally.judge(f"a jump by {jump_s:g} s", partial(_jump, world, jump_s, limit_s))
        for factor in (0.1, 10.0):
            tally.judge(f"{factor:g} times as fast", partial(_run_clock, world, partial(float, 0.02 * factor), limit_s))
        for _ in range(3):
            tally.judge("a clock that wanders", partial(_run_clock, world, lambda: rng.gauss(0.02, 0.5), limit_s))
    return tally


class _World:
    """A simulated clock and a camera on it."""

    def __init__(self, robot: Robot) -> None:
        self.robot, self.now_ns = robot, 1_000 * 10**9
        self.history: list[tuple[int, int]] = []  # real and simulated nanoseconds

    def step(self, seconds: float, *, image: bool = True) -> None:
        """The clock goes on, by what it likes."""
        self.now_ns = max(0, self.now_ns + int(seconds * 1e9))
        self.robot.clock.publish(Clock(clock=stamp(self.now_ns)))
        self.history.append((time.time_ns(), self.now_ns))
        if image:
            self.robot.images.publish(self.robot.good(self.now_ns))
        self.robot.spin(0.02)

    def step_until(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """The clock goes on at its own pace until something has happened; whether it has."""
        end_s = time.monotonic() + timeout_s
        while not happened() and time.monotonic() < end_s:
            self.step(0.02)
        return happened()

    def check(self, limit_s: float) -> None:
        """No action was too old when it left, by its own word and by every clock that was set around that time."""
        for action, sent_ns in self.robot.actions:
            if not -0.2 <= action.latency_s <= limit_s:
                raise Silent(f"an action {action.latency_s:.2f} s old")
            clocks = [ns for real_ns, ns in self.history if sent_ns - 10**9 <= real_ns <= sent_ns]
            age_s = min((ns - ns_of(action.header.stamp)) * 1e-9 for ns in clocks) if clocks else 0.0
            if age_s > limit_s:
                raise Silent(f"an action {age_s:.2f} s old by every clock of the second before it left")


def _jump(world: _World, seconds: float, limit_s: float) -> str:
    robot = world.robot
    robot.actions.clear()
    for _ in range(15):
        world.step(0.02)
    world.step(seconds)
    world.step_until(lambda: len(robot.actions) > 20, 10.0)
    world.check(limit_s)
    robot.process.check()
    if not any(ns_of(action.header.stamp) >= world.now_ns - 10**9 for action, _ in robot.actions):
        raise Silent("no action after the jump")
    return "goes on"


def _run_clock(world: _World, step_s: Callable[[], float], limit_s: float) -> str:
    robot = world.robot
    robot.actions.clear()
    end_s = time.monotonic() + 6.0
    while time.monotonic() < end_s:
        world.step(step_s())
    world.check(limit_s)
    robot.actions.clear()
    if not world.step_until(lambda: bool(robot.actions), 20.0):
        raise RuntimeError("no action any more")
    robot.process.check()
    return "goes on"


def attack_starved(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """SIGSTOP and SIGCONT, and a process that gets a tenth of its time; arguments as of `attack_live_images`."""
    limit_s, rng = 0.5, random.Random(seed)
    tally = Tally(slow_s=40.0)
    modes = ("ar", "spec", "pipeline", "specpipe")
    for mode in modes:
        rounds = 3 if limit is None else max(1, limit // len(modes))
        with policy(scratch / mode, domain, decode__mode=mode, draft__temporal=True, max_image_age_s=limit_s) as robot:
            robot.act()
            tally.pid = str(robot.process.pid)
            for _ in range(rounds):
                tally.judge(f"{mode}: stopped for 1.5 s", partial(_stop, robot, rng.uniform(0.0, 0.3), limit_s))
            tally.judge(f"{mode}: a tenth of the time", partial(_starve, robot, limit_s))
        domain += 1
    return tally


def _stop(robot: Robot, after_s: float, limit_s: float) -> str:
    robot.actions.clear()
    _film(robot, 0.3 + after_s)
    robot.process.send(signal.SIGSTOP)
    _film(robot, 1.5)
    robot.process.send(signal.SIGCONT)
    _film(robot, 1.5)
    return _check_ages(robot, limit_s)


def _starve(robot: Robot, limit_s: float) -> str:
    robot.actions.clear()
    end_s = time.monotonic() + 6.0
    while time.monotonic() < end_s:
        robot.process.send(signal.SIGSTOP)
        _film(robot, 0.27)
        robot.process.send(signal.SIGCONT)
        _film(robot, 0.03)
    return _check_ages(robot, limit_s)


def _film(robot: Robot, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        robot.images.publish(robot.good(time.time_ns()))
        robot.spin(0.03)


def _check_ages(robot: Robot, limit_s: float) -> str:
    """By the sender's own clock when it left, which neither its word nor this process's pace has a part in."""
    robot.act()
    ages_s = [(sent_ns - ns_of(action.header.stamp)) * 1e-9 for action, sent_ns in robot.actions]
    if max(ages_s) > limit_s + 0.05:
        raise Silent(f"an action {max(ages_s):.2f} s old, and the limit is {limit_s:g} s")
    check_order([action for action, _ in robot.actions])
    robot.process.check()
    return "nothing old"


def attack_configuring(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Parameters that are set while configure loads: what was answered `successful` holds afterwards."""
    changes: list[tuple[str, Any]] = [
        ("acceptance.rule", "bin_distance"),
        ("acceptance.rule", "fly"),
        ("decode.mode", "spec"),
        ("decode.mode", "pipeline"),
        ("max_image_age_s", 0.001),
        ("instruction", TAUGHT[1]),
        ("device", "cuda:7"),
        ("draft.nodes", 3),
    ]
    tally = Tally(slow_s=60.0)
    wait_s = random.Random(seed)
    with policy(scratch, domain, active=False, decode__mode="spec", draft__temporal=True) as robot:
        tally.pid = str(robot.process.pid)
        for name, value in changes[:limit]:
            tally.judge(f"{name} = {value}", partial(_change_meanwhile, robot, name, value, wait_s.uniform(0.0, 1.5)))
    return tally


def _change_meanwhile(robot: Robot, name: str, value: Any, after_s: float) -> str:
    request = ChangeState.Request()
    request.transition.id = Transition.TRANSITION_CONFIGURE
    configured = robot.ask(ChangeState, "/policy/change_state", request)
    robot.spin(after_s)
    taken = _set(robot, name, value)
    if not robot.until(configured.done, 180.0) or not configured.result().success:
        raise RuntimeError(f"not configured: {robot.process.new_output()[-300:]}")
    robot.change("policy", Transition.TRANSITION_ACTIVATE)
    in_force: dict[str, Callable[[], object]] = {
        "acceptance.rule": lambda: robot.stats is not None and robot.stats.acceptance,
        "decode.mode": lambda: robot.stats is not None and robot.stats.mode,
        "instruction": lambda: robot.actions[-1][0].instruction,
    }
    if name == "max_image_age_s" and taken:
        robot.images.publish(robot.good(time.time_ns() - 10**8))
        robot.spin(1.0)
        if robot.actions:
            raise Silent("the limit that was taken does not hold")
    else:
        robot.act()
        robot.until(lambda: robot.stats is not None and robot.stats.seq == robot.actions[-1][0].seq)
        if name in in_force and taken and in_force[name]() != value:
            raise Silent(f"it was taken, and {in_force[name]()} is in force")
    robot.process.check()
    back = {"acceptance.rule": "strict", "decode.mode": "spec", "max_image_age_s": 5.0}
    robot.change("policy", Transition.TRANSITION_DEACTIVATE)
    robot.change("policy", Transition.TRANSITION_CLEANUP)
    if name in back:
        _set(robot, name, back[name])
    robot.actions.clear()
    robot.stats = None
    return "taken, and in force" if taken else "refused"


def _set(robot: Robot, name: str, value: Any) -> bool:
    fields = {int: ("integer_value", 2), float: ("double_value", 3), str: ("string_value", 4)}
    field, kind = fields[type(value)]
    parameter = Parameter(name=name, value=ParameterValue(type=kind, **{field: value}))
    answer = robot.call(SetParameters, "/policy/set_parameters", SetParameters.Request(parameters=[parameter]))
    return bool(answer.results[0].successful)
