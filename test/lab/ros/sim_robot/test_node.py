# SPDX-License-Identifier: Apache-2.0
"""The simulated robot's node over real DDS; in the policy's place a scripted one that sees the true state."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import rclpy
from builtin_interfaces.msg import Time
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from support.gl import needs_gl
from support.patience import wait_until

from specvla_ros.control.pose import rotation_vector, rpy_matrix
from specvla_ros.errors import UserError
from specvla_ros.lab.ros.sim_robot.episodes import episode_starts, task_of
from specvla_ros.lab.ros.sim_robot.node import Phase, SimRobot
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.lab.simulation.collect import demonstrate
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.lab.simulation.world import SimulationDiverged
from specvla_ros.messages.image_message import rgb_from_compressed, rgb_from_image, stamp_ns
from specvla_ros.msg import SimEpisode, VlaAction
from specvla_ros.ros.qos import ACTION, LATCHED_INSTRUCTION, NEWEST_IMAGE

pytestmark = needs_gl

STILL_M = 0.002
SLOWLY = (0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)

Answer = Callable[[int, str], "VlaAction | None"]


def action(stamp: int, values: Any = SLOWLY, *, dt: float = 0.2, instruction: str = "", **fields: Any) -> VlaAction:
    message = VlaAction(values=[float(value) for value in values], action_dt=dt, instruction=instruction, **fields)
    message.header.stamp = Time(sec=stamp // 10**9, nanosec=stamp % 10**9)
    return message


@dataclass
class Scene:
    """The node under test, and the node that plays the policy and watches."""

    sim: SimRobot
    user: Node
    executor: SingleThreadedExecutor
    answer: Answer
    images: list[int] = field(default_factory=list)
    pictures: list[np.ndarray] = field(default_factory=list)
    episodes: list[SimEpisode] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    joints: list[JointState] = field(default_factory=list)
    told: str = ""

    def __post_init__(self) -> None:
        self.actions = self.user.create_publisher(VlaAction, "/policy/action", ACTION)
        self.instructions = self.user.create_publisher(String, "/instruction", 1)
        self.user.create_subscription(String, "/instruction", self._on_instruction, ACTION)
        self.user.create_subscription(SimEpisode, "/sim_robot/episode", self.episodes.append, 100)
        self.user.create_subscription(Clock, "/clock", lambda m: self.clocks.append(_ns(m.clock)), NEWEST_IMAGE)
        self.user.create_subscription(JointState, "/joint_states", self.joints.append, 100)
        self.user.create_subscription(Image, "/camera/image_raw", self._on_image, NEWEST_IMAGE)

    def _on_instruction(self, message: String) -> None:
        self.told = message.data

    def _on_image(self, message: Image) -> None:
        self.images.append(stamp_ns(message.header))
        self.pictures[:] = [rgb_from_image(message)]
        reply = self.answer(self.images[-1], self.told)
        if reply is not None:
            self.actions.publish(reply)

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(
            condition,
            meanwhile=lambda: self.executor.spin_once(timeout_sec=0.02),
            failed=lambda: f"still waiting in {self.sim.phase}: {self.episodes[-1:]}",
        )

    def spin(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.executor.spin_once(timeout_sec=0.02)

    def retire_policy(self) -> None:
        """Leaves a node that only watches; before the robot's node is spun, so that it never finds a policy."""
        self.user.destroy_publisher(self.actions)
        wait_until(lambda: not self.sim.get_publishers_info_by_topic("/policy/action"))

    def expert(self, stamp: int, told: str) -> VlaAction:
        """Does what it was told, well."""
        return action(stamp, demonstrate(task_of(told) or TASKS[0], self.sim.robot.state()), instruction=told)

    def hand(self) -> np.ndarray:
        return self.sim.robot.state().hand

    def states(self) -> list[int]:
        return [message.state for message in self.episodes]


def _ns(stamp: Time) -> int:
    return stamp.sec * 10**9 + stamp.nanosec


def silent(stamp: int, told: str) -> None:
    """A policy that is there, and says nothing."""


@contextmanager
def scene(answer: Answer | str = "expert", **parameters: Any) -> Iterator[Scene]:
    settings = {"tasks": ["lift_red"], "episodes": 1, "clock": "lockstep", "image_size": 64, "pause_between_s": 0.0}
    overrides = [Parameter(name, value=value) for name, value in {**settings, **parameters}.items()]
    rclpy.init()
    executor = SingleThreadedExecutor()
    sim = SimRobot(parameter_overrides=overrides)
    user = rclpy.create_node("policy", enable_rosout=False)
    for node in (sim, user):
        executor.add_node(node)
    try:
        made = Scene(sim, user, executor, silent)
        made.answer = made.expert if isinstance(answer, str) else answer
        yield made
    finally:
        sim.close()
        executor.shutdown()
        for node in (sim, user):
            node.destroy_node()
        rclpy.try_shutdown()


