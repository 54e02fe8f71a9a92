# SPDX-License-Identifier: Apache-2.0
"""The simulated arm and its camera as processes of their own, which do what robots do when they fail.

The arm lies on `tool_pose` and `joint_states`, sets the clock of all, does not hear what it is sent, brakes by itself,
or says that it was stopped: by a name on /arm/fault, until an empty one comes. What it really does is recorded on a
time that no fault changes, which /arm/time tells beside the machine's clock.

    python -m faults.robot_process robot --ros-args --params-file robot.yaml   (or with_clock, as /clock)
    python -m faults.robot_process camera --robot panda --task put_red --seed 1
"""

import argparse
import copy
import itertools
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import rclpy
from builtin_interfaces.msg import Time as TimeMessage
from rclpy.experimental import EventsExecutor
from rclpy.time import Time
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Bool, Float64MultiArray, String
from support.fault_scene import guard_settings
from support.limited_arm import LimitedPose, limit, nearest_rest

from specvla_ros.lab.ros.sim_robot import node as sim_robot
from specvla_ros.lab.ros.sim_robot.episodes import Episode, EpisodeState
from specvla_ros.lab.ros.sim_robot.node import SimRobot
from specvla_ros.lab.ros.sim_robot.outputs import IMAGE_TOPIC
from specvla_ros.lab.simulation.arms import choose_arm
from specvla_ros.lab.simulation.commanded_arm import CommandedArm
from specvla_ros.lab.simulation.controllers import JointState as Joints
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.lab.simulation.tasks import draw_layout
from specvla_ros.ros import node
from specvla_ros.ros.node import raise_priority, run_node
from specvla_ros.ros.qos import ACTION, LATCHED_STATE, NEWEST_IMAGE, STATE

FAULT_TOPIC, TIME_TOPIC, RUNNING_TOPIC, WORLD_TOPIC = "/arm/fault", "/arm/time", "/arm/running", "/arm/world"
IMAGE_SIZE = 112
_PRIORITY = 5  # a robot is no process among others; below the guard's and the driver's
_TELL_STEPS, _SAID_STEPS, _STILL_TICKS = 5, 2, 10
EPOCH_NS = 60 * 10**9  # of the clock, which goes back by seconds and must not become negative
_POLLS = 2  # between two steps: each costs as much as a step
_OLD_NS, _LEAP_M = 10**9, 0.1
_AWAY_M = 0.1  # from the hand
SPEED = 0.25  # m/s, the tool's limit
# An arm stops where a joint's external torque reaches this share of its motor's, and runs again so much later.
_PRESSES, RESTS_S = 0.25, 1.0

Change = Callable[[Any], Any]


def _silent(message: Any) -> None:
    return None


def _older(message: Any) -> Any:
    stamp_ns = Time.from_msg(message.header.stamp).nanoseconds
    message.header.stamp = Time(nanoseconds=max(1, stamp_ns - _OLD_NS)).to_msg()
    return message


def _pose_of_nan(message: Any) -> Any:
    message.pose.position.y = float("nan")
    return message


def _pose_elsewhere(message: Any) -> Any:
    message.pose.position.y += _LEAP_M
    return message


def _joints_of_nan(message: Any) -> Any:
    message.position[1] = float("nan")
    return message


def _joints_reversed(message: Any) -> Any:
    for column in ("name", "position", "velocity"):
        setattr(message, column, [*getattr(message, column)][::-1])
    return message


# What is said in place of the truth: of which topic, and how.
LIES: dict[str, tuple[str, Change]] = {
    "tool_pose silent": ("tool_pose", _silent),
    "tool_pose of NaN": ("tool_pose", _pose_of_nan),
    "tool_pose old": ("tool_pose", _older),
    "tool_pose leaps": ("tool_pose", _pose_elsewhere),
    "joint_states silent": ("joint_states", _silent),
    "joint_states of NaN": ("joint_states", _joints_of_nan),
    "joint_states old": ("joint_states", _older),
    "joint_states in another order": ("joint_states", _joints_reversed),
}
# The clock of all nodes: its rate, and how far it jumps, seconds.
CLOCKS = {
    "clock still": (0.0, 0.0),
    "clock ahead 5 s": (1.0, 5.0),
    "clock back 5 s": (1.0, -5.0),
    "clock slow": (0.3, 0.0),
    "clock fast": (3.0, 0.0),
}
LINK_LOST, PROTECTIVE_STOP, STUCK = "link lost", "protective stop", "stuck"
TIDY = "tidy"  # no fault: somebody puts the things elsewhere, and asks for another


