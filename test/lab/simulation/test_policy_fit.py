# SPDX-License-Identifier: Apache-2.0
"""A policy of another robot is refused by `simulate` and by the demo with the same words, before motion."""

import numpy as np
import pytest

from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.simulation.arms import ALL_ARMS, choose_arm
from specvla_ros.lab.simulation.robot import TableRobot, check_policy
from specvla_ros.models.codecs.statistics import ActionStatistics, select_statistics
from specvla_ros.models.families.openvla.config import read_config

OF_JOINTS = ("joints", "joint_digits", "so101")


def statistics_of(policy: str) -> ActionStatistics:
    return select_statistics(read_config(bundled_policy(policy)).norm_stats, "")


def check(policy: str, robot: str) -> None:
    names = choose_arm(robot).action_names(of_joints=policy in OF_JOINTS)
    check_policy(statistics_of(policy), names, TableRobot.largest_translation)


@pytest.mark.parametrize("policy", OF_JOINTS)
def test_a_policy_of_joints_fits_the_arms_that_have_them(policy: str) -> None:
    fitting = {"so101"} if policy == "so101" else {"table", "panda"}
    for robot in (arm.name for arm in ALL_ARMS):
        if robot in fitting:
            check(policy, robot)
            continue
        with pytest.raises(UserError, match=r"the policy moves the joints .*, but this robot has "):
            check(policy, robot)


def test_a_policy_of_the_tool_fits_every_arm_whose_tool_it_can_move() -> None:
    for robot in ("table", "panda", "ur5e"):
        check("nano", robot)


@pytest.mark.parametrize(
    "dims, reach, why",
    [(7, 1.0, "do not fit this robot"), (7, 1e-4, "do not fit this robot"), (14, 0.05, "have 14 values")],
)
def test_a_policy_of_another_robots_tool_is_refused(dims: int, reach: float, why: str) -> None:
    high = np.full(dims, reach)
    statistics = ActionStatistics("own", -high, high, np.ones(dims, dtype=bool))
    with pytest.raises(UserError, match=why):
        check_policy(statistics, choose_arm("table").action_names(of_joints=False), TableRobot.largest_translation)
