# SPDX-License-Identifier: Apache-2.0
"""Everybody from the camera to the arm, in virtual time: the driver's and the guard's own code, and a simulated arm.

What is real here: `control/driver.py` and `control/follower.py`, `control/guard/`, the arm's physics and the rules of
its command interface. What is played: DDS (a delay, a queue), the nodes around that code, the policy (an expert that
answers when the engine would; it checks nothing, so that what is stale, doubled or out of order reaches the driver).
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from faults.timing import Timing
from faults.virtual_time import Message, VirtualTime
from support.limited_arm import LimitedPose, limit

from benchmarks.results_page import ROOT
from specvla_ros.control.action_space import ActionRefusedError, ToolSpace
from specvla_ros.control.bounded_motion import BoundedMotion, Target, TrackingVelocity
from specvla_ros.control.chunks import TrajectoryChunks, planned
from specvla_ros.control.convention import ActionConvention, StampedAction
from specvla_ros.control.driver import Driver, NotFollowingError
from specvla_ros.control.follower import ActionFollower
from specvla_ros.control.gripper import Gripper, GripperLimits, GripperSettings
from specvla_ros.control.guard.commands import (
    Command,
    GripperCommand,
    Instant,
    JointCommand,
    JointPositions,
    JointVelocities,
    Sent,
    SentJoints,
    SentTwist,
    SentVelocities,
    Stamp,
    ToolPose,
    TwistCommand,
)
from specvla_ros.control.guard.guard import Cause, Guard, Refusal, State
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.control.inverse_kinematics import (
    TRAJECTORY_AHEAD_S,
    JointSolver,
    UnreachableError,
    trajectory_point,
)
from specvla_ros.control.joint_path import JointPath
from specvla_ros.control.joint_velocity import JointTracking
from specvla_ros.control.limits import JointLimits, Limits
from specvla_ros.control.pose import Pose, PoseHistory, quaternion, quaternion_matrix
from specvla_ros.control.robot_model import JointModel, ToolKinematics
from specvla_ros.lab.simulation.arm import Arm
from specvla_ros.lab.simulation.arms import choose_arm
from specvla_ros.lab.simulation.collect import demonstrate
from specvla_ros.lab.simulation.commanded_arm import CommandedArm
from specvla_ros.lab.simulation.controllers import (
    BASE_FRAME,
    CONTROL_DT_S,
    CommandRefusedError,
    JointTrajectory,
    Point,
    Twist,
)
from specvla_ros.lab.simulation.motion_record import MotionRecorder
from specvla_ros.lab.simulation.robot import ACTION_DT_S
from specvla_ros.lab.simulation.tasks import TASKS, Task, WorldState, draw_layout
from specvla_ros.lab.simulation.world import World
from specvla_ros.ros.guard.node import Senders

CAMERA_S, ENABLE_S = 0.05, 0.1
IMAGE_DELAY_S = 0.01
POSE_TIMEOUT_S, GRAPH_S = 0.25, 0.5
DRIVER_GRAPH_S = 0.2
_GRIPPER_S = 0.5
_CONVENTION = ActionConvention(ACTION_DT_S)
_FLOOR_M = 0.005
_TURN_STOP_S = 0.15  # of the tool's rotation from full speed, for the same reason
_KEPT = 0.8  # of what the weakest joint can, for a tool that turns and moves at once
_FULL_M_S = 0.25  # of the tool, with which the joints get what the arm can do
_STOP_S = 0.1  # of a joint from full speed: leaves room in the promised 0.2 s for the lag of the arm itself


def limits(arm: Arm, speed: float) -> Limits:
    """Those of config/robots/simulated.yaml, scaled to a speed in m/s: a stop takes as long.

    A tool is not told to turn harder than each joint of the arm can: an arm that cannot follow its commands swings
    behind them, however bounded they are. The workspace ends 5 mm higher: an arm that is told to brake as hard as the
    limits allow goes that much too far, and fingers that hit the table are flung.
    """
    text = (ROOT / "config" / "robots" / "simulated.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)["/**"]["ros__parameters"]["limits"]
    share = speed / values["linear_speed"]
    motion = {name: share * value for name, value in values.items() if not name.startswith("workspace")}
    turning = min(motion["angular_acceleration"], _KEPT * min(arm.acceleration))
    motion |= {"angular_acceleration": turning, "angular_speed": min(motion["angular_speed"], _TURN_STOP_S * turning)}
    x, y, z = values["workspace_min"]
    return Limits(**motion, workspace_min=(x, y, z + _FLOOR_M), workspace_max=tuple(values["workspace_max"]))


def guard_settings(arm: Arm, output: str, speed: float) -> GuardSettings:
    """The guard's defaults, with the limits of the simulated arms and their joints."""
    model = kinematics(arm)
    ranges = np.array([model.joint(name).range for name in arm.joints])
    acceleration = np.array(arm.acceleration)
    share = min(1.0, speed / _FULL_M_S)
    joints = JointLimits(
        names=arm.joints,
        position_min=tuple(ranges[:, 0].tolist()),
        position_max=tuple(ranges[:, 1].tolist()),
        max_speed=tuple((share * np.minimum(arm.speed, _STOP_S * acceleration)).tolist()),
        max_acceleration=tuple((share * acceleration).tolist()),
    )
    fingers = GripperLimits("array", arm.gripper.joints[0], arm.gripper.open[0], arm.gripper.closed[0])
    return GuardSettings(
        output=output, base_frame=BASE_FRAME, limits=limits(arm, speed), joints=joints, gripper=fingers
    )


