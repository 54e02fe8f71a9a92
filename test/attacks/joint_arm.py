# SPDX-License-Identifier: Apache-2.0
"""An arm whose joints are commanded, and everybody beside it, for attacks on its driver or its guard."""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from attacks.arm import LIMITS, PATIENT_DRIVER, PATIENT_GUARD, STEP_M, tool_action
from attacks.process import Attacker, NodeProcess, attacker, ns_of, running, stamp
from attacks.tally import Silent
from builtin_interfaces.msg import Duration
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from specvla_ros.control.guard.settings import Output
from specvla_ros.lab.files import write_parameters
from specvla_ros.lab.ros.sim_robot.inputs import _INTERFACES
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.lab.simulation.commanded_arm import _CONTROLLERS
from specvla_ros.lab.simulation.controllers import CONTROL_DT_S, CommandRefusedError, Controller
from specvla_ros.lab.simulation.controllers import JointState as State
from specvla_ros.msg import GuardState, VlaAction
from specvla_ros.ros.qos import ACTION, COMMAND, LATCHED_STATE

JOINTS, HOME = TABLE_ARM.joints, np.array(TABLE_ARM.home)
CHUNK_DT_S, _ROWS = 0.1, 4
STEP_RAD = 0.1  # of the first joint, by a right chunk
_STEP_OF_TOOL_RAD = 0.025  # of a joint, by STEP_M of the tool; more than the driver tries its order with
_SPEED, _ACCELERATION = 0.5, 10.0  # rad/s, rad/s²
AHEAD_S, _PERIOD_S = 0.06, 0.02
_TOLERANCE = 1.1  # of a speed between two messages: they arrive a little apart
_RESTS = 15  # commands and positions in a row that do not differ, of an arm at rest
_LATE_S = 0.05  # longest that the arm makes up for at once: it does not go on while this process stands still


