# SPDX-License-Identifier: Apache-2.0
"""Attacks on running nodes by classes, over real DDS: what damaged files cannot show.

    PYTHONPATH=test python -m attacks.attack_nodes --out benchmarks/results/attack_nodes.json

A case fails where it moves a robot wrongly (too old, too fast, of another instruction), ends the node, leaves a
traceback or a request without an answer, takes long or takes gigabytes.
"""

import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from attacks.arm import robot_file
from attacks.driver import attack_driver, attack_sim_robot
from attacks.guard import attack_guard, attack_pairs
from attacks.joint_driver import attack_joint_driver
from attacks.joint_guard import attack_joint_guard
from attacks.policy import Robot, attack_instructions, attack_live_images, policy
from attacks.policy_time import attack_clocks, attack_configuring, attack_starved
from attacks.process import Attacker, NodeProcess, attacker, running
from attacks.tally import Silent, Tally, resident_bytes
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState
from rcl_interfaces.msg import Parameter, ParameterValue
from rcl_interfaces.srv import GetParameters, ListParameters, SetParameters
from rich.console import Console
from support.ros_domain import OWN_DOMAINS

from benchmarks.harness import Out, finish, result_head

_VALUES: tuple[dict[str, Any], ...] = (
    *({"type": 0}, {"type": 1, "bool_value": True}, {"type": 9}, {"type": 99}, {"type": 200, "double_value": 1.0}),
    *({"type": 2, "integer_value": value} for value in (0, -1, 1, 2**31, 2**63 - 1, -(2**63))),
    *({"type": 3, "double_value": value} for value in (0.0, -1.0, float("nan"), float("inf"), 1e308, 1e-320)),
    *({"type": 4, "string_value": value} for value in ("", "x" * 10**5, "\0", "../../etc/passwd", "é🤖", "none")),
    *({"type": 5, "byte_array_value": [b"x"]}, {"type": 6, "bool_array_value": []}, {"type": 7}, {"type": 8}),
    *({"type": 7, "integer_array_value": [0] * 5000}, {"type": 8, "double_array_value": [float("nan")] * 3}),
    *({"type": 9, "string_array_value": ["", "x" * 1000, "\0"]},),
)
_GROWN = 64 << 20  # bytes that a node may keep after many transitions


def main(
    context: typer.Context,
    limit: Annotated[int, typer.Option(help="Cases of each class, drawn at random; 0: all.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the drawing, the damage and the moments.")] = 0,
    only: Annotated[str, typer.Option(help="Comma-separated names of classes; empty: all.")] = "",
    out: Out = None,
) -> None:
    """Runs the classes one after the other, each in a DDS domain of its own."""
    result = result_head(context, None, rclpy=_rclpy_version())
    console, classes = Console(stderr=True), {}
    with tempfile.TemporaryDirectory(prefix="specvla_attacks_") as name:
        try:
            for number, (label, attack) in enumerate(_CLASSES.items()):
                if only and label not in only.split(","):
                    continue
                scratch = Path(name, str(number))
                scratch.mkdir()
                began_s = time.monotonic()
                classes[label] = attack(scratch, 1 + OWN_DOMAINS * number, limit=limit or None, seed=seed).as_json()
                shown = {key: classes[label][key] for key in ("tried", "failed", "outcomes", "failures")}
                console.print(label, shown, f"{time.monotonic() - began_s:.0f} s")
        finally:  # what was interrupted shows what it has
            not_run = [label for label in _CLASSES if label not in classes]
            finish(result | {"classes": classes, "not_run": not_run}, out)


