# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `policy`: camera images and an instruction in, stamped actions out, for one robot or several."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diagnostic_msgs.msg import DiagnosticStatus
from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter

from specvla_ros.engine.outcome import Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.policy_parameters import (
    ONE_ROBOT,
    READ_IN_ACTIVATE,
    PolicyParameters,
    Progress,
    RobotParameters,
    SharedParameters,
    check_robots,
)
from specvla_ros.ros.node import DiagnosticsPublisher, ManagedNode, make_status, run_node
from specvla_ros.ros.parameters import parameters_declared, read_parameters, refuse_fixed
from specvla_ros.ros.policy.diagnostics import loaded_status, not_loaded_status
from specvla_ros.ros.policy.inference_thread import InferenceThread, load_engine
from specvla_ros.ros.policy.inputs import declared_overrides
from specvla_ros.ros.policy.robot import LoadedPolicy, RobotPart
from specvla_ros.settings.parameter import walk
from specvla_ros.speculation.settings import AcceptanceSettings

if TYPE_CHECKING:  # it imports torch, which is loaded with the policy
    from specvla_ros.engine.engine import Engine
    from specvla_ros.models.target import Target

_LOAD_POLL_S = 0.1
_LAST_WORDS_S = 1.0


class PolicyNode(ManagedNode):
    """Loads the policy in configure, receives images while active, and publishes the engine's answers.

    With the parameter `robots` it serves several robots, with a node for each. Its transitions then apply to these
    nodes too, and each of them can also be deactivated and activated by itself.

    Args:
        cli_args: as for rclpy.node.Node; remappings and parameter files also reach the robots' nodes.

    Attributes:
        robots: the nodes of several robots; they must be spun with this one.
        parts: each robot's part by its name; a single robot's name is empty.
    """

    recoverable = Exception  # the user can fix any error that a checkpoint raises

    def __init__(self, *, cli_args: Sequence[str] = (), **node_arguments: Any) -> None:
        super().__init__("policy", cli_args=[*cli_args], **node_arguments)
        self.robots: tuple[RobotNode, ...] = ()
        self._thread: InferenceThread | None = None
        self._shut_down_s = math.inf
        self._model_status = not_loaded_status()
        self._chosen = PolicyParameters()  # read when the node is configured
        self._target: Target | None = None  # of the loaded policy
        self._policy: LoadedPolicy | None = None
        with parameters_declared(self, PolicyParameters, lifecycle=True, declared_later=declared_overrides(self)):
            names = tuple(self.get_parameter("robots").value)
            check_robots(names)
            self.robots = self._make_robots([name for name in names if name], cli_args)
        self._follow_changes(PolicyParameters)
        self._own = RobotPart(self, "", self._max_image_age_s) if names == ONE_ROBOT else None
        self.parts = {name: robot.part for name, robot in zip(names, self.robots, strict=False)}
        if self._own is not None:
            self.parts[""] = self._own
        self._diagnostics = DiagnosticsPublisher(self, self.get_parameter("diagnostics_period_s").value, self._statuses)

    def _make_robots(self, names: Sequence[str], cli_args: Sequence[str]) -> tuple[RobotNode, ...]:
        """Makes the nodes of several robots.

        A node name or namespace on the command line would apply to every node of the process, so it is not passed on.
        """
        chosen = read_parameters(self, PolicyParameters)
        arguments = _without_names([*_ros_arguments(sys.argv), *_ros_arguments(cli_args)])
        above = self.get_namespace().rstrip("/")
        clock = Parameter("use_sim_time", value=self.get_parameter("use_sim_time").value)
        return tuple(
            RobotNode(
                name,
                lambda: self._policy,
                SharedParameters(robot=chosen.robot),
                self._max_image_age_s,
                chosen.diagnostics_period_s,
                namespace=f"{above}/{name}",
                parameter_overrides=[clock],
                use_global_arguments=False,
                cli_args=arguments,
            )
            for name in names
        )

    def destroy_node(self) -> None:
        for robot in self.robots:
            robot.destroy_node()
        super().destroy_node()

    # Transitions

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        answer = super().on_configure(state)
        if answer is not TransitionCallbackReturn.SUCCESS:
            self._model_status = make_status(DiagnosticStatus.ERROR, self.stop_reason.splitlines()[0])
        return answer

    def _setup(self) -> None:
        self._chosen = read_parameters(self, PolicyParameters)
        self._chosen.check()
        for each in (self._diagnostics, *(robot._diagnostics for robot in self.robots)):
            each.set_period(self._chosen.diagnostics_period_s)
        self._thread = InferenceThread(
            self._load, on_progress=self._on_progress, on_outcome=self._on_outcome, on_fault=self._on_fault
        )
        description = self._wait_loaded(self._thread)
        target = self._target
        assert target is not None, "the policy was not loaded"
        self._policy = LoadedPolicy(self._thread, target)
        if self._own is not None:
            self._own.configure(self._policy, self._chosen.robot)
        self._model_status = loaded_status(description)
        self.get_logger().info("policy loaded: " + ", ".join(f"{key} {value}" for key, value in description.items()))
        for robot in self.robots:  # a robot that cannot logs the reason; the others continue
            robot.trigger_configure()

    def _load(self, progress: Progress) -> Engine:
        engine = load_engine(self._chosen, self._now_ns, progress)
        engine.takes_partial = True
        self._target = engine.target
        return engine

    def _wait_loaded(self, thread: InferenceThread) -> dict[str, str]:
        """Spins until the policy is loaded, as configure must return its result from within the callback.

        All callbacks share one thread: rclpy's MultiThreadedExecutor hands out the same message again until a worker
        takes it, and so keeps the interpreter from the inference thread for seconds.
        """
        while not thread.loaded and self.executor is not None:
            self.executor.spin_once(timeout_sec=_LOAD_POLL_S)
        return thread.wait_loaded()

    def _start(self) -> None:
        if self._own is not None:
            self._own.activate(read_parameters(self, PolicyParameters).robot)
        for robot in self.robots:
            if robot.part.configured and not robot.part.active:
                robot.trigger_activate()

    def _stop(self) -> None:
        for robot in self.robots:
            if robot.part.active:
                robot.trigger_deactivate()
        if self._own is not None:
            self._own.deactivate()

    def _teardown(self) -> bool:
        for robot in self.robots:
            if robot.part.configured:
                robot.trigger_cleanup()
        if self._own is not None:
            self._own.release()
        self._policy = self._target = None
        thread, self._thread = self._thread, None
        self._model_status = not_loaded_status()
        return thread is None or thread.stop()

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Deactivates and cleans up. The node can then only end, and its process with it."""
        answer = super().on_shutdown(state)
        self._shut_down_s = time.monotonic()
        return answer

    @property
    def finished(self) -> bool:
        """True once the node was shut down and its answer has had time to leave."""
        return time.monotonic() - self._shut_down_s > _LAST_WORDS_S

    # Parameters

    def _change(self, changed: Mapping[str, Any]) -> None:
        self._refuse_robots(changed)
        thread = self._thread
        if thread is None:  # they are read when the policy is loaded
            return
        refuse_fixed(self, PolicyParameters, changed, read_in_activate=READ_IN_ACTIVATE, active=self.active)
        chosen = read_parameters(self, PolicyParameters, changed)
        if any(name.startswith(EngineSettings.ROS_PREFIX) for name in changed):
            self._model_status = loaded_status(thread.switch(chosen.decoding))
        elif any(name.startswith(AcceptanceSettings.ROS_PREFIX) for name in changed):
            self._model_status = loaded_status(thread.set_acceptance(chosen.engine.acceptance))
        if "max_image_age_s" in changed:
            thread.call(lambda engine: engine.set_max_image_age(changed["max_image_age_s"]))

    def _refuse_robots(self, changed: Mapping[str, Any]) -> None:
        """Refuses changes of `robots`, and of parameters that belong to the robots' own nodes."""
        if "robots" in changed and tuple(changed["robots"]) != tuple(self.get_parameter("robots").value):
            raise UserError("'robots' is read when the node starts: restart it with the new robots")
        theirs = [declared.name for declared in walk(RobotParameters()) if declared.name in changed]
        if self.robots and theirs:
            node = self.robots[0].get_fully_qualified_name()
            raise UserError(f"'{theirs[0]}' belongs to each robot: set it on the robot's node, such as {node}")

    def _max_image_age_s(self) -> float:
        return float(self.get_parameter("max_image_age_s").value)

    # Called from the inference thread

    def _on_outcome(self, outcome: Outcome) -> None:
        self.parts[outcome.observation.stream].take_outcome(outcome)

    def _on_fault(self, trace: str) -> None:
        for part in self.parts.values():
            part.take_fault(trace.strip().splitlines()[-1])
        self.get_logger().error(f"the inference thread continued after a fault:\n{trace}", throttle_duration_sec=5.0)

    def _on_progress(self, what: str, fraction: float) -> None:
        text = f"loading: {what} ({fraction:.0%})" if fraction < 1.0 else what
        self._model_status = make_status(DiagnosticStatus.WARN, text)

    def _statuses(self) -> dict[str, DiagnosticStatus]:
        own = self._own.statuses() if self._own is not None else {}
        fault = self._thread.device_fault if self._thread is not None else ""
        model = make_status(DiagnosticStatus.ERROR, fault) if fault else self._model_status
        return {"model": model, **own}

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)


