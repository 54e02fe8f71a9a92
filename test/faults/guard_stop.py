# SPDX-License-Identifier: Apache-2.0
"""How long the guard takes to stop what goes out, as a process among processes, on a machine with nothing to spare.

Driver, policy, robot and operator are processes that one after the other is killed, or stopped (SIGSTOP), at a random
moment of a motion, while busy loops load every core. The time counts from the last message of the one that falls
silent to the last command of the guard that moves the robot: by the stamps of DDS, which the senders set.

    PYTHONPATH=test python -m faults.guard_stop --rounds 20 --out benchmarks/results/guard_stop_cpu.json

Exit code 1: a stop took longer than promised, by more than a machine with nothing to spare may add.
"""

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import rclpy
import typer
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Float64MultiArray

from benchmarks.harness import Out, finish, result_head
from specvla_ros.lab.files import write_parameters
from specvla_ros.msg import VlaAction
from specvla_ros.ros.qos import ACTION, COMMAND

KINDS: dict[str, tuple[Any, str]] = {
    "twist": (TwistStamped, "twist"),
    "pose": (PoseStamped, "pose"),
    "position_array": (Float64MultiArray, "joint_positions"),
}
BASE, JOINT = "base", "joint"
SPEED = 0.2  # m/s, or rad/s of the joint: largest of the motion
_TURN = 5.0  # rad/s of the phase: a swing of 4 cm
LIMITS = {
    "limits.linear_speed": 0.25,
    "limits.angular_speed": 1.0,
    "limits.linear_acceleration": 2.5,
    "limits.angular_acceleration": 10.0,
    "limits.linear_jerk": 50.0,
    "limits.angular_jerk": 200.0,
    "limits.workspace_min": [0.2, -0.4, 0.0],
    "limits.workspace_max": [0.8, 0.4, 0.6],
    "joints.names": [JOINT],
    "joints.position_min": [-1.0],
    "joints.position_max": [1.0],
    "joints.max_speed": [0.25],
    "joints.max_acceleration": [2.5],
}
RAMP_S = 0.1 + 2 / 100
# Who falls silent, what he sends, and how long the guard waits for him.
SILENT = {
    "driver": ("command", 0.1),
    "policy": ("action", 1.0),
    "robot": ("tool_pose", 0.2),
    "operator": ("guard/enable", 0.5),
}
_PATIENCE_S = 60.0
_LATENESS_S = 0.15  # what a machine with nothing to spare may add


def play(role: str, output: str) -> None:
    """One of the processes around the guard; ends when it is killed."""
    rclpy.init()
    node = rclpy.create_node(role, enable_rosout=False)
    roles: dict[str, tuple[float, Any]] = {
        "driver": (0.01, partial(_driver, output=output)),
        "policy": (0.1, _policy),
        "robot": (0.02, partial(_robot, output=output)),
        "operator": (0.05, _operator),
    }
    period_s, make = roles[role]
    step = make(node)
    began_s = due_s = time.monotonic()
    while True:
        step(time.monotonic() - began_s)
        due_s += period_s
        time.sleep(max(0.0, due_s - time.monotonic()))


def _driver(node: Node, output: str) -> Any:
    kind, name = KINDS[output]
    publisher: Any = node.create_publisher(kind, f"/command/{name}", COMMAND)

    def step(time_s: float) -> None:
        message = _stamped(node, kind) if output != "position_array" else kind()
        swing = SPEED / _TURN * math.sin(_TURN * time_s)
        if output == "twist":
            message.twist.linear.y = SPEED * math.cos(_TURN * time_s)
        elif output == "pose":
            message.pose.position.x, message.pose.position.y, message.pose.position.z = 0.5, swing, 0.3
            message.pose.orientation.w = 1.0
        else:
            message.data = [swing]
        publisher.publish(message)

    return step


def _policy(node: Node) -> Any:
    publisher = node.create_publisher(VlaAction, "/action", ACTION)
    return lambda _: publisher.publish(_stamped(node, VlaAction))


def _operator(node: Node) -> Any:
    publisher = node.create_publisher(Bool, "/guard/enable", 1)
    return lambda _: publisher.publish(Bool(data=True))


def _robot(node: Node, output: str) -> Any:
    """It moves where velocities say so, and elsewhere stands in the middle of the swing, within the lead."""
    swing = SPEED / _TURN if output == "twist" else 0.0
    poses = node.create_publisher(PoseStamped, "/tool_pose", 10)
    joints = node.create_publisher(JointState, "/joint_states", 10)

    def step(time_s: float) -> None:
        pose = _stamped(node, PoseStamped)
        position = pose.pose.position
        position.x, position.y, position.z = 0.5, swing * math.sin(_TURN * time_s), 0.3
        pose.pose.orientation.w = 1.0
        poses.publish(pose)
        state = _stamped(node, JointState)
        state.name, state.position = [JOINT], [0.0]
        joints.publish(state)

    return step


def _stamped(node: Node, kind: Any) -> Any:
    message = kind()
    message.header.stamp, message.header.frame_id = node.get_clock().now().to_msg(), BASE
    return message


