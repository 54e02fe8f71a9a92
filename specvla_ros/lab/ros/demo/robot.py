# SPDX-License-Identifier: Apache-2.0
"""The demo's arm: which one, what moves it, and what driver and guard are told of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ament_index_python.packages import get_package_share_directory

from specvla_ros.lab.ros.sim_robot.parameters import ACTIONS
from specvla_ros.lab.simulation.arms import Arm
from specvla_ros.ros.wiring import RobotTopics
from specvla_ros.settings.profiles import merge_parameters

# Often enough for somebody who watches, and for what is counted at the demo's end.
_DIAGNOSTICS_PERIOD_S = 0.25


@dataclass(frozen=True)
class DemoRobot:
    """A simulated arm, moved by a policy's actions or, as arms are that are sold, by commands.

    Args:
        arm: which one.
        interface: `action`: the simulator follows actions itself; else what driver and guard send it, one of the
            simulated robot's `command`.
    """

    arm: Arm
    interface: str = ACTIONS

    @property
    def commanded(self) -> bool:
        """Whether a driver and a guard stand between the policy and the arm."""
        return self.interface != ACTIONS

    @property
    def topics(self) -> RobotTopics:
        """The simulated robot's."""
        commands = {name: f"/sim_robot/command/{name}" for name in (self.interface, "gripper")}
        return RobotTopics("/sim_robot/tool_pose", "/joint_states", "/instruction", commands)

    def parameters(self) -> dict[str, Any]:
        """Of driver and guard, by name: the simulated arms' limits, and this one's workspace and gripper."""
        config = Path(get_package_share_directory("specvla_ros"), "config", "robots", "simulated.yaml")
        gripper = self.arm.gripper
        return {
            **merge_parameters([config], {}, node="driver"),
            "output": self.interface,
            "limits.workspace_min": self.arm.low,
            "limits.workspace_max": self.arm.high,
            "gripper.open_value": gripper.open[0],
            "gripper.closed_value": gripper.closed[0],
            "diagnostics_period_s": _DIAGNOSTICS_PERIOD_S,
            "use_sim_time": True,
        }