class RobotNode(ManagedNode):
    """The node `<robot>/policy` of one of several robots; configure gives it a place in the engine.

    Args:
        policy: returns the loaded policy, or None.
        usual: values of parameters that this robot is not given.
    """

    def __init__(
        self,
        robot: str,
        policy: Callable[[], LoadedPolicy | None],
        usual: SharedParameters,
        max_image_age_s: Callable[[], float],
        diagnostics_period_s: float,
        **node_arguments: Any,
    ) -> None:
        super().__init__("policy", **node_arguments)
        # A parameter that is given to every node of this name may be the policy node's.
        others = [*declared_overrides(self), *(declared.name for declared in walk(PolicyParameters()))]
        with parameters_declared(self, SharedParameters, lifecycle=True, usual=usual, declared_later=others):
            self._robot, self._policy = robot, policy
        self._follow_changes(SharedParameters)
        self.part = RobotPart(self, robot, max_image_age_s)
        self._diagnostics = DiagnosticsPublisher(self, diagnostics_period_s, self.part.statuses)

    def _setup(self) -> None:
        policy = self._policy()
        if policy is None:
            raise UserError("the policy is not loaded; configure the policy node first")
        chosen = read_parameters(self, SharedParameters)
        self.part.configure(policy, chosen.robot)
        self._open(policy, chosen)

    def _start(self) -> None:
        self.part.activate(read_parameters(self, SharedParameters).robot)

    def _stop(self) -> None:
        self.part.deactivate()

    def _teardown(self) -> bool:
        self.part.release()
        return True

    def _change(self, changed: Mapping[str, Any]) -> None:
        policy, part = self._policy(), self.part
        if policy is not None and part.configured:
            refuse_fixed(self, SharedParameters, changed, read_in_activate=READ_IN_ACTIVATE, active=part.active)
            self._open(policy, read_parameters(self, SharedParameters, changed))

    def _open(self, policy: LoadedPolicy, chosen: SharedParameters) -> None:
        budget_s, priority = chosen.budget_s, chosen.priority
        policy.thread.call(lambda engine: engine.open(self._robot, budget_s=budget_s, priority=priority))


def _ros_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments after `--ros-args`, up to `--`."""
    if "--ros-args" not in arguments:
        return []
    ours = [*arguments[arguments.index("--ros-args") + 1 :]]
    return ours[: ours.index("--")] if "--" in ours else ours


def _without_names(arguments: Sequence[str]) -> list[str]:
    """ROS arguments without node names and namespaces."""
    kept = ["--ros-args"]
    for argument in arguments:
        if not any(f"__{what}:=" in argument for what in ("ns", "node", "name")):
            kept.append(argument)
        elif kept[-1] in ("-r", "--remap"):
            kept.pop()
    return kept


def main() -> None:
    """Runs the node."""
    sys.exit(
        run_node(
            "policy",
            PolicyNode,
            close=PolicyNode.close,
            finished=lambda node: node.finished,
            others=lambda node: node.robots,
        )
    )
