# SPDX-License-Identifier: Apache-2.0
"""The simulated robot's subscriptions: actions or motion commands, and instructions."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.node import Node
from std_msgs.msg import Float64MultiArray, String
from trajectory_msgs.msg import JointTrajectory as JointTrajectoryMessage

from specvla_ros.control.convention import ActionFrame, GripperSign, Reference, Rotation
from specvla_ros.control.pose import Pose, quaternion_matrix, rotation_vector, rpy_matrix
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.commanded_arm import CommandedArm
from specvla_ros.lab.simulation.controllers import CommandRefusedError, JointTrajectory, Point, Twist
from specvla_ros.lab.simulation.robot import SimulatedRobot
from specvla_ros.messages.image_message import stamp_ns
from specvla_ros.models.observation import normalise_instruction
from specvla_ros.msg import VlaAction
from specvla_ros.ros.qos import ACTION, LATCHED_INSTRUCTION

_TOO_FAR = 4.0  # limit as a multiple of the training data's largest translation; actions beyond it are errors
_ECHO_S = 2.0  # maximum time until a node receives its own message


class ActionIgnoredError(Exception):
    """An action that is too late or belongs to another episode, as in normal operation."""


class ActionRefusedError(ActionIgnoredError):
    """An invalid action, which no policy should send."""


@dataclass(frozen=True)
class Expected:
    """The images and the instruction that an action may answer."""

    began_ns: int  # stamp of the episode's start
    last_taken_ns: int  # stamp of the last action taken in it; 0: none
    newest_ns: int  # stamp of the newest image
    only_newest: bool  # only the newest image may be answered
    instruction: str  # the current instruction


def check_relevance(stamp_ns: int, instruction: str, expected: Expected) -> None:
    """Raises ActionIgnoredError unless an action answers a new image of this episode under the current instruction.

    `instruction` is empty if the sender does not report it.
    """
    if stamp_ns < expected.began_ns:
        raise ActionIgnoredError("it answers an image from before the episode's start")
    if stamp_ns <= expected.last_taken_ns:
        raise ActionIgnoredError("it is not newer than the last action taken")
    if stamp_ns > expected.newest_ns:
        raise ActionIgnoredError("its stamp is later than the newest image's: is another camera running?")
    if expected.only_newest and stamp_ns != expected.newest_ns:
        raise ActionIgnoredError(
            "it answers an image that the robot no longer waits for; set action_timeout_s above the policy's latency"
        )
    if instruction and normalise_instruction(instruction) != normalise_instruction(expected.instruction):
        raise ActionIgnoredError(
            f"it follows '{instruction}', but '{expected.instruction}' is in force; if this persists, remap the "
            "policy's topic 'instruction' to /instruction"
        )


def check_convention(message: VlaAction) -> None:
    """Raises ActionRefusedError unless the values are displacements of the tool along the base's axes."""
    if message.action_frame == ActionFrame.JOINTS.value:
        raise ActionRefusedError(
            "its values are joint positions, but this arm takes displacements of its tool: start it with "
            "command:=joint_trajectory behind a driver with action_space: joints"
        )
    if message.reference == Reference.ABSOLUTE.value or message.action_frame == ActionFrame.TOOL.value:
        given = "poses" if message.reference == Reference.ABSOLUTE.value else "displacements along the tool's axes"
        raise ActionRefusedError(
            f"its values are {given}, but this arm takes displacements along the base's axes: start it with "
            "command:=pose behind a driver, or correct the policy's action.reference and action.frame"
        )