def test_lockstep_episodes_succeed_and_the_world_waits_for_each_action() -> None:
    with scene(episodes=2) as s:
        compressed: list[CompressedImage] = []
        s.user.create_subscription(CompressedImage, "/camera/image_raw/compressed", compressed.append, 5)
        s.until(lambda: s.sim.finished)
        s.until(lambda: s.episodes and s.episodes[-1].finished_so_far == 2)

        ends = [message for message in s.episodes if message.state != SimEpisode.RUNNING]
        assert [(end.episode, end.seed, end.task, end.state) for end in ends] == [
            (0, 0, "lift_red", SimEpisode.SUCCEEDED),
            (1, 1, "lift_red", SimEpisode.SUCCEEDED),
        ]
        assert [end.succeeded_so_far for end in ends] == [1, 2]
        for end in ends:
            assert end.instruction == "lift the red cube"
            assert end.stale_actions == 0
            # The last action is not waited out once the cube is up.
            assert (end.actions - 1) * 0.2 < end.time_s <= end.actions * 0.2 + 1e-9
        assert s.clocks == sorted(s.clocks), "the clock went back"
        assert s.clocks[0] > 0
        other = [gap for gap in np.diff(s.images) if gap != 200_000_000]
        assert len(other) <= 1, "only between the episodes may two images lie otherwise"
        assert s.pictures[0].shape == (64, 64, 3)
        assert rgb_from_compressed(compressed[-1]).shape == (64, 64, 3)
        assert s.joints[-1].name == list(TABLE_ARM.joint_names)
        late: list[String] = []
        s.user.create_subscription(String, "/instruction", late.append, LATCHED_INSTRUCTION)
        s.until(lambda: late)
        assert late[0].data == s.told == "lift the red cube"


def test_the_wrists_pictures_have_the_stamps_of_the_cameras() -> None:
    with scene(clock="lockstep", episodes=1) as s:
        seen: list[Image | CompressedImage] = []
        for kind, topic in ((Image, "/wrist/image_raw"), (CompressedImage, "/wrist/image_raw/compressed")):
            s.user.create_subscription(kind, topic, seen.append, NEWEST_IMAGE)
        s.until(lambda: len(seen) >= 6 and {type(each) for each in seen} == {Image, CompressedImage})
        assert {each.header.frame_id for each in seen} == {"wrist"}
        s.until(lambda: s.images and s.images[-1] >= stamp_ns(seen[-1].header))
        assert stamp_ns(seen[-1].header) in s.images
        raw = next(each for each in seen if isinstance(each, Image))
        assert np.abs(rgb_from_image(raw).astype(int) - s.pictures[0]).mean() > 10, "another place to look from"


def test_one_action_is_one_period_of_the_world() -> None:
    with scene(silent) as s:
        s.until(lambda: s.images)
        for count in range(1, 4):
            s.actions.publish(action(s.images[-1]))
            s.until(partial(lambda n: len(s.images) == n, count + 1))
            assert s.sim.robot.world.time_s == pytest.approx(0.2 * count)
            assert s.sim._now_ns - s.sim.episode.began_ns == count * 200_000_000
            assert (s.sim.episode.actions, s.sim.episode.steps) == (count, 4 * count)
            assert s.images[-1] - s.images[-2] == 200_000_000


BAD = {
    "an image that was never sent": lambda now: action(now + 10**10),
    "no stamp": lambda now: action(0),
    "another instruction": lambda now: action(now, instruction="lift the blue cube"),
    "NaN": lambda now: action(now, [math.nan] + [0.0] * 6),
    "infinity": lambda now: action(now, [0.0] * 6 + [math.inf]),
    "too few values": lambda now: action(now, [0.01] * 6),
    "too far": lambda now: action(now, [0.5] + [0.0] * 6),
    "too fast": lambda now: action(now, [0.05] + [0.0] * 6, dt=0.01),
    "too much of a turn": lambda now: action(now, [0.0] * 3 + [4.0] + [0.0] * 3),
    "a pose, not a displacement": lambda now: action(now, reference="absolute"),
    "the tool's axes": lambda now: action(now, action_frame="tool"),
    "no period": lambda now: action(now, dt=0.0),
    "a period that is no number": lambda now: action(now, dt=math.nan),
}


