# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `<robot>/policy`: topics, diagnostics and lifecycle of one of several robots at a policy."""

from collections.abc import Callable
from typing import Any

from diagnostic_msgs.msg import DiagnosticStatus
from rcl_interfaces.msg import SetParametersResult

from specvla_ros.errors import UserError
from specvla_ros.ros.diagnostics import DiagnosticsPublisher
from specvla_ros.ros.managed_node import ManagedNode
from specvla_ros.ros.parameters import (
    check_values,
    declare_parameters,
    read_parameters,
    refuse_fixed,
    unknown_parameters,
)
from specvla_ros.ros.policy.image_input import declared_overrides
from specvla_ros.ros.policy.parameters import READ_IN_ACTIVATE, PolicyParameters, SharedParameters
from specvla_ros.ros.policy.robot_part import LoadedPolicy, RobotPart
from specvla_ros.settings.parameter import walk


class RobotNode(ManagedNode):
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
        super().__init__("policy", **node_arguments)
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

    def _setup(self) -> None:
        """Takes a place in the engine, and listens to instructions."""
        policy = self._policy()
        if policy is None:
            raise UserError("the policy is not loaded; configure its own node first")
        chosen = read_parameters(self, SharedParameters)
        self.part.configure(policy, chosen.robot)
        policy.thread.open(self._robot, budget_s=chosen.budget_s, priority=chosen.priority)

    def _start(self) -> None:
        """Listens to images and lets actions out."""
        self.part.activate(read_parameters(self, SharedParameters).robot)

    def _stop(self) -> None:
        """Publishes nothing more, and drops what is in flight; the other robots go on."""
        self.part.deactivate()

    def _teardown(self) -> bool:
        """Gives the place in the engine back."""
        self.part.release()
        return True

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
                policy.thread.open(self._robot, budget_s=chosen.budget_s, priority=chosen.priority)
        except UserError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _statuses(self) -> dict[str, DiagnosticStatus]:
        return self.part.statuses()