class _Said:
    """A publisher whose messages can be changed, or kept back (None); of the others each second one goes out: 50 Hz."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._count = 0
        self.change: Change | None = None

    def publish(self, message: Any) -> None:
        self._count += 1
        if self._count % _SAID_STEPS:
            return
        said = self.change(copy.deepcopy(message)) if self.change is not None else message
        if said is not None:
            self._publisher.publish(said)


class _Clock:
    """Tells the time when it is another, and now and then what it is: more often is asked for than it goes on.

    Args:
        publisher: None: nobody is told.
    """

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._told: Any = None
        self._count = 0

    def publish(self, message: Any) -> None:
        self._count += 1
        if self._publisher is not None and (message != self._told or self._count % _STILL_TICKS == 0):
            self._told = message
            self._publisher.publish(message)


class _Brake:
    """A controller that goes on, and an arm that for a while does not follow it but comes to rest at its own limits."""

    def __init__(self, arm: CommandedArm) -> None:
        self._arm, self._controller = arm, arm.controller
        self._rest: np.ndarray | None = None  # joint positions

    def start(self, measured: Joints) -> None:
        self._controller.start(measured)

    def take(self, command: Any, now_s: float) -> None:
        self._controller.take(command, now_s)

    def update(self, measured: Joints, now_s: float) -> Joints:
        reference = self._controller.update(measured, now_s)
        return reference if self._rest is None else Joints(self._rest, np.zeros_like(self._rest))

    @property
    def held(self) -> bool:
        return self._rest is not None

    def hold(self, position: np.ndarray | None = None) -> None:
        """Comes to rest from a position, float64 [joints], or from where the arm was sent."""
        servo = self._arm._servo
        self._rest = nearest_rest(servo, servo._reference if position is None else position)

    def release(self) -> None:
        self._rest = None


class FaultyRobot(SimRobot):
    """The package's simulated arm, with limits and protective stops of its own as the how-to has it.

    Its tasks follow one another without a reset: no robot leaps back to its start.

    Args:
        with_clock: whether it gives all nodes their time; else it stamps with the machine's, as robots do.
    """

    def __init__(self, with_clock: bool, **node_arguments: Any) -> None:
        super().__init__(**node_arguments)
        self._with_clock = with_clock
        self._arm_s = self._began_at_s = self._ended_at_s = 0.0
        self._steps_told = 0
        self._stopped_at_s: float | None = None  # when it stopped by itself
        self._fault = ""
        outputs: Any = self._outputs
        self._said = {"tool_pose": _Said(outputs._tool), "joint_states": _Said(outputs._joints)}
        outputs._tool, outputs._joints = self._said["tool_pose"], self._said["joint_states"]
        outputs._clock = _Clock(outputs._clock if with_clock else None)
        outputs.image = self._show
        self._world = self.create_publisher(JointState, WORLD_TOPIC, STATE)
        self._times = self.create_publisher(Float64MultiArray, TIME_TOPIC, ACTION)
        self._running = self.create_publisher(Bool, RUNNING_TOPIC, LATCHED_STATE)
        self._running.publish(Bool(data=True))
        self.create_subscription(String, FAULT_TOPIC, self._on_fault, ACTION)
        raise_priority(_PRIORITY)

    def _listen(self) -> Any:
        """Commands go to the arm by way of its limits and its brake."""
        assert self._arm is not None, "commands, not actions, move this one"
        settings = guard_settings(choose_arm(self._chosen.robot), self._chosen.command, SPEED)
        limit(self._arm, settings.limits, settings.joints)
        self._limited = self._arm.controller
        self._brake = self._arm.controller = _Brake(self._arm)
        self._arm.reset()
        return super()._listen()

    def _on_fault(self, message: String) -> None:
        """Undoes what is, and begins another."""
        name = message.data
        for topic, said in self._said.items():
            said.change = LIES[name][1] if name in LIES and LIES[name][0] == topic else None
        rate, jump_s = CLOCKS.get(name, (1.0, 0.0))
        self._step_ns = round(rate * self._control_dt * 1e9)
        self._now_ns += round(jump_s * 1e9)
        self._off_until_ns = sys.maxsize if name == LINK_LOST else 0
        if name == TIDY:
            self._tidy()
        else:
            self._fault = name
            self._brake_for_fault()
        if name:
            self._began_at_s = self._arm_s
        else:
            self._ended_at_s = self._arm_s
        self._tell()

    def _brake_for_fault(self) -> None:
        """A stop of the arm's own goes on beside a fault, and a fault outlasts that stop."""
        holds = self._fault in (PROTECTIVE_STOP, STUCK)
        if self._stopped_at_s is None:
            (self._brake.hold if holds else self._brake.release)()
            self._running.publish(Bool(data=self._fault != PROTECTIVE_STOP))

    def _tidy(self) -> None:
        world = self.robot.world
        hand = world.tool().position[:2]
        for seed in itertools.count(self._steps_told):
            poses = draw_layout(seed).poses
            if all(np.linalg.norm(hand - pose[:2]) > _AWAY_M for pose in poses.values()):
                break
        for body, pose in poses.items():
            if body != "block":  # which does not move
                world._place(body, pose)
                world.data.joint(int(world.model.body(body).jntadr[0])).qvel[:] = 0.0
        self._end(EpisodeState.FAILED)

    def _step(self) -> None:
        if not self._with_clock:
            self._now_ns = time.time_ns() - self._step_ns
        super()._step()

    def _note_motion(self) -> None:
        self._arm_s += self._control_dt
        if self._record is not None:
            self._record.add(self._arm_s, 0, True)
        self._stop_by_itself()
        self._steps_told += 1
        if self._steps_told % _TELL_STEPS == 0:
            self._tell()

    def _stop_by_itself(self) -> None:
        """Stops and says so where the arm meets resistance or cannot follow, as robots do; soon it runs again."""
        if self._stopped_at_s is not None:
            if self._arm_s - self._stopped_at_s > RESTS_S:
                self._stopped_at_s = None
                self._run_again()
        elif not self._brake.held and (self._presses() or self._cannot_follow()):
            self._stopped_at_s = self._arm_s
            self._brake.hold(self._measured().positions)  # not where it was sent: it would press on
            self._running.publish(Bool(data=False))

    def _run_again(self) -> None:
        """From where the arm is, not where it was sent meanwhile."""
        self._brake.start(self._measured())
        self._brake_for_fault()

    def _measured(self) -> Joints:
        assert self._arm is not None
        return self._arm._servo.measured(self.robot.world.data)

    def _presses(self) -> bool:
        assert self._arm is not None
        servo, data = self._arm._servo, self.robot.world.data
        return bool((np.abs(data.qfrc_constraint[servo._dofs]) > _PRESSES * servo._torque).any())

    def _cannot_follow(self) -> bool:
        return isinstance(self._limited, LimitedPose) and self._limited.halted

    def _tell(self) -> None:
        self._times.publish(Float64MultiArray(data=[self._arm_s, time.time(), self._began_at_s, self._ended_at_s]))

    def _show(self, now_ns: int) -> None:
        """The camera is a process of its own, which is told what there is to see."""
        seen = JointState(position=self.robot.world.data.qpos.tolist())
        seen.header.stamp = Time(nanoseconds=now_ns).to_msg()
        self._world.publish(seen)

    def _end(self, state: EpisodeState, detail: str = "") -> None:
        if state is EpisodeState.ABORTED:
            self.failure = detail
            return
        start = next(self._starts)
        self.episode = Episode(start, start.task, began_ns=self._now_ns, steps_per_action=self._per_action)
        self._instruction.tell(start.task.instruction)