def test_an_action_counts_in_the_convention_that_its_message_names() -> None:
    values = (0.0, 0.0, 0.0, 0.3, 0.4, 0.5, 0.0)
    with scene(silent) as s:
        taken: list[np.ndarray] = []
        s.sim.robot.take = lambda values, age_s=0.0: taken.append(values)  # type: ignore[method-assign]
        s.until(lambda: s.images)
        for fields in ({}, {"rotation": "rpy"}, {"gripper": "close_high"}, {"gripper": "open_high"}):
            s.actions.publish(action(s.images[-1], values, dt=0.4, **fields))
            s.until(partial(lambda n: len(taken) > n and s.images[-1] == s.sim._newest_image_ns, len(taken)))
        plain, rpy, close_high, open_high = taken
        assert plain == pytest.approx([0.0, 0.0, 0.0, 0.15, 0.2, 0.25, 0.0])
        assert rpy[3:6] == pytest.approx(rotation_vector(rpy_matrix(np.array(values[3:6]))) / 2)
        assert (close_high[6], open_high[6]) == (1.0, 0.0)


@pytest.mark.parametrize("clock", ["lockstep", "realtime"])
def test_bad_actions_are_counted_and_never_move_the_robot(clock: str) -> None:
    with scene(silent, clock=clock, real_time_factor=0.1) as s:  # the episode outlasts what a busy machine needs
        s.until(lambda: s.images and s.told)
        hand = s.hand()
        for count, (what, bad) in enumerate(BAD.items(), 1):
            s.actions.publish(bad(s.sim._newest_image_ns))
            s.until(partial(lambda n: s.sim.episode.ignored == n, count))
            assert s.sim.episode.actions == 0, what
        s.actions.publish(action(s.sim.episode.began_ns - 1))
        s.until(lambda: s.sim.episode.ignored == len(BAD) + 1)
        s.spin(0.3)
        assert s.sim.episode.actions == 0
        assert np.linalg.norm(s.hand() - hand) < STILL_M

        s.answer = s.expert  # and none of them was harmful
        s.actions.publish(s.expert(s.sim._newest_image_ns, s.told))
        s.until(lambda: s.sim.episode.actions >= 2)


def test_lockstep_takes_no_answer_to_an_older_image() -> None:
    with scene(silent, action_timeout_s=0.2) as s:
        s.until(lambda: len(s.images) == 2)
        s.actions.publish(action(s.images[0]))
        s.until(lambda: s.sim.episode.ignored)
        assert (s.sim.episode.actions, s.sim.episode.steps) == (0, s.sim.episode.holds)


def test_the_same_action_again_is_stale() -> None:
    with scene(silent, clock="realtime") as s:
        s.until(lambda: s.images)
        twice = action(s.images[-1])
        s.actions.publish(twice)
        s.actions.publish(twice)
        s.until(lambda: s.sim.episode.ignored)
        assert (s.sim.episode.actions, s.sim.episode.ignored) == (1, 1)


def test_the_rest_of_an_answer_is_no_action_of_its_own() -> None:
    def in_parts(stamp: int, told: str) -> VlaAction:
        begun, whole = s.expert(stamp, told), s.expert(stamp, told)
        begun.horizon, begun.partial = 1, True
        whole.horizon, whole.values = 2, [*whole.values, *whole.values]
        s.actions.publish(begun)
        return whole

    with scene(in_parts) as s:
        s.until(lambda: s.sim.finished)
        s.until(lambda: s.episodes and s.episodes[-1].finished_so_far == 1)
        end = s.episodes[-1]
        assert (end.state, end.stale_actions) == (SimEpisode.SUCCEEDED, 0)
        assert (end.actions - 1) * 0.2 < end.time_s <= end.actions * 0.2 + 1e-9


def test_an_instruction_in_mid_episode_changes_what_is_judged() -> None:
    with scene(seed=3) as s:
        s.until(lambda: s.sim.episode.actions == 2)
        s.answer = silent
        s.instructions.publish(String(data="dance a tango"))
        s.until(lambda: s.sim._instruction.current == "dance a tango")
        assert s.sim.episode.task.name == "lift_red"

        s.instructions.publish(String(data="Push the green cube  into the white zone."))
        s.until(lambda: s.sim.episode.task.name == "push_green" and s.told.startswith("Push"))
        assert s.sim.episode.judged_from == s.sim.episode.steps >= 8
        assert s.episodes[-1].state == SimEpisode.RUNNING
        s.answer = s.expert
        s.actions.publish(s.expert(s.sim._newest_image_ns, s.told))
        s.until(lambda: s.sim.finished and s.episodes[-1].state == SimEpisode.SUCCEEDED)
        assert s.episodes[-1].task == "push_green"
        assert s.sim.robot.state().positions["green_cube"][0] > 0.6