def _rclpy_version() -> str:
    for name in ("ros-rclpy", "ros-jazzy-rclpy", "rclpy"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


# Parameters


def attack_parameters(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Every parameter of every node, set to values of every type, right and wrong, while the node works.

    Args:
        scratch: directory for files.
        domain: of DDS.
        limit: number of cases of each node, drawn at random; None: all.
        seed: of the drawing.
    """
    tally, rng = Tally(), random.Random(seed)
    for number, name in enumerate(("driver", "guard", "task", "sim_robot", "policy")):
        with _node(name, scratch, domain + number) as (user, process):
            tally.pid = str(process.pid)
            names = user.call(ListParameters, f"/{name}/list_parameters", ListParameters.Request()).result.names
            cases = [(each, value) for each in names for value in _VALUES]
            if limit is not None:
                cases = rng.sample(cases, min(limit, len(cases)))
            for each, value in cases:
                tally.judge(f"{name}: {each} = {value!r:.60}", partial(_one_parameter, user, process, each, value))
    return tally


def _one_parameter(user: Attacker, process: NodeProcess, name: str, value: dict[str, Any]) -> str:
    before = _get(user, process.name, name)
    taken = _set(user, process.name, name, ParameterValue(**value))
    after = _get(user, process.name, name)
    process.check()
    # rclpy's own conversion ends a text at a NUL before it is sent.
    sent = {key: each.partition("\0")[0] if isinstance(each, str) else each for key, each in value.items()}
    if taken and repr(after) != repr(ParameterValue(**sent)):
        raise Silent(f"it was taken, and the parameter is {after!r:.80}")
    if not taken and repr(after) != repr(before):
        raise Silent(f"it was refused, and the parameter is {after!r:.80}")
    if taken and not _set(user, process.name, name, before):
        raise Silent(f"the old value is refused: {before!r:.80}")
    return "taken" if taken else "refused"


def _get(user: Attacker, node: str, name: str) -> ParameterValue:
    answer = user.call(GetParameters, f"/{node}/get_parameters", GetParameters.Request(names=[name]))
    return answer.values[0] if answer.values else ParameterValue()


def _set(user: Attacker, node: str, name: str, value: ParameterValue) -> bool:
    request = SetParameters.Request(parameters=[Parameter(name=name, value=value)])
    return bool(user.call(SetParameters, f"/{node}/set_parameters", request).results[0].successful)


# Transitions


def attack_lifecycle(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Transitions in any order, several at once, and a configure that fails; arguments as of `attack_parameters`."""
    tally, rng = Tally(slow_s=60.0), random.Random(seed)
    wrong = {
        "driver": ("limits.linear_speed", 3, "double_value", 0.0),
        "policy": ("checkpoint", 4, "string_value", "/no"),
    }
    for number, (name, change) in enumerate(wrong.items()):
        with _node(name, scratch, domain + number) as (user, process):
            tally.pid = str(process.pid)
            tally.judge(f"{name}: a configure that fails", partial(_fail_to_configure, user, process, *change))
            for _ in range(20 if limit is None else limit):
                drawn = [rng.choice((1, 2, 3, 4, 10, 99, 255)) for _ in range(rng.randint(1, 6))]
                tally.judge(f"{name}: transitions {drawn}", partial(_transitions, user, process, drawn))
            begun = resident_bytes(tally.pid)
            for _ in range(5 if limit is None else 1):
                tally.judge(f"{name}: down and up", partial(_transitions, user, process, [4, 2, 1, 3]))
            tally.judge(f"{name}: what is left of it", partial(_not_grown, tally.pid, begun))
    return tally


def _transitions(user: Attacker, process: NodeProcess, drawn: list[int]) -> str:
    """Each is answered, wherever the node is; afterwards it comes up as ever."""
    asked = []
    for each in drawn:
        request = ChangeState.Request(transition=Transition(id=each))
        asked.append(user.ask(ChangeState, f"/{process.name}/change_state", request))
    if not user.until(lambda: all(future.done() for future in asked), 60.0):
        raise RuntimeError(f"{sum(not future.done() for future in asked)} requests have no answer")
    process.check()
    user.activate(process.name)
    if user.state(process.name) != State.PRIMARY_STATE_ACTIVE:
        raise RuntimeError(f"it is in state {user.state(process.name)}")
    process.check()
    return f"{sum(future.result().success for future in asked)} of {len(asked)} made"


def _fail_to_configure(user: Attacker, process: NodeProcess, name: str, kind: int, field: str, value: Any) -> str:
    node = process.name
    for each in (Transition.TRANSITION_DEACTIVATE, Transition.TRANSITION_CLEANUP):
        user.change(node, each)
    before = _get(user, node, name)
    if not _set(user, node, name, ParameterValue(type=kind, **{field: value})):
        raise RuntimeError(f"{name} cannot be set while unconfigured")
    if user.change(node, Transition.TRANSITION_CONFIGURE) or user.state(node) != State.PRIMARY_STATE_UNCONFIGURED:
        raise Silent("it was configured all the same")
    _set(user, node, name, before)
    if not user.change(node, Transition.TRANSITION_CONFIGURE) or user.state(node) != State.PRIMARY_STATE_INACTIVE:
        raise Silent("configured by hand it is not inactive")
    process.check()
    user.activate(node)
    return "refused, and tried again"


def _not_grown(pid: str, begun: int) -> str:
    grown = resident_bytes(pid) - begun
    if grown > _GROWN:
        raise Silent(f"it has grown by {grown >> 20} MiB")
    return "as before"


# Signals


def attack_signals(scratch: Path, domain: int, *, limit: int | None = None, seed: int = 0) -> Tally:
    """SIGINT, SIGTERM, both, and SIGINT twice, at random moments; arguments as of `attack_parameters`."""
    tally, rng = Tally(slow_s=120.0), random.Random(seed)
    kinds = [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)]
    nodes = ("guard", "driver", "task", "policy", "sim_robot")
    cases = [(name, kind, after) for name in nodes for kind in kinds for after in ("starting", "working")]
    if limit is not None:
        cases = rng.sample(cases, min(limit, len(cases)))
    for number, (name, kind, when) in enumerate(cases):
        words = f"{name}, {when}: {', '.join(each.name for each in kind)}"
        tally.judge(words, partial(_end_by, name, kind, when, scratch, domain + number % OWN_DOMAINS, rng.random()))
    return tally


def _end_by(name: str, signals: tuple[int, ...], when: str, scratch: Path, domain: int, share: float) -> str:
    with _node(name, scratch, domain, wait=when == "working") as (user, process):
        if isinstance(user, Robot) and when == "working":
            user.act()
            user.images.publish(user.good(time.time_ns()))
        time.sleep(share if when == "working" else 3 * share)
        code = process.end(*signals)
        said = process.new_output()
    if code not in (0, -signals[0]) or "Traceback" in said or "terminate called" in said:
        raise RuntimeError(f"exit code {code}: {said[-400:]}")
    return "ended with code 0" if code == 0 else "ended by the signal"


@contextmanager
def _node(name: str, scratch: Path, domain: int, *, wait: bool = True) -> Iterator[tuple[Attacker, NodeProcess]]:
    """A node, working if it is waited for, and who attacks it."""
    if name == "policy":
        with policy(scratch, domain, active=wait) as robot:
            yield robot, robot.process
        return
    parameters = {"episodes": 0} if name == "sim_robot" else {}
    files = (robot_file(scratch),) if name in ("driver", "guard") else ()
    with attacker(domain) as user:
        process = NodeProcess(name, scratch / f"{name}.log", parameters, files=files)
        with running(process):
            if wait and name == "driver":
                user.activate(name)
            elif wait:
                user.call(ListParameters, f"/{name}/list_parameters", ListParameters.Request())
            yield user, process


_CLASSES: dict[str, Callable[..., Tally]] = {
    "actions and poses to the driver": attack_driver,
    "commands to the guard": attack_guard,
    "joint commands to the guard": attack_joint_guard,
    "actions to the driver of joints": attack_joint_driver,
    "two of a kind": attack_pairs,
    "actions to the simulated robot": attack_sim_robot,
    "parameters of every node": attack_parameters,
    "transitions": attack_lifecycle,
    "signals": attack_signals,
    "images to a node": attack_live_images,
    "instructions to a node": attack_instructions,
    "clocks of a node": attack_clocks,
    "parameters while it loads": attack_configuring,
    "stopped and starved policies": attack_starved,
}

if __name__ == "__main__":
    typer.run(main)