def show(robot: str, task: str, seed: int) -> None:
    """Draws what the arm's process tells, and publishes it, until it is killed."""
    import mujoco  # after specvla_ros.lab.simulation, which chooses how it draws

    rclpy.init(args=[])
    camera = rclpy.create_node("camera", enable_rosout=False)
    table = TableRobot(IMAGE_SIZE, choose_arm(robot))
    table.reset(task, seed)
    world = table.world
    publisher = camera.create_publisher(Image, IMAGE_TOPIC, ACTION)

    def on_world(message: JointState) -> None:
        world.data.qpos[:] = message.position
        mujoco.mj_forward(world.model, world.data)
        publisher.publish(_image(table.look(), message.header.stamp))

    camera.create_subscription(JointState, WORLD_TOPIC, on_world, NEWEST_IMAGE)  # it is never behind
    rclpy.spin(camera)


def _image(pixels: np.ndarray, stamp: TimeMessage) -> Image:
    height, width = pixels.shape[:2]
    image = Image(height=height, width=width, encoding="rgb8", step=3 * width, data=array("B", pixels.tobytes()))
    image.header.stamp, image.header.frame_id = stamp, "camera"
    return image


def main() -> None:
    role, *rest = sys.argv[1:]
    if role != "camera":
        # A robot costs this machine no time: the other executor takes half as much again.
        node.SingleThreadedExecutor, sim_robot._POLLS = EventsExecutor, _POLLS  # type: ignore[misc,assignment]
        sim_robot._EPOCH_NS = EPOCH_NS
        make = partial(FaultyRobot, role == "with_clock")
        sys.exit(run_node("sim_robot", make, close=FaultyRobot.close, failure=attrgetter("failure")))
    options = argparse.ArgumentParser()
    options.add_argument("--robot", default="")
    options.add_argument("--task", default="")
    options.add_argument("--seed", type=int, default=0)
    show(**vars(options.parse_args(rest)))


if __name__ == "__main__":
    main()