def test_its_own_instructions_are_nobodys_wish() -> None:
    """Their echoes come late, when the next episode has its own instruction."""
    with scene(silent) as s:
        s.until(lambda: s.images)
        instruction = s.sim._instruction
        for task in TASKS:
            instruction.tell(task.instruction)
        s.spin(0.2)
        assert instruction.current == TASKS[-1].instruction
        assert s.sim.episode.task.name == "lift_red"


def test_silence_holds_the_robot_then_aborts_and_begins_again() -> None:
    with scene(silent, action_timeout_s=0.1, policy_lost_after_s=2.0) as s:
        s.until(lambda: s.images)
        hand = s.hand()
        s.until(lambda: s.episodes[-1].state == SimEpisode.ABORTED)
        assert "no action was taken for" in s.episodes[-1].detail
        held = s.sim.episode
        assert 2 <= held.holds <= 21
        assert held.steps == held.holds, "one control step for each image without an answer"
        images = len(s.images)
        s.until(lambda: len(s.images) > images + 2)
        assert np.linalg.norm(s.hand() - hand) < STILL_M
        assert s.sim.phase is Phase.LOST

        s.answer = s.expert
        s.until(lambda: s.sim.finished and s.episodes[-1].state == SimEpisode.SUCCEEDED)
        end = s.episodes[-1]
        assert (end.episode, end.seed, end.succeeded_so_far, end.finished_so_far) == (0, 0, 1, 1)
        assert s.clocks == sorted(s.clocks)


def test_a_lost_policy_that_is_slower_than_the_images_is_found_again() -> None:
    with scene(silent, action_timeout_s=0.2, policy_lost_after_s=1.0) as s:
        s.until(lambda: s.sim.phase is Phase.LOST)
        before = len(s.images)
        s.until(lambda: len(s.images) >= before + 3)
        s.actions.publish(action(s.images[-2]))
        s.until(lambda: s.sim.phase is Phase.RUNNING or s.sim.episode.ignored)
        assert s.sim.phase is Phase.RUNNING, "an answer to an image since the loss"
        assert s.sim.episode.actions == 0, "it tells that the policy is back, and moves nothing"


def test_time_runs_out() -> None:
    with scene(lambda stamp, told: action(stamp, [0.0] * 6 + [1.0]), exit_when_done=False) as s:
        s.until(lambda: s.sim.phase is Phase.DONE)
        s.until(lambda: s.episodes[-1].state == SimEpisode.FAILED)
        assert s.episodes[-1].actions == 40
        assert s.episodes[-1].time_s == pytest.approx(8.0)
        assert not s.sim.finished


def test_a_diverged_world_ends_the_episode_and_not_the_node() -> None:
    with scene(episodes=2) as s:
        s.until(lambda: s.sim.episode.actions == 1)

        def burst() -> None:
            s.sim.robot.advance = proper  # type: ignore[method-assign]
            raise SimulationDiverged("the physics diverged at 0.25 s")

        proper = s.sim.robot.advance
        s.sim.robot.advance = burst  # type: ignore[method-assign]
        s.until(lambda: s.sim.finished and s.episodes[-1].finished_so_far == 2)
        ends = [message for message in s.episodes if message.state != SimEpisode.RUNNING]
        assert [end.state for end in ends] == [SimEpisode.ABORTED, SimEpisode.SUCCEEDED]
        assert "diverged" in ends[0].detail


def test_realtime_follows_the_wall_clock_and_the_rates() -> None:
    with scene(silent, clock="realtime", real_time_factor=2.0, camera_rate_hz=5.0) as s:
        s.until(lambda: s.images)
        assert s.sim._timer.timer_period_ns == 25_000_000, "a control step of 50 ms at twice the wall clock's speed"
        began, world = time.monotonic(), s.sim._now_ns
        s.until(lambda: s.sim._now_ns - world >= 4 * 10**9 and len(s.images) >= 8)
        assert (s.sim._now_ns - world) * 1e-9 / (time.monotonic() - began) < 4.0, "faster than asked for"
        for stamps, period_ns in ((s.images, 200_000_000), ([stamp_ns(m.header) for m in s.joints], 50_000_000)):
            steps = np.diff(stamps)
            assert steps.min() == period_ns and not (steps % period_ns).any()  # a busy machine may lose some