@dataclass
class Watch:
    """What was sent, by whom and when: nanoseconds of the senders' clocks.

    Args:
        output: what goes to the robot.
        heard: of each topic, when its last message was sent.
        values: what goes to the robot: when, and the number that moves.
    """

    output: str
    heard: dict[str, int] = field(default_factory=dict)
    values: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._node = rclpy.create_node("watch", enable_rosout=False)
        kind, name = KINDS[self.output]
        kinds: dict[str, tuple[Any, Any]] = {
            "command": (kind, f"/command/{name}"),
            "action": (VlaAction, "/action"),
            "tool_pose": (PoseStamped, "/tool_pose"),
            "guard/enable": (Bool, "/guard/enable"),
        }
        for topic, (each, full) in kinds.items():
            self._node.create_subscription(each, full, self._on_heard(topic), 100)
        self._node.create_subscription(kind, f"/guard/{name}", self._on_sent, 1000)
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)

    def spin(self, seconds: float) -> None:
        """Listens for a while."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left_s)

    def moved(self) -> list[int]:
        """When what went out moved the robot."""
        if self.output == "twist":
            return [time_ns for time_ns, value in self.values if value != 0]
        pairs = zip(self.values, self.values[1:], strict=False)
        return [time_ns for (_, before), (time_ns, value) in pairs if abs(value - before) > 1e-9]

    def until_moving(self) -> bool:
        """Waits for a motion of a second."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            self.spin(0.2)
            if len(self.heard) == len(SILENT) and self.moved() and self.moved()[-1] - self.moved()[0] > 10**9:
                return True
        return False

    def close(self) -> None:
        self._executor.shutdown()
        self._node.destroy_node()

    def _on_heard(self, topic: str) -> Any:
        def on_message(_: Any, info: Any) -> None:
            self.heard[topic] = info["source_timestamp"]

        return on_message

    def _on_sent(self, message: Any, info: Any) -> None:
        if self.output == "twist":
            value = message.twist.linear.y
        else:
            value = message.pose.position.y if self.output == "pose" else message.data[0]
        self.values.append((info["source_timestamp"], value))


def one_round(output: str, silent: str, how: str, domain: int, seed: int) -> dict[str, Any]:
    """Starts everybody, silences one of them, and tells how long the guard took."""
    os.environ.update(ROS_DOMAIN_ID=str(domain), ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST")
    random_ = random.Random(seed)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with TemporaryDirectory() as folder:
        parameters = {"output": output, "base_frame": BASE, "black_box_dir": f"{folder}/box", **LIMITS}
        write_parameters(Path(folder, "guard.yaml"), parameters)
        code = "from specvla_ros.ros.guard.node import main; main()"
        arguments = ["--ros-args", "--params-file", f"{folder}/guard.yaml"]
        rclpy.init()
        watch = Watch(output)
        try:
            guard = [sys.executable, "-c", code, *arguments]
            processes["guard"] = subprocess.Popen(guard, stderr=subprocess.DEVNULL)
            for role in SILENT:
                command = [sys.executable, "-m", "faults.guard_stop", "--play", role, "--output", output]
                processes[role] = subprocess.Popen(command)
            if not watch.until_moving():
                return {"output": output, "silent": silent, "how": how, "problem": "it never moved"}
            watch.spin(random_.uniform(0.0, 1.5))
            processes[silent].send_signal(signal.SIGKILL if how == "kill -9" else signal.SIGSTOP)
            watch.spin(SILENT[silent][1] + 1.5)
        finally:
            for name, process in processes.items():
                process.terminate() if name == "guard" else process.kill()  # a guard that is killed writes its past
            for process in processes.values():
                process.wait()
            watch.close()
            rclpy.try_shutdown()
    topic, _ = SILENT[silent]
    return {
        "output": output,
        "silent": silent,
        "how": how,
        "stop_s": (watch.moved()[-1] - watch.heard[topic]) * 1e-9,
    }


def main(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(help="Of each fault and output.", min=1)] = 10,
    load: Annotated[int, typer.Option(help="Busy loops beside them.", min=0)] = 2,
    outputs: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(KINDS)}.")] = ",".join(KINDS),
    who: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(SILENT)}.")] = ",".join(SILENT),
    out: Out = None,
    play_role: Annotated[str, typer.Option("--play", hidden=True)] = "",
    output: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """See the module."""
    if play_role:
        play(play_role, output)
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    domain = 60
    found = []
    try:
        for number in range(rounds):
            for kind in outputs.split(","):
                for silent in who.split(","):
                    domain = 60 + (domain - 59) % 40  # a dead participant is remembered for 20 s
                    how = ("kill -9", "SIGSTOP")[number % 2]
                    found.append(one_round(kind, silent, how, domain, seed=number))
                    print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    finally:
        for process in burning:
            process.kill()
    rows = [_row(kind, silent, found) for kind in outputs.split(",") for silent in who.split(",")]
    result = result_head(context) | {"rounds": rounds, "load": load, "rows": rows, "found": found}
    finish(result, out)
    if not all(row["passed"] for row in rows):
        raise SystemExit(1)


def _row(output: str, silent: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [each for each in found if each["output"] == output and each["silent"] == silent]
    stops_s = [each["stop_s"] for each in mine if "stop_s" in each]
    promised_s = SILENT[silent][1] + RAMP_S
    return {
        "output": output,
        "silent": silent,
        "rounds": len(mine),
        "median_s": statistics.median(stops_s) if stops_s else None,
        "max_s": max(stops_s, default=None),
        "promised_s": promised_s,
        "passed": len(stops_s) == len(mine) and max(stops_s, default=math.inf) <= promised_s + _LATENESS_S,
    }


if __name__ == "__main__":
    typer.run(main)