class JointArm(Attacker):
    """An arm that follows what it is sent as its controller does, and an eye on both.

    Args:
        other: whose node it is.
        sender: the node whose commands it follows.
        of_joints: whether its policy's actions are of the joints; else of the tool.
    """

    far, still, unit = 0.5 * _SPEED, 0.005, "rad"

    def __init__(self, other: Attacker, sender: str, output: str, *, of_joints: bool = True) -> None:
        super().__init__(other.node, other._executor)
        self.output, self.of_joints = Output(output), of_joints
        self.joints, self.passing, self.measured = HOME.copy(), False, True
        self.goal = self._checked = self.joints  # the end of the last right chunk
        self.side = 1.0  # of the first joint, to which that chunk leads
        self.sent: list[tuple[float, np.ndarray]] = []  # stamp or arrival, and positions or velocities [points, joints]
        self.driving: Callable[[], None] = lambda: None  # what a right driver says, for the guard
        self._side_m = STEP_M
        self.newest_ns = 0  # stamp of the last right action
        self._way: deque[np.ndarray] = deque(maxlen=_RESTS)
        self._refused = ""  # what the controller did not take
        node = self.node
        self.kind, _, self._read = _INTERFACES[output]
        self._controller: Controller = _CONTROLLERS[output](cast(Any, _World))
        self._state, self._moved_s = State(self.joints, np.zeros(len(HOME))), time.time()
        self._controller.start(self._state)
        self.commands = node.create_publisher(self.kind, f"/command/{self.output.topic}", COMMAND)
        self.states = node.create_publisher(JointState, "/joint_states", 10)
        self.actions = node.create_publisher(VlaAction, "/action", ACTION)
        node.create_subscription(self.kind, f"/{sender}/{self.output.topic}", self._on_sent, 100)
        node.create_subscription(GuardState, "/guard/state", self._on_guard, LATCHED_STATE)
        node.create_timer(_PERIOD_S, self._on_timer)

    @property
    def by_velocity(self) -> bool:
        """Whether its joints are sent velocities."""
        return self.output is Output.VELOCITY_ARRAY

    def command(self, way: Any = 0.0, **changes: Any) -> Any:
        """To so far from where the joints are, or at such a velocity; right, but for the changes."""
        numbers = np.broadcast_to(np.asarray(way, dtype=float), HOME.shape)
        values = (numbers if self.by_velocity else self.joints + numbers).tolist()
        if self.kind is Float64MultiArray:
            return Float64MultiArray(**{"data": values} | changes)
        end = JointTrajectoryPoint(positions=values, velocities=[0.0] * len(values), time_from_start=seconds(AHEAD_S))
        fields: dict[str, Any] = {"joint_names": list(JOINTS), "points": [end]}
        message = JointTrajectory(**fields | changes)
        message.header.stamp = stamp(time.time_ns())
        return message

    def random_command(self, rng: random.Random) -> Any:
        """Up to a radian away, or at up to a radian per second."""
        return self.command([rng.uniform(-1.0, 1.0) for _ in HOME])

    def joint_state(self, **changes: Any) -> JointState:
        """The joints as they are, but for the changes."""
        message = JointState(**{"name": list(JOINTS), "position": self.joints.tolist()} | changes)
        message.header.stamp = stamp(time.time_ns())
        return message

    def action(self, *values: float, **changes: Any) -> VlaAction:
        """One of the tool; right, but for the changes."""
        return tool_action(*values, **changes)

    def chunk(self, way: Any = 0.0, **changes: Any) -> VlaAction:
        """Positions of the joints and the gripper that lead so far away from here; right, but for the changes."""
        way = np.broadcast_to(np.asarray(way, dtype=float), HOME.shape)
        rows = [[*self.joints + way * (row + 1) / _ROWS, 0.0] for row in range(_ROWS)]
        fields: dict[str, Any] = {"names": [*JOINTS, "gripper"], "values": np.ravel(rows).tolist(), "horizon": _ROWS}
        return tool_action(
            **fields | {"action_dt": CHUNK_DT_S, "reference": "absolute", "action_frame": "joints"} | changes
        )

    def next_move(self) -> tuple[Callable[[], None], Callable[[], bool]]:
        """Publishes a right action, which leads back and forth, and tells whether it is followed."""
        self.side = sign = -1.0 if self.joints[0] > 0 else 1.0
        start, self.goal = self.joints, self.joints + sign * STEP_RAD * np.eye(len(HOME))[0]

        def act() -> None:
            self._side_m = -self._side_m  # on one side the workspace may end
            message = self.chunk(self.goal - self.joints) if self.of_joints else self.action(0.0, self._side_m)
            self.newest_ns = ns_of(message.header.stamp)
            self.actions.publish(message)

        return (
            act,
            lambda: (
                float(np.abs(self.joints - start).max()) > (0.5 * STEP_RAD if self.of_joints else _STEP_OF_TOOL_RAD)
            ),
        )

    def rests(self) -> bool:
        """Whether it stands still, and is sent to stand: a driver that has no processor time says nothing."""
        ends = np.array([each[-1] for _, each in self.sent[-_RESTS:]])
        if len(ends) < _RESTS or len(self._way) < _RESTS:
            return False
        sent = np.abs(ends).max() if self.by_velocity else np.ptp(ends, axis=0).max()
        return max(float(sent), float(np.ptp(self._way, axis=0).max())) < 1e-4

    def moved(self) -> float:
        """How far the joint that moved most is from where it was at the last check."""
        return float(np.abs(self.joints - self._checked).max())

    def check(self) -> None:
        """Whatever was sent is finite, in the joints' ranges, and no faster than the limits; then forgets it.

        Raises:
            Silent: it is not.
        """
        sent, refused = self.sent.copy(), self._refused
        del self.sent[:-1]
        self._refused, self._checked = "", self.joints
        if not all(np.isfinite(each).all() for _, each in sent):
            raise Silent("something that is no number was sent")
        if refused:
            raise Silent(f"what was sent is wrong: {refused}")
        values = np.concatenate([each for _, each in sent]) if sent else np.zeros((0, len(HOME)))
        if self.by_velocity:
            if np.abs(values).max(initial=0.0) > _SPEED * _TOLERANCE:
                raise Silent(f"a velocity of {np.abs(values).max():.3f} rad/s was sent")
            return
        if ((values < _LOW - 1e-6) | (values > _HIGH + 1e-6)).any():
            raise Silent("a joint was sent out of its range")
        _check_steps(np.array([each[0] for _, each in sent]), np.array([at_s for at_s, _ in sent]))

    def _on_sent(self, message: Any) -> None:
        now_s, command = time.time(), self._read(message)
        if self.kind is JointTrajectory:  # a busy machine that delivers it late is no fault of its sender
            now_s = command.stamp_s
        points = [command] if self.kind is Float64MultiArray else [point.positions for point in command.points]
        self.sent.append((now_s, np.array(points)))
        if len(points) > 1:
            times_s = np.array([point.time_s for point in command.points])
            speed = float((np.abs(np.diff(points, axis=0)) / np.diff(times_s)[:, None]).max())
            if speed > _SPEED * _TOLERANCE:
                self._refused = f"a trajectory moves a joint at {speed:.3f} rad/s"
        try:
            self._controller.take(command, now_s)
        except CommandRefusedError as error:
            self._refused = str(error)

    def _on_guard(self, message: GuardState) -> None:
        self.passing = message.state == GuardState.PASSING

    def _on_timer(self) -> None:
        self._move()
        self._way.append(self.joints)
        if self.measured:
            self.states.publish(self.joint_state())
        self.driving()

    def _move(self) -> None:
        now_s = time.time()
        self._moved_s = max(self._moved_s, now_s - _LATE_S)
        while self._moved_s + CONTROL_DT_S <= now_s:
            self._state = self._controller.update(self._state, self._moved_s)
            self._moved_s += CONTROL_DT_S
        self.joints = self._state.positions