def _speed(s: Scene) -> float:
    """Of the hand on its way, in metres per simulated second."""
    s.until(lambda: s.images)
    while s.sim.episode.steps < 6:  # on the way
        s.spin(0.01)
    start, steps = s.hand(), s.sim.episode.steps
    s.until(lambda: s.sim.episode.steps >= steps + 16)
    return float(np.linalg.norm(s.hand() - start) / ((s.sim.episode.steps - steps) * 0.05))


def test_a_faster_stream_of_actions_does_not_move_the_arm_faster() -> None:
    back = (-0.02, 0.0, 0.01, 0.0, 0.0, 0.0, 1.0)
    speeds = {}

    def one_in(period: int, s: Scene) -> Answer:
        return lambda stamp, told: action(stamp, back) if len(s.images) % period == 0 else None

    for period in (1, 4):
        with scene(silent, clock="realtime", tasks=["put_red"]) as s:
            s.answer = one_in(period, s)
            speeds[period] = _speed(s)
    meant = float(np.linalg.norm(back[:3])) / 0.2
    assert 0.4 * meant < speeds[4] < 1.2 * meant
    assert 0.6 * meant < speeds[1] < 1.2 * meant


def test_late_actions_count_from_the_picture_that_they_answer() -> None:
    way, late = 0.05, 8  # metres to the side, images
    seen: list[tuple[int, float]] = []
    with scene(silent, clock="realtime", tasks=["put_red"]) as s:

        def go_there(stamp: int, told: str) -> VlaAction | None:
            seen.append((stamp, float(s.hand()[1])))
            if len(seen) <= late:
                return None
            old_stamp, then = seen[-1 - late]
            return action(old_stamp, (0.0, seen[0][1] + way - then, 0.02, 0.0, 0.0, 0.0, 1.0))

        s.answer = go_there
        s.until(lambda: len(seen) > 5 * late)
    gone = np.array([y for _, y in seen]) - seen[0][1]
    assert gone[-1] == pytest.approx(way, abs=0.006)
    assert gone.max() < way + 0.02, "added on top of each other, they lead to twice as far"


def test_another_period_of_the_policy_keeps_its_speed() -> None:
    with scene(silent) as s:
        s.until(lambda: s.images)
        hand = s.hand()
        for count in range(1, 5):
            s.actions.publish(action(s.images[-1], [0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 1.0], dt=0.1))
            s.until(partial(lambda n: len(s.images) == n, count + 1))
        assert s.hand()[2] - hand[2] == pytest.approx(0.08, abs=0.02)  # 0.1 m/s for 0.8 s, less the lag


def test_a_watcher_is_no_policy() -> None:
    with scene(silent) as s:
        s.retire_policy()
        s.spin(1.0)
        assert s.sim.phase is Phase.WAITING
        assert s.clocks, "whoever starts must learn the time"
        s.actions = s.user.create_publisher(VlaAction, "/policy/action", ACTION)
        s.until(lambda: s.sim.phase is Phase.RUNNING)


def test_waiting_for_a_policy_can_end() -> None:
    with scene(silent, wait_for_policy_s=0.3) as s:
        s.retire_policy()
        s.until(lambda: s.sim.finished)
        assert "start it, or raise wait_for_policy_s" in s.sim.failure


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tasks": ["fly"]}, "there is no task 'fly'; the tasks are: lift_red"),
        ({"tasks": "lift_red"}, "must be a list of strings"),
        ({"clock": "sometimes"}, "must be one of: lockstep, realtime"),
        ({"real_time_factor": 20.0}, "from 0.1 to 10"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], message: str) -> None:
    rclpy.init()
    try:
        with pytest.raises(UserError, match=message):
            SimRobot(parameter_overrides=[Parameter(name, value=value) for name, value in parameters.items()])
    finally:
        rclpy.try_shutdown()


def test_episodes_go_round_by_round() -> None:
    starts = list(episode_starts(TASKS[:2], 2, seed=7))
    assert [(each.index, each.task.name, each.seed) for each in starts] == [
        (0, "lift_red", 7),
        (1, "lift_green", 7),
        (2, "lift_red", 8),
        (3, "lift_green", 8),
    ]
    endless = episode_starts(TASKS[:1], 0, seed=0)
    assert [next(endless).seed for _ in range(5)] == [0, 1, 2, 3, 4]
