"""The topic `/policy/action` of the simulated robot."""

from collections.abc import Callable

import numpy as np
from rclpy.node import Node

from specvla_ros.errors import UserError
from specvla_ros.image_message import stamp_ns
from specvla_ros.msg import VlaAction
from specvla_ros.nodes.qos import ACTION
from specvla_ros.nodes.sim_actions import (
    ActionIgnoredError,
    ActionRefusedError,
    Expected,
    check_relevance,
    robot_values,
)
from specvla_ros.simulation.robot import SimulatedRobot


class ActionInput:
    """Lets through what the robot may take, and says why it does not take the rest.

    Args:
        node: whose topic it is.
        robot: that is to take actions.
        expected: what an action must answer now; None: nothing is expected.
        on_action: called with the values, in the robot's own period, and the stamp in nanoseconds.
        on_ignored: called with the stamp of one that is not to be taken; 0: it has no valid one.
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
        self._logger = node.get_logger()
        self._robot = robot
        self._expected = expected
        self._on_action = on_action
        self._on_ignored = on_ignored
        self._subscription = node.create_subscription(VlaAction, "/policy/action", self._on_message, ACTION)

    @property
    def topic(self) -> str:
        """As remapped."""
        return str(self._subscription.topic_name)

    def _on_message(self, message: VlaAction) -> None:
        expected = self._expected()
        if expected is None:
            return
        stamp = 0
        try:
            stamp = _stamp(message)
            check_relevance(stamp, message.instruction, expected)
            values = robot_values(
                message.values,
                message.action_dt,
                robot_dt=self._robot.action_dt,
                largest_translation=self._robot.largest_translation,
            )
        except ActionRefusedError as why:
            self._logger.error(f"an action was refused: {why}", throttle_duration_sec=5.0)
            self._on_ignored(stamp)
        except ActionIgnoredError as why:
            self._logger.warning(f"an action was ignored: {why}", throttle_duration_sec=5.0)
            self._on_ignored(stamp)
        else:
            self._on_action(values, stamp)


def _stamp(message: VlaAction) -> int:
    try:
        return stamp_ns(message.header)
    except UserError as error:
        raise ActionRefusedError(str(error).split(";")[0]) from None