class _World:
    arm = TABLE_ARM


_LOW, _HIGH = np.array([TABLE_ARM.model().joint(name).range for name in JOINTS]).T


def _check_steps(begins: np.ndarray, times_s: np.ndarray) -> None:
    steps = np.abs(np.diff(begins.reshape(-1, len(HOME)), axis=0)).max(axis=1, initial=0.0)
    allowed = _SPEED * _TOLERANCE * np.maximum(np.diff(times_s), 2 * _PERIOD_S) + _SPEED * AHEAD_S
    if (steps > allowed).any():
        raise Silent(f"a step of {steps.max():.3f} rad was sent")


def seconds(time_s: float) -> Duration:
    """A message of a duration."""
    return Duration(sec=math.floor(time_s), nanosec=round(time_s % 1 * 1e9))


@contextmanager
def joint_arm_beside(
    name: str, scratch: Path, domain: int, output: str, *, of_joints: bool = True
) -> Iterator[tuple[JointArm, NodeProcess]]:
    """Driver or guard of joint commands as a process, and everybody around it."""
    parameters, log = {"driver": PATIENT_DRIVER, "guard": PATIENT_GUARD}[name], scratch / f"{name}_{output}.log"
    with attacker(domain) as user:
        process = NodeProcess(name, log, parameters, files=(_file(scratch, name, output, of_joints),))
        with running(process):
            arm = JointArm(user, name, output, of_joints=of_joints)
            if name == "driver":
                arm.activate(name)
            yield arm, process


def _file(scratch: Path, name: str, output: str, of_joints: bool) -> Path:
    """Parameters of driver or guard of the table's arm."""
    model, path = scratch / "arm.xml", scratch / f"{name}_{output}.yaml"
    model.write_text(TABLE_ARM.kinematics(), encoding="utf-8")
    chosen: dict[str, Any] = {
        "output": output,
        "base_frame": "base_link",
        "tool_pose_source": "joint_states",
        "joints.names": list(JOINTS),
        "joints.model": str(model),
        "joints.tool": "pinch",
        "joints.max_speed": [_SPEED],
        "joints.max_acceleration": [_ACCELERATION],
    }
    if name == "driver":
        chosen |= {"action_space": "joints" if of_joints else "tool"}
        chosen |= {"joints.check_order": output != Output.VELOCITY_ARRAY.value}  # else a controller must tell it
    write_parameters(path, chosen | LIMITS)
    return path