@lru_cache(maxsize=3)
def kinematics(arm: Arm) -> Any:
    """The arm alone, compiled."""
    import mujoco  # after specvla_ros.lab.simulation, which chooses how it draws

    return mujoco.MjModel.from_xml_string(arm.kinematics())


@lru_cache(maxsize=1)
def _world(arm: Arm) -> World:
    return World(arm)


@dataclass(frozen=True)
class Frame:
    """A picture, for an expert who need not look.

    Args:
        stamp_ns: what it says.
        state: what it shows.
    """

    stamp_ns: int
    state: WorldState


@dataclass(frozen=True)
class ActionMessage:
    """What the policy publishes.

    Args:
        stamp_ns: of its picture.
        values: float64 [7].
        instruction: that it follows.
    """

    stamp_ns: int
    values: np.ndarray
    instruction: str


@dataclass(frozen=True)
class Setup:
    """What a run is of.

    Args:
        robot: name of the arm.
        output: how it is commanded.
        speed: the tool's limit, m/s.
        timing: of the mode.
        seed: of everything that is drawn.
        guarded: whether the guard stands between driver and arm.
        limited: whether the arm keeps the guard's limits by itself, as the how-to has it.
    """

    robot: str
    output: str
    speed: float
    timing: Timing
    seed: int
    guarded: bool = True
    limited: bool = False


