# SPDX-License-Identifier: Apache-2.0
"""The node `sim_robot`: a simulated arm with a camera that gives a policy tasks and judges the results."""

import sys
import time
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from specvla_ros.errors import UserError
from specvla_ros.lab.ros.sim_robot.episodes import (
    Episode,
    EpisodeState,
    SimRobotParameters,
    Start,
    Tally,
    episode_starts,
    task_of,
)
from specvla_ros.lab.ros.sim_robot.inputs import ActionInput, CommandInput, Expected, InstructionTopic
from specvla_ros.lab.ros.sim_robot.outputs import Pace, SimOutputs, is_commanded, policy_listens
from specvla_ros.lab.simulation.arms import choose_arm
from specvla_ros.lab.simulation.commanded_arm import CommandedArm
from specvla_ros.lab.simulation.motion_record import MotionRecorder
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.lab.simulation.world import SimulationDiverged
from specvla_ros.ros.node import run_node
from specvla_ros.ros.parameters import parameters_declared, read_parameters

_EPOCH_NS = 1_000_000_000  # a stamp of 0 means unset
_REPORT_S = 0.25
_LINGER_S = 0.5  # the last messages must reach their subscribers before this process ends
_SETTLE_S = 0.5  # a policy that this node has discovered may not have discovered this node yet
_CONTROLLERS_OFF_NS = 300_000_000  # after a reset, so that commands in transit do not pull the arm back
_SEEK_S = 1.0  # time between two images while the policy is lost
# Maximum delay of the executor, e.g. after rendering an image, that a commanded arm makes up for.
_CATCH_UP_S = 0.1
_POLLS = 4  # timer calls per control step, so that commands are taken between two steps


class Phase(Enum):
    """The node's phase."""

    WAITING = "for a policy, before the first episode"
    RUNNING = "an episode"
    LOST = "an aborted episode, until actions come again"
    PAUSED = "between two episodes"
    DONE = "after the last episode"


