# SPDX-License-Identifier: Apache-2.0
"""The seam of robot outputs: motion commands of a robot's interface from bounded targets.

Another package adds one by an entry point of the group `specvla_ros.robot_outputs`; docs/how-to/add-a-robot-output.md.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from rclpy.lifecycle import LifecycleNode
from rclpy.time import Time

from specvla_ros.control.bounded_motion import Target
from specvla_ros.control.inverse_kinematics import JointSolver
from specvla_ros.errors import UserError
from specvla_ros.ros.qos import COMMAND
from specvla_ros.settings.registry import Registry

ROBOT_OUTPUTS = Registry(
    "specvla_ros.robot_outputs",
    [f"specvla_ros.ros.driver.outputs.{name}" for name in ("pose", "twist", "joint_trajectory", "position_array")],
)


@dataclass(frozen=True)
class OutputContext:
    """What an output is made with."""

    node: LifecycleNode
    base_frame: str  # of the targets
    period_s: float  # of the control loop
    joints: tuple[str, ...] = ()  # names of the arm's joints, in the order of the commands; empty: none are named
    solver: JointSolver | None = None  # inverse kinematics; None: no model of the robot is given
    publishers: list[Any] = field(default_factory=list)
    ending: ExitStack = field(default_factory=ExitStack)  # what else ends when the driver is cleaned up

    def create_publisher(self, kind: type, topic: str) -> Any:
        """A publisher that is silent while the driver is not active."""
        self.publishers.append(self.node.create_lifecycle_publisher(kind, topic, COMMAND))
        return self.publishers[-1]

    def close(self) -> None:
        self.ending.close()
        while self.publishers:
            self.node.destroy_lifecycle_publisher(self.publishers.pop())

    @property
    def heard(self) -> bool:
        """Whether anybody subscribes to what is sent."""
        return any(publisher.get_subscription_count() for publisher in self.publishers)

    def require_solver(self, output: str) -> JointSolver:
        """The inverse kinematics; raises UserError where there is no model to compute it with."""
        if self.solver is None:
            raise UserError(
                f"output: {output} needs the robot's kinematics; set joints.model to its MJCF or URDF, joints.names, "
                "joints.tool and joints.max_speed"
            )
        return self.solver


class RobotOutput(Protocol):
    """Commands of one interface; registered as what makes one from an `OutputContext`: its class, or a function.

    Attributes:
        follows_velocity: whether the robot is sent velocities, so that where it is must be measured again and again;
            otherwise it is sent to positions.
        by_order: whether joints are sent without their names, so that their order must be the controller's.
    """

    follows_velocity: bool = False
    by_order: bool = False

    def start(self, joint_positions: Mapping[str, float]) -> None:
        """Begins at the robot's present joints, or raises UserError where they are not known; sends nothing yet."""

    def send(self, target: Target, now: Time) -> None:
        """Sends the command of one control step, or raises UnreachableError."""

    def send_positions(self, positions: np.ndarray) -> None:
        """Sends joints' positions, float64 [n], as they are; of outputs that are `by_order`."""


@ROBOT_OUTPUTS.register("none", order=0)
class DryRun(RobotOutput):
    """A dry run: everything is computed and reported, and nothing is sent."""

    def __init__(self, context: OutputContext) -> None:
        pass

    def send(self, target: Target, now: Time) -> None:
        pass
