# SPDX-License-Identifier: Apache-2.0
"""A task as a ROS action, over DDS, with a real action client: it ends as it should, and the robot stops."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import rclpy
from action_msgs.msg import GoalStatus
from action_msgs.srv import CancelGoal
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from sensor_msgs.msg import Image
from std_msgs.msg import Bool, String
from std_srvs.srv import SetBool
from support.patience import PATIENCE_S, wait_until
from support.ros import ANY_MACHINE, rgb_image

from specvla_ros.action import RunTask
from specvla_ros.msg import SimEpisode, VlaAction
from specvla_ros.ros.policy.node import PolicyNode
from specvla_ros.ros.qos import ACTION, LATCHED_INSTRUCTION, LATCHED_STATE
from specvla_ros.ros.task import Switch, TaskNode

LONG_S = 3600.0
SOURCES = os.pathsep.join(str(Path(__file__).resolve().parents[3] / folder) for folder in ("", "kernels"))
INSTRUCTION, OTHER = "put carrot on plate", "flip the pot"


class Policy:
    """Answers as the policy does: paused it is silent, otherwise an action for each `tick`."""

    def __init__(self) -> None:
        self.node = rclpy.create_node("policy", enable_rosout=False)
        self.paused, self.told, self.answers = False, "", True
        self.calls: list[tuple[bool, str]] = []  # wanted value, and the instruction in force at that moment
        self._state = self.node.create_publisher(Bool, "~/paused", LATCHED_STATE)
        self._actions = self.node.create_publisher(VlaAction, "~/action", ACTION)
        self.node.create_subscription(String, "instruction", self._on_instruction, LATCHED_INSTRUCTION)
        self.offer()

    def offer(self) -> None:
        self._service = self.node.create_service(SetBool, "~/pause", self._on_pause)

    def withdraw(self) -> None:
        self.node.destroy_service(self._service)

    def say_paused(self, value: bool) -> None:
        self.paused = value
        self._state.publish(Bool(data=value))

    def tick(self) -> None:
        if self.told and not self.paused and self.answers:
            self._actions.publish(VlaAction(instruction=self.told, latency_s=0.125))

    def _on_instruction(self, message: String) -> None:
        self.told = message.data

    def _on_pause(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        self.calls.append((request.data, self.told))
        self.say_paused(request.data)
        response.success = True
        return response


class Driver:
    """Holds and lets go, and remembers."""

    def __init__(self) -> None:
        self.node = rclpy.create_node("driver", enable_rosout=False)
        self.holds: list[bool] = []
        self.offer()

    def offer(self) -> None:
        self._service = self.node.create_service(SetBool, "~/hold", self._on_hold)

    def withdraw(self) -> None:
        self.node.destroy_service(self._service)

    def _on_hold(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        self.holds.append(request.data)
        response.success = True
        return response


@dataclass
class Scene:
    task: TaskNode
    user: Node
    policy: Policy
    driver: Driver | None
    executor: SingleThreadedExecutor
    feedback: list[RunTask.Feedback] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client: Any = ActionClient(self.user, RunTask, "run_task")
        self.user.create_timer(0.02, self.policy.tick)
        self.until(self.client.server_is_ready)

    @property
    def holds(self) -> list[bool]:
        assert self.driver is not None
        return self.driver.holds

    @property
    def actions(self) -> int:
        """Of the task that runs; -1: none does."""
        return self.task._run.progress.actions if self.task._run is not None else -1

    def until(self, condition: Callable[[], object]) -> Any:
        return wait_until(condition, meanwhile=lambda: self.executor.spin_once(timeout_sec=0.02))

    def send(self, instruction: str = INSTRUCTION, time_limit_s: float = LONG_S) -> Any:
        goal = RunTask.Goal(instruction=instruction, time_limit_s=time_limit_s)
        sent = self.client.send_goal_async(goal, feedback_callback=lambda each: self.feedback.append(each.feedback))
        self.until(sent.done)
        return sent.result()

    def acting(self, instruction: str = INSTRUCTION, time_limit_s: float = LONG_S) -> Any:
        """A goal that is being acted on."""
        handle = self.send(instruction, time_limit_s)
        self.until(lambda: self.actions > 2)
        return handle

    def result(self, handle: Any) -> Any:
        future = handle.get_result_async()
        self.until(future.done)
        return future.result()

    def run(self, *arguments: Any) -> Any:
        return self.result(self.send(*arguments))


@contextmanager
def scene(*, driver: bool = True, **parameters: Any) -> Iterator[Scene]:
    overrides = [Parameter(name, value=value) for name, value in parameters.items()]
    rclpy.init()
    executor = SingleThreadedExecutor()
    task, user, policy = TaskNode(parameter_overrides=overrides), rclpy.create_node("user"), Policy()
    arm = Driver() if driver else None
    nodes = [task, user, policy.node, *([arm.node] if arm else [])]
    for node in nodes:
        executor.add_node(node)
    try:
        yield Scene(task, user, policy, arm, executor)
    finally:
        task.close()
        executor.shutdown()
        for node in nodes:
            node.destroy_node()
        rclpy.try_shutdown()


def test_without_a_task_the_policy_is_paused_and_the_driver_holds() -> None:
    with scene() as s:
        s.until(lambda: s.policy.paused and s.holds)
        assert s.holds == [True]


def test_a_cancelled_task_has_stopped_policy_and_driver_when_its_result_comes() -> None:
    with scene() as s:
        handle = s.acting()
        s.until(lambda: s.holds[-1] is False)
        cancelled = handle.cancel_goal_async()
        s.until(cancelled.done)
        assert cancelled.result().return_code == CancelGoal.Response.ERROR_NONE
        answer = s.result(handle)
        assert (s.policy.paused, s.holds[-1]) == (True, True)
        assert (answer.status, answer.result.outcome) == (GoalStatus.STATUS_CANCELED, RunTask.Result.CANCELED)
        assert answer.result.actions > 2 and answer.result.message == "canceled"


def test_the_policy_knows_the_new_instruction_before_it_may_act_and_the_driver_waits_for_its_first_action() -> None:
    with scene() as s:
        s.until(lambda: s.policy.paused)
        s.policy.answers = False
        handle = s.send()
        s.until(lambda: not s.policy.paused)
        assert (False, INSTRUCTION) in s.policy.calls and (False, "") not in s.policy.calls
        assert False not in s.holds
        s.policy.answers = True
        s.until(lambda: s.holds[-1] is False)
        handle.cancel_goal_async()
        s.result(handle)


@pytest.mark.parametrize(
    ("judge", "status"), [("none", GoalStatus.STATUS_SUCCEEDED), ("topic", GoalStatus.STATUS_ABORTED)]
)
def test_the_time_limit_ends_a_task_and_stops_the_robot(judge: str, status: int) -> None:
    with scene(judge=judge) as s:
        answer = s.run(INSTRUCTION, 0.7)
        assert (answer.status, answer.result.outcome) == (status, RunTask.Result.TIMED_OUT)
        assert "0.7 s is over" in answer.result.message and answer.result.duration_s >= 0.7
        assert s.policy.paused


def test_the_parts_of_an_answer_are_one_action_and_the_first_lets_the_driver_go() -> None:
    def say(partial: bool) -> None:
        s.policy._actions.publish(VlaAction(instruction=INSTRUCTION, latency_s=0.125, partial=partial))

    with scene() as s:
        s.policy.answers = False
        s.send()
        s.until(lambda: s.policy.told and not s.policy.paused)
        say(True)
        s.until(lambda: s.holds[-1] is False)
        assert s.actions == 0
        say(True)
        say(False)
        s.until(lambda: s.actions)
        assert s.actions == 1


def test_a_policy_whose_first_answer_is_not_complete_at_the_end_has_acted() -> None:
    with scene() as s:
        s.policy.answers = False
        part = VlaAction(instruction=INSTRUCTION, partial=True)
        s.user.create_timer(0.02, lambda: s.policy._actions.publish(part))
        answer = s.run(INSTRUCTION, 1.5)
        assert answer.result.outcome == RunTask.Result.TIMED_OUT, answer.result.message
        assert answer.result.actions == 0


def test_a_task_in_which_the_policy_never_acted_is_failed() -> None:
    with scene() as s:
        s.policy.answers = False
        answer = s.run(INSTRUCTION, 0.7)
        assert (answer.status, answer.result.outcome) == (GoalStatus.STATUS_ABORTED, RunTask.Result.FAILED)
        assert "no action within the time limit of 0.7 s" in answer.result.message and answer.result.actions == 0


def test_a_goal_without_a_limit_gets_the_nodes_own() -> None:
    with scene(time_limit_s=0.5) as s:
        assert "0.5 s is over" in s.run(INSTRUCTION, 0.0).result.message


@pytest.mark.parametrize(
    ("said", "outcome", "status"),
    [
        (True, RunTask.Result.SUCCEEDED, GoalStatus.STATUS_SUCCEEDED),
        (False, RunTask.Result.FAILED, GoalStatus.STATUS_ABORTED),
    ],
)
def test_a_judge_ends_the_task(said: bool, outcome: int, status: int) -> None:
    with scene(judge="topic") as s:
        judge = s.user.create_publisher(Bool, "/task/succeeded", 1)
        s.until(judge.get_subscription_count)
        handle = s.acting()
        judge.publish(Bool(data=said))
        answer = s.result(handle)
        assert (answer.result.outcome, answer.status) == (outcome, status)
        assert s.policy.paused


def test_the_simulated_robot_judges_its_own_episode_and_no_earlier_one() -> None:
    with scene(judge="sim_episode") as s:
        robot = s.user.create_publisher(SimEpisode, "/sim_robot/episode", 10)
        s.until(robot.get_subscription_count)
        handle = s.acting()
        for state, instruction in (
            (SimEpisode.SUCCEEDED, INSTRUCTION),  # of an episode before this task
            (SimEpisode.RUNNING, OTHER),
            (SimEpisode.FAILED, OTHER),
        ):
            robot.publish(SimEpisode(state=state, instruction=instruction))
        seen = s.actions
        s.until(lambda: s.actions == -1 or s.actions > seen + 20)
        assert s.actions > seen
        for state in (SimEpisode.RUNNING, SimEpisode.SUCCEEDED):
            robot.publish(SimEpisode(state=state, instruction=INSTRUCTION))
        assert s.result(handle).result.outcome == RunTask.Result.SUCCEEDED


def test_a_newer_goal_takes_the_place_of_the_older_one() -> None:
    with scene() as s:
        older = s.acting()
        newer = s.send(OTHER)
        answer = s.result(older)
        assert (answer.status, answer.result.outcome) == (GoalStatus.STATUS_ABORTED, RunTask.Result.PREEMPTED)
        s.until(lambda: s.actions > 2)
        assert s.policy.told == OTHER and not s.policy.paused
        newer.cancel_goal_async()
        assert s.result(newer).result.outcome == RunTask.Result.CANCELED
        assert s.policy.paused


def test_somebody_elses_instruction_ends_the_task() -> None:
    with scene() as s:
        handle = s.acting()
        meddler = s.user.create_publisher(String, "instruction", LATCHED_INSTRUCTION)
        s.until(meddler.get_subscription_count)
        meddler.publish(String(data=OTHER))
        answer = s.result(handle)
        assert answer.result.outcome == RunTask.Result.PREEMPTED and f"'{OTHER}'" in answer.result.message
        assert s.policy.paused


@pytest.mark.parametrize(
    ("instruction", "limit_s", "said"),
    [
        ("  ", 1.0, "instruction is empty"),
        (INSTRUCTION, -1.0, "time_limit_s is -1.0"),
        (INSTRUCTION, float("nan"), "time_limit_s is nan"),
        (INSTRUCTION, float("inf"), "time_limit_s is inf"),
    ],
)
def test_a_goal_that_makes_no_sense_fails_with_the_reason_and_disturbs_nothing(
    instruction: str, limit_s: float, said: str
) -> None:
    with scene() as s:
        running = s.acting()
        answer = s.run(instruction, limit_s)
        assert (answer.status, answer.result.outcome) == (GoalStatus.STATUS_ABORTED, RunTask.Result.FAILED)
        assert said in answer.result.message
        assert s.task._run is not None and s.task._run.goal.goal_id == running.goal_id
        assert not s.policy.paused


def test_a_policy_that_falls_silent_fails_the_task() -> None:
    with scene(max_silence_s=0.5) as s:
        handle = s.acting()
        s.policy.answers = False
        answer = s.result(handle)
        assert answer.result.outcome == RunTask.Result.FAILED and "no action for 0.5 s" in answer.result.message
        assert s.policy.paused


def test_a_policy_that_is_not_there_fails_the_task_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specvla_ros.ros.task._START_S", 0.5)
    with scene(driver=False, max_silence_s=0.0) as s:
        s.until(lambda: s.policy.paused)
        s.policy.withdraw()
        s.until(lambda: not s.task._pause.present)
        answer = s.run()
        assert answer.result.outcome == RunTask.Result.FAILED and "/policy/pause" in answer.result.message


def test_a_stop_that_nobody_confirms_is_said_and_asked_for_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with scene(driver=False) as s:
        handle = s.acting()
        s.policy.withdraw()
        s.until(lambda: not s.task._pause.present)
        handle.cancel_goal_async()
        assert "/policy/pause did not answer: THE ROBOT MAY STILL MOVE" in s.result(handle).result.message
        assert not s.policy.paused
        s.policy.offer()
        s.until(lambda: s.policy.paused)


def test_a_driver_that_starts_anew_between_tasks_holds_again() -> None:
    with scene() as s:
        assert s.driver is not None
        s.until(lambda: s.task._hold.settled)
        assert s.holds == [True]
        s.driver.withdraw()
        s.until(lambda: not s.task._hold.present)
        looks: list[None] = []
        s.user.create_timer(0.2, lambda: looks.append(None))
        s.until(lambda: len(looks) > 2)  # the task node has looked meanwhile, too
        s.driver.offer()
        s.until(lambda: s.holds == [True, True] and s.task._hold.settled)


def test_a_policy_that_starts_anew_between_tasks_is_paused_again() -> None:
    with scene(driver=False) as s:
        s.until(lambda: s.policy.paused and s.task._pause.settled)
        s.policy.say_paused(False)  # as one does that has just started
        s.until(lambda: s.policy.paused)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_task_node_that_is_told_to_end_stops_the_robot_first(signal_number: int) -> None:
    rclpy.init()
    executor = SingleThreadedExecutor()
    policy, driver, user = Policy(), Driver(), rclpy.create_node("user", enable_rosout=False)
    for node in (policy.node, driver.node, user):
        executor.add_node(node)
    user.create_timer(0.02, policy.tick)
    client: Any = ActionClient(user, RunTask, "run_task")
    patient = f"from specvla_ros.ros import task; task._LAST_CALL_S = {PATIENCE_S}; task.main()"
    command = [sys.executable, "-c", patient]

    def until(condition: Callable[[], object]) -> None:
        wait_until(condition, meanwhile=lambda: executor.spin_once(timeout_sec=0.02))

    try:
        with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": SOURCES}) as process:
            until(client.server_is_ready)
            client.send_goal_async(RunTask.Goal(instruction=INSTRUCTION, time_limit_s=LONG_S))
            until(lambda: driver.holds and driver.holds[-1] is False)
            process.send_signal(signal_number)
            until(lambda: process.poll() is not None)
        assert process.returncode == 0
        assert policy.paused and driver.holds[-1] is True
    finally:
        executor.shutdown()
        for node in (policy.node, driver.node, user):
            node.destroy_node()
        rclpy.try_shutdown()


@pytest.mark.parametrize(
    ("attribute", "lost"),
    [("_on_answer", lambda *answer: None), ("present", property(lambda switch: switch.name != "/policy/pause"))],
)
def test_the_last_call_goes_to_a_policy_too_that_never_answered(
    attribute: str, lost: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may act all the same: its answer was lost, or its service is not found yet and its actions come already."""
    called: list[str] = []

    def stop(services: list[str]) -> list[str]:
        called.extend(services)
        return []

    monkeypatch.setattr("specvla_ros.ros.task._stop_at_last", stop)
    monkeypatch.setattr(Switch, attribute, lost)
    with scene() as s:  # closes the node at its end
        s.acting()
        s.until(lambda: s.holds[-1] is False)
    assert called == ["/policy/pause", "/driver/hold"]


