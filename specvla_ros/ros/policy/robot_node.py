# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `<robot>/policy`: topics, diagnostics and lifecycle of one of several robots at a policy."""

from collections.abc import Callable
from typing import Any

from diagnostic_msgs.msg import DiagnosticStatus
from rcl_interfaces.msg import SetParametersResult
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from specvla_ros.errors import UserError
from specvla_ros.ros.diagnostics import DiagnosticsPublisher
from specvla_ros.ros.lifecycle import init_lifecycle_node
from specvla_ros.ros.parameters import (
    check_values,
    declare_parameters,
    read_parameters,
    refuse_fixed,
    unknown_parameters,
)
from specvla_ros.ros.policy.inputs import declared_overrides
from specvla_ros.ros.policy.parameters import READ_IN_ACTIVATE, PolicyParameters, SharedParameters
from specvla_ros.ros.policy.robot_part import LoadedPolicy, RobotPart
from specvla_ros.settings.parameter import walk


class RobotNode(LifecycleNode):
    """Takes its place in the engine in configure, listens to images while active.

    Args:
        robot: the robot's name, its namespace below the policy node's.
        policy: that is loaded; None while none is.
        usual: the values of parameters that this robot is not given.
        max_image_age_s: the limit of an image's age, asked for at each one; 0: none.
        diagnostics_period_s: time between two diagnostics.
        node_arguments: those of rclpy.node.Node.

    Raises:
        UserError: a parameter has the wrong type or is out of range.
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
        init_lifecycle_node(self, "policy", **node_arguments)
        self._robot, self._policy = robot, policy
        try:
            declare_parameters(self, SharedParameters, lifecycle=True, usual=usual)
        except UserError:
            self.destroy_node()
            raise
        # What is given to every node of the name may be the other's.
        others = [declared.name for declared in walk(PolicyParameters())]
        for name, hint in unknown_parameters(self, [*declared_overrides(self), *others]).items():
            self.get_logger().warning(f"there is no parameter '{name}'; {hint}")
        self.add_on_set_parameters_callback(self._on_set_parameters)
        self.part = RobotPart(self, robot, max_image_age_s)
        self._diagnostics = DiagnosticsPublisher(self, diagnostics_period_s, self._statuses)

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Takes a place in the engine, and listens to instructions."""
        policy = self._policy()
        if policy is None:
            self.get_logger().error("not configured: the policy is not loaded; configure its own node first")
            return TransitionCallbackReturn.FAILURE
        try:
            chosen = read_parameters(self, SharedParameters)
            self.part.configure(policy, chosen.robot)
        except UserError as error:
            self.get_logger().error(f"not configured: {error}")
            return TransitionCallbackReturn.FAILURE
        self._open(policy, chosen)
        return TransitionCallbackReturn.SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Listens to images and lets actions out."""
        try:
            self.part.activate(read_parameters(self, SharedParameters).robot)
        except UserError as error:
            self.get_logger().error(f"not activated: {error}")
            return TransitionCallbackReturn.FAILURE
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Publishes nothing more, and drops what is in flight; the other robots go on."""
        self.part.deactivate()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Gives the place in the engine back."""
        self.part.release()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """As deactivate and cleanup, for good."""
        self.part.release()
        return super().on_deactivate(state)  # nothing else silences the managed publishers

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Back to unconfigured."""
        self.part.release()
        return super().on_deactivate(state)

    def _on_set_parameters(self, parameters: list[Any]) -> SetParametersResult:
        changed = {parameter.name: parameter.value for parameter in parameters}
        policy = self._policy()
        try:
            check_values(SharedParameters, changed)
            if policy is not None and self.part.configured:
                refuse_fixed(
                    self, SharedParameters, changed, read_in_activate=READ_IN_ACTIVATE, active=self.part.active
                )
                chosen = read_parameters(self, SharedParameters, changed)
                self._open(policy, chosen)
        except UserError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _open(self, policy: LoadedPolicy, chosen: SharedParameters) -> None:
        budget_s, priority = chosen.budget_s, chosen.priority
        policy.thread.call(lambda engine: engine.open(self._robot, budget_s=budget_s, priority=priority))

    def _statuses(self) -> dict[str, DiagnosticStatus]:
        return self.part.statuses()