def robot_values(
    values: Sequence[float],
    action_dt: float,
    *,
    robot_dt: float,
    largest_translation: float,
    rotation: str = "",
    gripper: str = "",
) -> np.ndarray:
    """An action's values as the robot takes them, scaled to its period at unchanged speed.

    Args:
        values: 3 translations, 3 rotations [rad], gripper.
        action_dt, robot_dt: duration in seconds of an action's displacements, for the policy and for the robot.
        largest_translation: maximum of the training data in `robot_dt`; several times that is refused.
        rotation, gripper: their convention in VlaAction; empty: the robot's own, rotation_vector and open_high.

    Raises:
        ActionRefusedError: the values are unusable.
    """
    if len(values) != 7:
        raise ActionRefusedError(f"it has {len(values)} values, but this robot takes 7: x y z, roll pitch yaw, gripper")
    taken = np.array(values, dtype=np.float64)
    if not np.isfinite(taken).all():
        raise ActionRefusedError(f"its values are not all finite: {taken.tolist()}")
    if not (math.isfinite(action_dt) and action_dt > 0):
        raise ActionRefusedError(f"its action_dt is {action_dt} s; set the policy's parameter action.dt")
    taken[:6] *= robot_dt / action_dt
    distance, turn = (float(np.linalg.norm(part)) for part in (taken[:3], taken[3:6]))
    if not distance <= _TOO_FAR * largest_translation:
        raise ActionRefusedError(
            f"it would move the hand by {distance:.3f} m in {robot_dt:g} s, but the limit is "
            f"{_TOO_FAR * largest_translation:.3f} m; is this another robot's policy, or is its action_dt wrong?"
        )
    if not turn <= math.pi:
        raise ActionRefusedError(f"it would turn the hand by {turn:.3f} rad in {robot_dt:g} s, but the limit is pi")
    if rotation == Rotation.RPY.value:
        taken[3:6] = rotation_vector(rpy_matrix(np.array(values[3:6]))) * (robot_dt / action_dt)
    if gripper == GripperSign.CLOSE_HIGH.value:
        taken[6] = 1.0 - taken[6]
    return taken


