# SPDX-License-Identifier: Apache-2.0
"""Checks that an array of joints is in the controller's order: by asking the controller, or by a trial on the arm."""

import time
from collections.abc import Mapping

import numpy as np
from rcl_interfaces.srv import GetParameters
from rclpy.client import Client
from rclpy.task import Future

from specvla_ros.control.driver import Driver
from specvla_ros.control.joint_order import JointOrderTrial, choose_ways
from specvla_ros.errors import UserError
from specvla_ros.ros.driver.outputs import OutputContext, RobotOutput
from specvla_ros.ros.driver.parameters import DriverParameters

_ANSWER_S = 3.0
_LOOKS = 2  # a guard's publisher is discovered a little after its subscription


class JointOrder:
    """Blocks commands and actions until the controller's order is known to be right.

    A wrong order blocks them until the driver is configured again.
    """

    def __init__(self, context: OutputContext, chosen: DriverParameters, output: RobotOutput) -> None:
        self._node, self._solver, self._output = context.node, context.solver, output
        self._names, self._limits = context.joints, chosen.limits
        self._controller = chosen.joints.controller.rstrip("/") if output.by_order else ""
        tries = output.by_order and chosen.joints.check_order and not self._controller
        if tries and not output.tries_order:
            raise UserError(
                f"output: {chosen.output} sends joints without names: set joints.controller to the controller's node, "
                "which is asked for their order, or joints.check_order to false"
            )
        self.pending = tries and context.solver is not None  # whether a trial is still needed
        self.problem = f"{self._controller} has not reported its joints yet" if self._controller else ""
        self._client: Client | None = None
        if self._controller:
            self._client = context.node.create_client(GetParameters, f"{self._controller}/get_parameters")
            context.ending.callback(self._close)
        self._answer: Future[GetParameters.Response] | None = None
        self._asked_s = time.monotonic()
        self._trial: JointOrderTrial | None = None
        self._here: np.ndarray | None = None  # float64 [n], the joints as measured
        self._home: np.ndarray | None = None  # float64 [n], where the first trial started
        self._looks = 0

    def look(self, *, heard: bool) -> None:
        """Compares the joint order with the controller's, once it answers; called periodically.

        `heard`: commands have a subscriber, and the guard, if any, sent its state.
        """
        self._looks = self._looks + 1 if heard else 0
        if self._client is None:
            return
        if self._answer is None and self._client.service_is_ready():
            self._answer, self._asked_s = (
                self._client.call_async(GetParameters.Request(names=["joints"])),
                time.monotonic(),
            )
        if self._answer is not None and self._answer.done():
            result = self._answer.result()
            values = result.values if result is not None else []
            self._compare(tuple(values[0].string_array_value) if values else ())
        elif time.monotonic() - self._asked_s > _ANSWER_S:
            self._tell(
                f"joints.controller '{self._controller}' does not report its joints, which must be {list(self._names)} "
                "as in joints.names; start it, or give the controller's node name as in `ros2 node list`"
            )
            self._answer, self._asked_s = None, time.monotonic()

    def start(self) -> None:
        """Called once the joints' start is known. Raises UserError while nothing may be sent."""
        if self.problem:
            raise UserError(self.problem)
        if self.pending and self._solver is not None:
            start, ranges = self._solver.positions, self._solver.ranges
            self._ways = choose_ways(self._names, start, ranges, self._allowed, self._home)

    def step(self, driver: Driver, joints: Mapping[str, float], steady_s: float) -> bool:
        """Runs a step of the trial, if one is needed and allowed. Returns False if the driver's command goes out."""
        if not self.pending or self._solver is None:
            return False
        if all(name in joints for name in self._names):
            self._here = np.array([joints[name] for name in self._names])
        if driver.guarded or driver.holding or driver.problem or self._looks < _LOOKS or self._here is None:
            interrupted, self._trial = self._trial is not None, None
            driver.anchored = driver.anchored and not interrupted
            return interrupted
        if self._trial is None:
            self._node.get_logger().info("moving each joint a little to check the order of joints.names")
            start = self._solver.positions
            self._home = start.copy() if self._home is None else self._home
            self._trial = JointOrderTrial(self._names, start, self._ways, self._solver.max_speed)
        self._output.send_positions(self._trial.step(self._here, steady_s))
        if self._trial.done:
            self._tell(self._trial.problem)
            self.pending, self._trial = False, None
            driver.anchored = False  # it starts again from the robot's present pose
        return True

    def _allowed(self, positions: np.ndarray) -> bool:
        assert self._solver is not None
        tool = self._solver.pose_of(dict(zip(self._names, positions.tolist(), strict=True)))
        return not self._limits.start_problem(tool.position)

    def _compare(self, theirs: tuple[str, ...]) -> None:
        self._close()
        wrong = f"{self._controller} takes {list(theirs)}, but joints.names is {list(self._names)}"
        self._tell("" if theirs == self._names else f"{wrong}; use its order, then configure the driver again")

    def _tell(self, problem: str) -> None:
        if problem and problem != self.problem:
            self._node.get_logger().error(problem)
        self.problem = problem

    def _close(self) -> None:
        if self._client is not None:
            self._node.destroy_client(self._client)
            self._client = None