class SimRobot(Node):
    """Runs the episodes at one table.

    The parameter `command` selects what moves the arm: motion commands at 100 Hz, or actions at 20 Hz. An action is
    spread over `action_dt` and a newer one replaces it, so a faster policy does not make a faster arm. Everything runs
    in the executor's thread: the OpenGL context belongs to the thread that made it.

    Raises:
        UserError: a parameter is wrong, or the machine cannot render.
    """

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("sim_robot", **node_arguments)
        with parameters_declared(self, SimRobotParameters):
            self._chosen = read_parameters(self, SimRobotParameters)
            self._starts = episode_starts(self._chosen.chosen_tasks(), self._chosen.episodes, self._chosen.seed)
            self.robot = TableRobot(self._chosen.image_size, choose_arm(self._chosen.robot))
            self._record: MotionRecorder | None = None
            if self._chosen.record:
                self._record = MotionRecorder(Path(self._chosen.record).expanduser(), self.robot.world)
        self.tally = Tally()
        self.failure = ""
        self._arm = CommandedArm(self.robot.world, self._chosen.command) if self._chosen.commanded else None
        self._control_dt = self.robot.control_dt if self._arm is None else self._arm.control_dt
        self._step_ns = round(self._control_dt * 1e9)
        self._per_action = round(self.robot.action_dt / self._control_dt)
        self._per_image = max(1, round(1.0 / (self._chosen.camera_rate_hz * self._control_dt)))
        self._per_report = round(_REPORT_S / self._control_dt)
        self._now_ns = _EPOCH_NS
        self._newest_image_ns = self._last_taken_ns = 0
        self._outputs = SimOutputs(self, self.robot)
        self._instruction = InstructionTopic(self, self._on_other_instruction)
        self._input = self._listen()
        self._pace = Pace()
        self._first = next(self._starts)
        self.episode = self._reset(self._first)
        self.phase = Phase.WAITING
        self._due_s = 0.0  # wall time at which the phase's next step is due
        self._began_s = self._acted_s = time.monotonic()
        self._period_s = self._control_dt / (1.0 if self._chosen.lockstep else self._chosen.real_time_factor)
        self._next_s = self._began_s
        polls, tick = (1, self._on_timer) if self._arm is None else (_POLLS, self._poll)
        self._timer = self.create_timer(self._period_s / polls, tick, clock=Clock(clock_type=ClockType.STEADY_TIME))

    def _listen(self) -> ActionInput | CommandInput:
        if self._arm is None:
            return ActionInput(
                self, self.robot, expected=self._expected, on_action=self._on_action, on_ignored=self._on_ignored
            )
        return CommandInput(
            self,
            self._arm,
            self._chosen.command,
            now_s=lambda: self._now_ns * 1e-9,
            obeys=lambda: self._now_ns >= self._off_until_ns,
            on_command=self._on_command,
            on_refused=self._on_refused,
        )

    @property
    def finished(self) -> bool:
        over = self.phase is Phase.DONE and self._chosen.exit_when_done and time.monotonic() >= self._due_s
        return bool(self.failure) or over

    def close(self) -> bool:
        """Frees the OpenGL context and writes the rest of the record."""
        self.robot.close()
        if self._record is not None:
            self._record.close()
        return True

    # Time

    def _poll(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = max(self._next_s + self._period_s, now_s - _CATCH_UP_S)
            self._on_timer()

    def _on_timer(self) -> None:
        if self.phase is Phase.WAITING:
            self._wait()
        elif self.phase is Phase.PAUSED and time.monotonic() >= self._due_s:
            self._go_on()
        elif self.phase in (Phase.RUNNING, Phase.LOST):
            self._run()
        if self._arm is not None and self.phase not in (Phase.RUNNING, Phase.LOST):
            # Between episodes a commanded arm still obeys, and its clock and camera keep running.
            self._step()
            if self.episode.steps % self._per_image == 0:
                self._outputs.image(self._now_ns)
        # Published while the world stands still too: a node that starts now needs the time.
        self._outputs.clock(self._now_ns)

    def _wait(self) -> None:
        now_s = time.monotonic()
        images, topic = self._outputs.image_topics, self._input.topic
        if policy_listens(self, images, topic) if self._arm is None else is_commanded(self, images, topic):
            self._due_s = self._due_s or now_s + _SETTLE_S
            if now_s >= self._due_s:
                self._begin(self._first)
            return
        self._due_s = 0.0
        what = f"policy that subscribes to {images[0]} and publishes {topic}"
        if self._arm is not None:
            what = f"publisher of {topic} and subscriber of {images[0]}"
        self.get_logger().info(f"waiting for a {what}", throttle_duration_sec=5.0)
        patience_s = self._chosen.wait_for_policy_s
        if patience_s and now_s - self._began_s > patience_s:
            self.failure = f"found no {what} within {patience_s:g} s; start it, or raise wait_for_policy_s"

    def _run(self) -> None:
        if self._chosen.lockstep:
            self._look_once_due()
        else:
            self._step()
            self._watch_pace()
            if self.phase is not Phase.PAUSED and self.episode.steps % self._per_image == 0:
                self._look()
        silent_s = time.monotonic() - self._acted_s
        if self.phase is Phase.RUNNING and silent_s >= self._chosen.policy_lost_after_s:
            self._lose_policy(silent_s)

    def _look_once_due(self) -> None:
        """Sends an episode's first image, or another one if the last image was not answered."""
        if time.monotonic() < self._due_s:
            return
        if self._newest_image_ns:
            self.get_logger().warning(
                f"no action for the image of {self._newest_image_ns * 1e-9:.2f} s arrived in time: the robot holds "
                f"still and sends another image (hold {self.episode.holds + 1} of this episode)",
                throttle_duration_sec=5.0,
            )
            self._hold_and_look()
        else:
            self._look()

    def _hold_and_look(self) -> None:
        self.episode.holds += 1
        self._step()
        if self.phase is not Phase.PAUSED:
            self._look()

    def _look(self) -> None:
        self._newest_image_ns = self._now_ns
        self._outputs.image(self._now_ns)
        patience_s = self._chosen.action_timeout_s
        self._due_s = time.monotonic() + (patience_s if self.phase is Phase.RUNNING else min(patience_s, _SEEK_S))

    def _step(self) -> None:
        episode = self.episode
        try:
            if self._arm is None:
                self.robot.advance()
            else:
                self._arm.advance(self._now_ns * 1e-9)
        except SimulationDiverged as error:
            if self.phase in (Phase.RUNNING, Phase.LOST):
                self._end(EpisodeState.ABORTED, str(error))
            else:
                self.episode = self._reset(episode.start)
            return
        episode.steps += 1
        self._now_ns += self._step_ns
        self._outputs.clock(self._now_ns)
        self._outputs.joints(self._now_ns)
        # The next episode makes the arm jump, which no real robot does. Its pose is not published until then, so that
        # the driver holds still and starts from the new pose.
        if self.phase is not Phase.PAUSED:
            self._outputs.tool_pose(self._now_ns)
        self._note_motion()
        if self.phase is not Phase.RUNNING:
            return
        if episode.task.succeeded(self.robot.state()):
            self._end(EpisodeState.SUCCEEDED)
        elif episode.out_of_time:
            self._end(EpisodeState.FAILED)
        elif episode.steps % self._per_report == 0:
            self._report()

    def _note_motion(self) -> None:
        if self._record is None:
            return
        try:
            self._record.add(self._now_ns * 1e-9, self.episode.start.index, self.phase is Phase.RUNNING)
        except UserError as error:
            self.failure, self._record = str(error), None

    def _watch_pace(self) -> None:
        factor = self._pace.step(time.monotonic(), self._control_dt)
        if factor is not None and factor < 0.8 * self._chosen.real_time_factor:
            self.get_logger().warning(
                f"this machine simulates at {factor:.2f} times real time, not "
                f"{self._chosen.real_time_factor:g}: lower real_time_factor, camera_rate_hz or image_size"
            )

    # Episodes

    def _reset(self, start: Start) -> Episode:
        self.robot.reset(start.task.name, start.seed)
        if self._arm is not None:
            self._arm.reset()
        self._now_ns += self._step_ns  # time never goes back between episodes
        self._off_until_ns = self._now_ns + _CONTROLLERS_OFF_NS
        self._newest_image_ns = self._last_taken_ns = 0
        return Episode(start, start.task, began_ns=self._now_ns, steps_per_action=self._per_action)

    def _begin(self, start: Start) -> None:
        self.episode = self._reset(start)
        self.phase = Phase.RUNNING
        self._pace = Pace()
        self._due_s = 0.0
        self._acted_s = time.monotonic()
        self._instruction.tell(start.task.instruction)
        self.get_logger().info(f"episode {start.index}: '{start.task.instruction}', seed {start.seed}")
        self._report()

    def _end(self, state: EpisodeState, detail: str = "") -> None:
        episode = self.episode
        episode.state, episode.detail = state, detail
        self.tally.add(state)
        self.phase, self._due_s = Phase.PAUSED, time.monotonic() + self._chosen.pause_between_s
        self.get_logger().info(
            f"{episode.summary(self._control_dt)}; {self.tally.succeeded} of {self.tally.finished} succeeded"
        )
        self._report()

    def _go_on(self) -> None:
        start = next(self._starts, None)
        if start is not None:
            self._begin(start)
            return
        self.phase, self._due_s = Phase.DONE, time.monotonic() + _LINGER_S
        self.get_logger().info(f"done: {self.tally.succeeded} of {self.tally.finished} episodes succeeded")

    def _lose_policy(self, silent_s: float) -> None:
        episode, self.phase = self.episode, Phase.LOST
        self._last_taken_ns = self._now_ns  # an answer to an older image is not a heartbeat
        episode.state = EpisodeState.ABORTED
        episode.detail = (
            f"no action was taken for {silent_s:.1f} s ({episode.ignored} ignored in this episode); "
            "the episode restarts when the policy answers"
        )
        self.get_logger().error(f"episode {episode.start.index} aborted: {episode.detail}")
        self._report()

    def _report(self) -> None:
        self._outputs.episode(self._now_ns, self.episode, self._instruction.current, self.tally, self._control_dt)

    # Inputs

    def _on_other_instruction(self, text: str) -> None:
        if self.phase not in (Phase.RUNNING, Phase.LOST):
            self.get_logger().info(f"no episode is running: '{text}' is not judged; the next episode has its own task")
            return
        task = task_of(text, self.robot.world.arm.tasks)
        if task is None:
            self.get_logger().warning(
                f"no task has the instruction '{text}': '{self.episode.task.instruction}' is still judged"
            )
            return
        self.episode.judge(task)
        self.get_logger().info(f"new instruction '{text}': it is judged from now on, with its full time")
        self._report()

    def _expected(self) -> Expected | None:
        if self.phase not in (Phase.RUNNING, Phase.LOST):
            return None
        return Expected(
            began_ns=self.episode.began_ns,
            last_taken_ns=self._last_taken_ns,
            newest_ns=self._newest_image_ns,
            # A policy that was lost may be slower than the images that seek it.
            only_newest=self._chosen.lockstep and self.phase is Phase.RUNNING,
            instruction=self._instruction.current,
        )

    def _on_ignored(self, stamp: int) -> None:
        self.episode.ignored += 1
        if self._chosen.lockstep and 0 < self._newest_image_ns == stamp:
            self._hold_and_look()  # this image gets no other answer

    def _starts_again(self, what: str) -> bool:
        lost = self.phase is Phase.LOST
        if lost:
            self.get_logger().info(f"{what} arrive again: the episode restarts")
            self._begin(self.episode.start)
        return lost

    def _on_command(self) -> None:
        if self._starts_again("commands"):
            return
        self.episode.actions += self.phase is Phase.RUNNING
        self._acted_s = time.monotonic()

    def _on_refused(self) -> None:
        self.episode.ignored += self.phase is Phase.RUNNING

    def _on_action(self, values: np.ndarray, stamp: int) -> None:
        if self._starts_again("actions"):
            return
        self.robot.take(values, (self._now_ns - stamp) * 1e-9)
        self.episode.actions += 1
        self._last_taken_ns, self._acted_s = stamp, time.monotonic()
        if not self._chosen.lockstep:
            return
        for _ in range(self._per_action):
            self._step()
            if self.phase is not Phase.RUNNING:
                return
        self._look()


def main() -> None:
    """Runs the node; the exit code is 2 for an error that the user can fix."""
    finished, failure = attrgetter("finished"), attrgetter("failure")
    sys.exit(run_node("sim_robot", SimRobot, close=SimRobot.close, finished=finished, failure=failure))