class ActionInput:
    """Forwards the actions that the robot may take, and logs why it does not take the others.

    `expected` returns what an action must answer now, or None if no action is expected. `on_action` is called with an
    action's values, in the robot's period, and its stamp [ns]; `on_ignored` with the stamp of an action that is not
    taken, or 0 if the stamp is invalid.
    """

    def __init__(
        self,
        node: Node,
        robot: SimulatedRobot,
        *,
        expected: Callable[[], Expected | None],
        on_action: Callable[[np.ndarray, int], None],
        on_ignored: Callable[[int], None],
    ) -> None:
        self._logger, self._robot = node.get_logger(), robot
        self._expected, self._on_action, self._on_ignored = expected, on_action, on_ignored
        self._begun_ns = 0  # stamp of an answer whose first action was taken while the rest is being decoded
        self._subscription = node.create_subscription(VlaAction, "/policy/action", self._on_message, ACTION)

    @property
    def topic(self) -> str:
        """The topic's name, as remapped."""
        return str(self._subscription.topic_name)

    def _on_message(self, message: VlaAction) -> None:
        expected = self._expected()
        if expected is None:
            return
        stamp = 0
        try:
            stamp = _action_stamp(message)
            if stamp == self._begun_ns:  # only the first action of a chunk is followed
                return
            self._begun_ns = stamp if message.partial else 0
            check_relevance(stamp, message.instruction, expected)
            check_convention(message)
            values = robot_values(
                message.values[: len(message.values) // max(1, message.horizon)],  # the first action of a chunk
                message.action_dt,
                robot_dt=self._robot.action_dt,
                largest_translation=self._robot.largest_translation,
                rotation=message.rotation,
                gripper=message.gripper,
            )
        except ActionIgnoredError as why:
            if isinstance(why, ActionRefusedError):
                self._logger.error(f"an action was refused: {why}", throttle_duration_sec=5.0)
            else:
                self._logger.warning(f"an action was ignored: {why}", throttle_duration_sec=5.0)
            self._on_ignored(stamp)
        else:
            self._on_action(values, stamp)


def _action_stamp(message: VlaAction) -> int:
    try:
        return stamp_ns(message.header)
    except UserError as error:
        raise ActionRefusedError(str(error).split(";")[0]) from None


class CommandInput:
    """Passes commands of one of COMMANDS to the arm, and logs why the arm refuses others.

    Commands that arrive while `obeys` returns False, because the arm's controllers are off, are dropped. `on_command`
    is called after each command taken, `on_refused` after each refused. `now_s` is the robot's clock.
    """

    def __init__(
        self,
        node: Node,
        arm: CommandedArm,
        command: str,
        *,
        now_s: Callable[[], float],
        obeys: Callable[[], bool],
        on_command: Callable[[], None],
        on_refused: Callable[[], None],
    ) -> None:
        gripper = arm.gripper

        def listen(kind: Any, name: str, take: Callable[[Any, float], None], read: Callable[[Any], Any]) -> Any:
            def on_message(message: Any) -> None:
                if not obeys():
                    return
                try:
                    take(read(message), now_s())
                except CommandRefusedError as why:
                    node.get_logger().error(f"a command on {name} was refused: {why}", throttle_duration_sec=5.0)
                    on_refused()
                else:
                    on_command()

            return node.create_subscription(kind, f"~/command/{name}", on_message, ACTION)

        kind, name, read = _INTERFACES[command]
        self._motion = listen(kind, name, arm.controller.take, read)
        listen(Float64MultiArray, "gripper", partial(gripper.obey, gripper.array), _array)
        listen(JointTrajectoryMessage, "gripper_trajectory", partial(gripper.obey, gripper.trajectory), _trajectory)

    @property
    def topic(self) -> str:
        """The motion commands' topic, as remapped."""
        return str(self._motion.topic_name)


def _pose(message: PoseStamped) -> tuple[str, Pose]:
    place, turn = message.pose.position, message.pose.orientation
    parts = np.array([turn.w, turn.x, turn.y, turn.z])
    size = float(np.linalg.norm(parts))
    rotation = quaternion_matrix(*(parts / size)) if 0.0 < size < np.inf else np.full((3, 3), np.nan)
    return message.header.frame_id, Pose(np.array([place.x, place.y, place.z]), rotation)


def _twist(message: TwistStamped) -> Twist:
    header, axes = message.header, (message.twist.linear, message.twist.angular)
    return Twist(_seconds(header.stamp), header.frame_id, *(np.array([axis.x, axis.y, axis.z]) for axis in axes))


def _trajectory(message: JointTrajectoryMessage) -> JointTrajectory:
    points = tuple(
        Point(_seconds(point.time_from_start), *map(np.array, (point.positions, point.velocities, point.accelerations)))
        for point in message.points
    )
    return JointTrajectory(_seconds(message.header.stamp), tuple(message.joint_names), points)


def _array(message: Float64MultiArray) -> np.ndarray:
    return np.array(message.data)


def _seconds(time: Time | Duration) -> float:
    return time.sec + time.nanosec * 1e-9


_INTERFACES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "pose": (PoseStamped, "pose", _pose),
    "twist": (TwistStamped, "twist", _twist),
    "joint_trajectory": (JointTrajectoryMessage, "joint_trajectory", _trajectory),
    "joint_trajectory_chunk": (JointTrajectoryMessage, "joint_trajectory", _trajectory),
    "position_array": (Float64MultiArray, "joint_positions", _array),
    "velocity_array": (Float64MultiArray, "joint_velocities", _array),
}


class InstructionTopic:
    """Publishes instructions, and calls `on_other` for those of other nodes that differ from the current one.

    It also receives its own messages. ROS does not report a message's sender, so echoes are recognised by their text:
    they arrive soon, and in the order of publication.
    """

    def __init__(self, node: Node, on_other: Callable[[str], None]) -> None:
        self._on_other = on_other
        self._echoes: list[tuple[str, float]] = []
        self.current = ""
        self._publisher = node.create_publisher(String, "/instruction", LATCHED_INSTRUCTION)
        # Volatile, to match latching publishers and others; instructions older than this node's own are out of date.
        self._subscription = node.create_subscription(String, "/instruction", self._on_message, ACTION)

    def tell(self, text: str) -> None:
        """Publishes an instruction and makes it the current one."""
        self.current = text
        self._echoes.append((text, time.monotonic() + _ECHO_S))
        self._publisher.publish(String(data=text))

    def _on_message(self, message: String) -> None:
        now_s = time.monotonic()
        self._echoes = [(text, until_s) for text, until_s in self._echoes if now_s < until_s]
        texts = [text for text, _ in self._echoes]
        if message.data in texts:  # earlier ones were overwritten in transit
            del self._echoes[: texts.index(message.data) + 1]
            return
        if message.data == self.current:
            return
        self.current = message.data
        self._on_other(message.data)