class Scene:
    """A task on a simulated arm.

    Attributes:
        time: of all of it; kills, freezes and silences.
        task: that is asked for.
        frame: what the camera sends in place of a picture.
        values: what the policy sends in place of its values.
        pose: what is said in place of the measured pose.
        command: what the driver sends in place of its command.
        states: steady time and state, whenever the guard's changed.
        halted_s: steady time when the arm first halted by itself, since it could not move as it should.
    """

    def __init__(self, setup: Setup, record: Path) -> None:
        self.setup, self.arm = setup, choose_arm(setup.robot)
        self.time = VirtualTime(setup.seed)
        self.settings = guard_settings(self.arm, setup.output, setup.speed)
        self.world = _world(self.arm)
        self.task: Task = self.time.random.choice(TASKS)
        self._commanded = CommandedArm(self.world, setup.output)  # it sets the world's time step
        self.world.reset(draw_layout(setup.seed))
        if setup.limited:
            limit(self._commanded, self.settings.limits, self.settings.joints)
        self._commanded.reset()
        self._record = MotionRecorder(record, self.world)
        self.frame: Callable[[Frame], list[Frame]] = lambda frame: [frame]
        self.values: Callable[[np.ndarray], np.ndarray] = lambda values: values
        self.pose: Callable[[ToolPose], ToolPose] = lambda pose: pose
        self.command: Callable[[Any], Any] = lambda command: command
        self.held = True  # the operator's hand is on the switch
        self.publishers: Counter[str] = Counter()  # beyond one, of each topic
        self.states: list[tuple[float, State]] = []
        self.refused: Counter[str] = Counter()
        self.taken_s: list[float] = []  # when the driver took an action
        self.succeeded_s: float | None = None
        self.halted_s = math.inf
        self._made = 0
        begin = self.time.process
        self._robot = begin("robot", lambda: None)
        self._state = begin("robot_driver", self._begin_state)
        begin("camera", self._begin_camera)
        begin("policy", self._begin_policy)
        begin("driver", self._begin_driver)
        if setup.guarded:
            begin("guard", self._begin_guard)
        begin("operator", self._begin_operator)
        self._listen()
        self.time.every(CONTROL_DT_S, self._robot, self._move)

    @property
    def passing(self) -> bool:
        """Whether the guard lets motion through; without one, always."""
        return not self.setup.guarded or (
            self.time.processes["guard"].alive and bool(self.states) and self.states[-1][1] is State.PASSING
        )

    def close(self) -> None:
        """Ends the record."""
        self._record.close()

    # Who says what to whom. Subscriptions outlive a process: the next one in its place has the same.

    def _listen(self) -> None:
        listen, processes = self.time.subscribe, self.time.processes
        listen("image", processes["policy"], lambda message: self._see(message.value))
        listen("action", processes["driver"], self._on_action)
        listen("tool_pose", processes["driver"], self._on_pose)
        listen("joint_states", processes["driver"], self._on_joints)
        if not self.setup.guarded:
            listen("command", self._robot, lambda message: self._obey(_robots_command(message.value, self._now_s)))
            listen("gripper", self._robot, lambda message: self._grip(float(message.value.positions[0])))
            return
        guard = processes["guard"]
        listen("guard/state", processes["driver"], self._on_passing)
        listen("guard/command", self._robot, lambda message: self._obey(message.value))
        listen("guard/gripper", self._robot, lambda message: self._grip(message.value))
        listen("command", guard, self._alone("command", self._on_command))
        listen("gripper", guard, self._alone("gripper", lambda m, now: self.guard.gripper(m.value, now)))
        listen("tool_pose", guard, self._alone("tool_pose", lambda m, now: self.guard.tool(m.value, now)))
        listen("joint_states", guard, lambda message: self.guard.joints(message.value, self._now()))
        listen("action", guard, self._alone("action", self._on_sign_of_life))
        listen("enable", guard, self._alone("enable", lambda m, now: self.guard.enable(m.value, now)))
        listen("stop", guard, lambda message: self.guard.press_stop("topic", self._now()))
        listen("clear_stop", guard, lambda message: self.guard.clear_stop(self._now()))
        listen("instruction", guard, lambda message: self.guard.instruction(message.value))

    # The arm: physics, its controller's rules, what really happened

    @property
    def _now_s(self) -> float:
        return self.time.clocks.s

    def _now(self) -> Instant:
        return Instant(self.time.clocks.steady_s, self.time.clocks.ns)

    def stamp(self) -> Stamp:
        """Now, in the base frame."""
        return Stamp(self.time.clocks.ns, BASE_FRAME)

    def _move(self) -> None:
        self._commanded.advance(self._now_s)
        now_s, controller = self.time.clocks.steady_s, self._commanded.controller
        if isinstance(controller, LimitedPose) and controller.halted:
            self.halted_s = min(self.halted_s, now_s)
        self._record.add(now_s, 0, self.succeeded_s is None)
        if self.succeeded_s is None and self.task.succeeded(self.world.state()):
            self.succeeded_s = now_s

    def _obey(self, command: Any) -> None:
        try:
            self._commanded.controller.take(command, self._now_s)
        except CommandRefusedError:
            self.refused["robot: refused"] += 1

    def _grip(self, position: float) -> None:
        gripper = self._commanded.gripper
        gripper.obey(gripper.array, np.array([position]), self._now_s)

    def _begin_state(self) -> None:
        self.time.every(CONTROL_DT_S, self.time.processes["robot_driver"], self._measure)

    def measured(self) -> ToolPose:
        """Where the tool is."""
        tool = self.world.tool()
        return ToolPose(self.stamp(), tool.position, quaternion(tool.rotation))

    def joint_positions(self) -> np.ndarray:
        """Of the arm, float64 [joints]."""
        return self.world.joint_state()[0][: len(self.arm.joints)]

    def _measure(self) -> None:
        self.time.publish("tool_pose", self.pose(self.measured()), "robot")
        positions, _ = self.world.joint_state()
        self.time.publish("joint_states", JointPositions(self.stamp(), self.arm.joint_names, positions), "robot")

    # Camera and policy

    def _begin_camera(self) -> None:
        self.time.every(CAMERA_S, self.time.processes["camera"], self._look)

    def _look(self) -> None:
        for frame in self.frame(Frame(self.time.clocks.ns, self.world.state())):
            self.time.publish("image", frame, "camera", IMAGE_DELAY_S)

    def _begin_policy(self) -> None:
        self._made += 1
        self._seen: list[Frame] = []
        self._decide_from(0, self.time.clocks.steady_s)

    def _see(self, frame: Frame) -> None:
        self._seen = [frame]

    def _decide_from(self, index: int, began_s: float) -> None:
        """Takes the newest picture when the engine did, and answers as late as it did."""
        timing, policy = self.setup.timing, self.time.processes["policy"]
        if index == len(timing.pictured_s):
            index, began_s = 0, began_s + timing.lasts_s
        now_s, sender = self.time.clocks.steady_s, f"policy {self._made}"

        def decide() -> None:
            if self._seen:
                frame = self._seen.pop()
                values = self.values(demonstrate(self.task, frame.state))
                action = ActionMessage(frame.stamp_ns, values, self.task.instruction)
                answer_s = timing.published_s[index] - timing.pictured_s[index]
                self.time.after(answer_s, policy, lambda: self.time.publish("action", action, sender))
            self._decide_from(index + 1, began_s)

        self.time.after(max(0.0, began_s + timing.pictured_s[index] - now_s), policy, decide)

    # The driver

    def _begin_driver(self) -> None:
        self._made += 1
        self._driver_name = f"driver {self._made}"
        self._history, self._joints = PoseHistory[Pose](), dict[str, float]()
        fingers = self.arm.gripper
        self._gripper = Gripper(GripperSettings(open_value=fingers.open[0], closed_value=fingers.closed[0]))
        self._gripped: tuple[float, float] | None = None
        bounds = self.settings.limits
        model = self._joint_model()
        if self.setup.output == "joint_trajectory_chunk":
            model = planned(model)
        self._solver = JointSolver(model, CONTROL_DT_S)
        self._tracking = JointTracking(self._solver)
        self._chunks = TrajectoryChunks(self._solver, self.settings.joints.chunk_s, bounds.stop_s)
        follower = ActionFollower(
            ToolSpace(bounds, max_step_rad=1.5), BoundedMotion(bounds), self._gripper, self._history
        )
        self.driver = Driver(
            follower,
            self._history,
            tracking=TrackingVelocity(bounds) if self.setup.output == "twist" else None,
            pose_timeout_s=POSE_TIMEOUT_S,
            pose_source="topic",
            start_output=self._start_output,
            say=lambda reason: None,
        )
        process = self.time.processes["driver"]
        self.time.every(CONTROL_DT_S, process, self._step)
        self.time.every(DRIVER_GRAPH_S, process, self._count_publishers)

    def _start_output(self) -> None:
        if self.settings.kind.of_joints:
            self._solver.start(self._joints)
            self._chunks.start()
            self._tracking.rest()

    def _count_publishers(self) -> None:
        self.driver.action_publishers = 1 + self.publishers["action"]

    def _on_action(self, message: Message) -> None:
        action = message.value
        try:
            self.driver.take(StampedAction(action.stamp_ns * 1e-9, action.values[None], _CONVENTION), self._now_s)
        except NotFollowingError:
            self.refused["driver: not_following"] += 1
        except ActionRefusedError as error:
            self.refused[f"driver: {error.refusal.value}"] += 1
        else:
            self.taken_s.append(self.time.clocks.steady_s)

    def _on_pose(self, message: Message) -> None:
        """What is no pose is left out, as the node's `tool_pose.py` does."""
        pose = message.value
        try:
            rotation = quaternion_matrix(*pose.quaternion)
        except ValueError:
            return
        if np.isfinite(pose.position).all():
            self._history.add((pose.stamp.ns or 0) * 1e-9, Pose(pose.position, rotation))

    def _on_joints(self, message: Message) -> None:
        joints = message.value
        self._joints = dict(zip(joints.names, joints.positions.tolist(), strict=True))

    def _on_passing(self, message: Message) -> None:
        self.driver.passing(message.value, self._now_s)

    def _step(self) -> None:
        target = self.driver.step(self._now_s, self.time.clocks.steady_s)
        if target is None:
            return
        try:
            command = self._drivers_command(target)
        except UnreachableError:
            self.refused["driver: unreachable"] += 1
            self.driver.follower.hold(self._now_s)
            return
        if command is not None:
            self.time.publish("command", self.command(command), self._driver_name)
        self._send_gripper()

    def _send_gripper(self) -> None:
        position, now_s = self._gripper.position, self.time.clocks.steady_s
        if position is None:
            return
        if self._gripped is not None and self._gripped[0] == position and now_s - self._gripped[1] < _GRIPPER_S:
            return
        self._gripped = (position, now_s)
        self.time.publish("gripper", GripperCommand(None, np.array([position])), self._driver_name)

    def _drivers_command(self, target: Target) -> Command | None:
        output, stamp = self.setup.output, self.stamp()
        if output == "pose":
            return ToolPose(stamp, target.pose.position, quaternion(target.pose.rotation))
        if output == "twist":
            return TwistCommand(stamp, target.velocity)
        if output == "joint_trajectory_chunk":
            path = self._chunks.next(target, self.driver.follower, self._now_s)
            if path is None:
                return None
            return JointCommand(stamp, self.arm.joints, path.positions, path.times_s, path.velocities)
        if output == "velocity_array":
            measured = self._joints if not self.driver.problem and not self.driver.guarded else None
            return JointVelocities(Stamp(None), self._tracking.next(target, measured, CONTROL_DT_S))
        positions, velocities = self._solver.follow(target)
        if output == "position_array":
            return JointCommand(stamp, None, positions[None], np.zeros(1))
        ahead = trajectory_point(positions, velocities)
        return JointCommand(stamp, self.arm.joints, ahead[None], np.array([TRAJECTORY_AHEAD_S]))

    def _joint_model(self) -> JointModel:
        limits = self.settings.joints
        bounds: dict[str, Any] = {"max_acceleration": limits.accelerations, "max_jerk": limits.jerks}
        return JointModel(kinematics(self.arm), self.arm.joints, "pinch", limits.speeds, **bounds)

    # The guard

    def _begin_guard(self) -> None:
        self.guard = Guard(self.settings, ToolKinematics(self._joint_model()))
        self._senders = Senders()
        self._said: bool | None = None
        self.states.append((self.time.clocks.steady_s, State.HOLDING))
        process = self.time.processes["guard"]
        self.time.every(1 / self.settings.rate_hz, process, self._tick)
        self.time.every(GRAPH_S, process, self._look_for_sources)
        self.time.every(GRAPH_S / 5, process, self._say_passing)

    def _alone(self, topic: str, use: Callable[[Message, Instant], None]) -> Callable[[Message], None]:
        """As the node does: two that take turns on a topic are refused at once."""

        def take(message: Message) -> None:
            now = self._now()
            sender = {"publisher_gid": {"data": message.sender.encode()}}
            if self._senders.is_second_publisher(topic, sender, now.steady_s):
                self.guard.reject(Refusal(Cause.TWO_SOURCES, f"two publishers take turns on {topic}"), now)
            else:
                use(message, now)

        return take

    def _on_command(self, message: Message, now: Instant) -> None:
        command = message.value
        if isinstance(command, JointCommand) and command.names is None:  # a position array has no stamp: DDS's is taken
            transit_ns = round((now.steady_s - message.sent_s) * 1e9)
            command = replace(command, stamp=Stamp(now.clock_ns - transit_ns))
        self.guard.command(command, now)

    def _on_sign_of_life(self, message: Message, now: Instant) -> None:
        self.guard.action(Stamp(message.value.stamp_ns, BASE_FRAME), message.value.instruction, now)

    def _look_for_sources(self) -> None:
        twice = [topic for topic, count in self.publishers.items() if count]
        self.guard.sources(f"{twice[0]} has two publishers" if twice else "")

    def _say_passing(self) -> None:
        passing = self.guard.state is State.PASSING
        if passing is not self._said:
            self._said = passing
            self.time.publish("guard/state", passing, "guard")

    def _tick(self) -> None:
        outcome = self.guard.tick(self._now())
        if self.guard.state is not self.states[-1][1]:
            self.states.append((self.time.clocks.steady_s, self.guard.state))
        if outcome.sent is not None and not getattr(outcome.sent, "sent_before", False):
            self.time.publish("guard/command", _sent_command(outcome.sent, self), "guard")
        if outcome.gripper is not None:
            self.time.publish("guard/gripper", outcome.gripper, "guard")

    # The operator

    def _begin_operator(self) -> None:
        self._made += 1
        name = f"operator {self._made}"
        self.time.every(ENABLE_S, self.time.processes["operator"], lambda: self.time.publish("enable", self.held, name))

    def release(self) -> None:
        """Lets go of the dead-man's switch, which says so."""
        self.held = False
        self.time.publish("enable", False, f"operator {self._made}")