def test_feedback_says_how_it_goes() -> None:
    with scene() as s:
        s.policy.answers = False
        handle = s.send()
        s.until(lambda: s.feedback)
        assert (s.feedback[0].activity, s.feedback[0].actions) == ("waiting", 0)
        s.policy.answers = True
        s.until(lambda: s.feedback[-1].activity == "acting")
        newest = s.feedback[-1]
        assert newest.latency_s == 0.125 and newest.actions > 0 and newest.action_rate_hz > 0
        assert newest.elapsed_s + newest.time_left_s == pytest.approx(LONG_S)
        s.policy.answers = False
        s.until(lambda: s.feedback[-1].activity == "silent")
        handle.cancel_goal_async()
        s.result(handle)


def test_the_real_policy_acts_during_a_task_alone(checkpoint: Path) -> None:
    chosen = {"checkpoint": str(checkpoint), "device": "cpu", **ANY_MACHINE}
    rclpy.init()
    executor = SingleThreadedExecutor()
    policy = PolicyNode(parameter_overrides=[Parameter(name, value=value) for name, value in chosen.items()])
    task, user = TaskNode(parameter_overrides=[]), rclpy.create_node("user", enable_rosout=False)
    for node in (policy, task, user):
        executor.add_node(node)
    actions: list[VlaAction] = []
    user.create_subscription(VlaAction, "/policy/action", actions.append, ACTION)
    images = user.create_publisher(Image, "image", 1)
    client: Any = ActionClient(user, RunTask, "run_task")
    user.create_timer(0.05, lambda: images.publish(rgb_image(policy.get_clock().now().nanoseconds)))

    def until(condition: Callable[[], object]) -> None:
        wait_until(condition, meanwhile=lambda: executor.spin_once(timeout_sec=0.02))

    def let_frames_pass(count: int) -> None:
        before = policy.parts[""].dropped["paused"]
        until(lambda: policy.parts[""].dropped["paused"] >= before + count)

    try:
        assert policy.trigger_configure().name == policy.trigger_activate().name == "SUCCESS"
        until(client.server_is_ready)
        for instruction in (INSTRUCTION, OTHER):
            actions.clear()
            sent = client.send_goal_async(RunTask.Goal(instruction=instruction, time_limit_s=LONG_S))
            until(lambda: len(actions) >= 3)
            assert {action.instruction for action in actions} == {instruction}
            until(sent.done)
            handle = sent.result()
            assert handle is not None
            handle.cancel_goal_async()
            done = handle.get_result_async()
            until(done.done)
            assert policy.parts[""].paused
            let_frames_pass(5)  # what had left before is delivered
            known = len(actions)
            let_frames_pass(5)
            assert len(actions) == known
    finally:
        task.close()
        assert policy.close()
        executor.shutdown()
        for node in (policy, task, user):
            node.destroy_node()
        rclpy.try_shutdown()
