# SPDX-License-Identifier: Apache-2.0
"""What stands around a driver or a guard that is attacked: an arm that goes where it is sent, and everybody else."""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attacks.process import Attacker, NodeProcess, attacker, ns_of, running, stamp
from attacks.tally import Silent
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from std_msgs.msg import Bool, Float64MultiArray

from specvla_ros.lab.files import write_parameters
from specvla_ros.msg import GuardState, VlaAction
from specvla_ros.ros.qos import ACTION, COMMAND, DIAGNOSTICS, LATCHED_STATE

_HOME = (0.5, 0.0, 0.2)
_DOWN = (0.0, 1.0, 0.0, 0.0)  # w x y z
SPEED = 0.45  # m/s
_WORKSPACE = ((0.28, -0.32, 0.015), (0.80, 0.32, 0.45))
LIMITS = {
    "limits.linear_speed": SPEED,
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
POSE_TIMEOUT_S = 2.0
PATIENT_DRIVER: dict[str, object] = {"tool_pose_timeout_s": POSE_TIMEOUT_S}
PATIENT_GUARD: dict[str, object] = {
    "black_box_s": 0.0,
    "command_timeout_s": 1.0,
    "state_timeout_s": 2.0,
    "enable_timeout_s": 2.0,
    "action_timeout_s": 5.0,
}
STEP_M = 0.02
_TOLERANCE = 1.1  # of the speed between two commands: their stamps are taken a little apart
NUMBERS = (math.nan, math.inf, -math.inf, 1e308, -1e308, 1e6, 5.0, -0.5)
STAMPS_S = (-(10**9), -60.0, -3.0, 1.0, 60.0, 10**8)


def tool_action(*values: float, **changes: Any) -> VlaAction:
    """An action of the tool; right, but for the changes."""
    numbers = [*values, *[0.0] * (7 - len(values))]
    message = VlaAction(names=["x", "y", "z", "roll", "pitch", "yaw", "gripper"], values=numbers, horizon=1)
    message.action_dt, message.reference, message.action_frame = 0.2, "delta", "base"
    message.rotation, message.gripper, message.mode = "rotation_vector", "open_high", "ar"
    message.header.stamp, message.header.frame_id = stamp(time.time_ns()), "base_link"
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def robot_file(scratch: Path) -> Path:
    """Parameters of driver and guard for the arm that is played here."""
    path = scratch / "robot.yaml"
    write_parameters(path, {"output": "pose", "base_frame": "base_link", **LIMITS})
    return path


class Arm(Attacker):
    """A robot that is where it is sent, a policy with right actions, and an eye on what the robot is sent.

    Args:
        other: whose node it is.
        sent: topic of what the robot is sent.
    """

    far, still, unit = 0.5 * SPEED, 0.001, "m"  # more than a bounded command, or than none, moves it

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
        node.create_subscription(GuardState, "/guard/state", self._on_state, LATCHED_STATE)
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
        return tool_action(*values, **changes)

    def random_command(self, rng: random.Random) -> PoseStamped:
        """Up to 0.3 m away along each axis."""
        return self.pose(*(rng.uniform(-0.3, 0.3) for _ in range(3)))

    def next_move(self) -> tuple[Callable[[], None], Callable[[], bool]]:
        """Publishes a right action, which leads back and forth, and tells whether it is followed."""
        start = self.at.pose.position.y
        way_m = -STEP_M if start > 0 else STEP_M
        return (
            lambda: self.actions.publish(self.action(0.0, way_m)),
            lambda: abs(self.at.pose.position.y - start) > 0.5 * STEP_M,
        )

    def rests(self) -> bool:
        """Whether what it is sent stands still."""
        return len(self.sent) > 10 and bool(np.ptp([_place(each) for each in self.sent[-10:]], axis=0).max() < 1e-5)

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
        allowed_m = SPEED * _TOLERANCE * np.maximum(np.diff(times_s), 0.02)
        if (steps_m > allowed_m).any():
            raise Silent(f"a step of {steps_m.max():.3f} m was sent")

    def moved(self) -> float:
        """How far the arm has been sent since the last check."""
        places = np.array([_place(each) for each in self.sent]).reshape(-1, 3)
        return float(np.ptp(places, axis=0).max()) if len(places) else 0.0

    def _on_sent(self, message: PoseStamped) -> None:
        self.sent.append(message)
        if all(math.isfinite(each) for each in _place(message)):
            self.at = message

    def _on_state(self, message: GuardState) -> None:
        self.passing = message.state == GuardState.PASSING

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        self.gate = next((each.message for each in message.status if each.name.endswith(": gate")), self.gate)

    def _on_timer(self) -> None:
        self.poses.publish(self.pose())
        self.driving()


def _place(message: PoseStamped) -> tuple[float, float, float]:
    position = message.pose.position
    return position.x, position.y, position.z


@contextmanager
def arm_beside(name: str, scratch: Path, domain: int) -> Iterator[tuple[Arm, NodeProcess]]:
    """Driver or guard as a process, and everybody around it."""
    guard = name == "guard"
    parameters = PATIENT_GUARD if guard else PATIENT_DRIVER
    with attacker(domain) as user:
        process = NodeProcess(name, scratch / f"{name}.log", parameters, files=(robot_file(scratch),))
        with running(process):
            arm = Arm(user, f"/{name}/pose")
            if guard:
                arm.driving = partial(_drive, arm)
            else:
                arm.activate(name)
            yield arm, process


def _drive(arm: Arm) -> None:
    """A right driver, policy and hand: nothing moves, and nothing is silent."""
    arm.commands.publish(arm.pose())
    arm.grippers.publish(Float64MultiArray(data=[0.0]))
    arm.actions.publish(arm.action())
    arm.enables.publish(Bool(data=True))


def wrong_poses(arm: Arm) -> Iterator[tuple[str, Callable[[], None]]]:
    """Measured poses that are none, by name."""
    for number in NUMBERS[:5]:
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