def _robots_command(command: Command, now_s: float) -> Any:
    """What the arm's controller takes, straight from the driver."""
    if isinstance(command, ToolPose):
        with np.errstate(invalid="ignore"):
            return command.stamp.frame_id, Pose(command.position, _rotation(command.quaternion))
    if isinstance(command, TwistCommand):
        stamp_s = (command.stamp.ns or 0) * 1e-9
        return Twist(stamp_s, command.stamp.frame_id, command.velocity[:3], command.velocity[3:])
    if isinstance(command, JointVelocities):
        return command.velocities
    if command.names is None:
        return command.positions[0]
    return _trajectory(command.names, JointPath(command.times_s, command.positions, command.velocities))


def _trajectory(names: tuple[str, ...], path: JointPath) -> JointTrajectory:
    nothing = np.zeros(0)
    moving = [nothing] * len(path.times_s) if path.velocities is None else path.velocities
    states = zip(path.times_s.tolist(), path.positions, moving, strict=True)
    return JointTrajectory(0.0, names, tuple(Point(*state, nothing) for state in states))


def _rotation(wxyz: tuple[float, float, float, float]) -> np.ndarray:
    try:
        return quaternion_matrix(*wxyz)
    except ValueError:
        return np.full((3, 3), np.nan)


def _sent_command(sent: Sent, scene: Scene) -> Any:
    """What the arm's controller takes, from the guard; as ros/motion_messages.py writes it."""
    if isinstance(sent, SentTwist):
        return Twist(scene.time.clocks.s, BASE_FRAME, sent.velocity[:3], sent.velocity[3:])
    if isinstance(sent, Pose):
        return BASE_FRAME, Pose(sent.position, sent.rotation)
    if isinstance(sent, SentVelocities):
        return sent.velocities
    assert isinstance(sent, SentJoints)
    if scene.setup.output == "position_array":
        return sent.positions
    ahead = trajectory_point(sent.positions, sent.velocities)
    return _trajectory(scene.arm.joints, sent.path or JointPath(np.array([TRAJECTORY_AHEAD_S]), ahead[None]))
