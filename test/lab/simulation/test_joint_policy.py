# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose actions position joints moves a simulated arm, from its tokens to the motors."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support.paths import ORACLES, needs

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.control.convention import ConventionSettings
from specvla_ros.control.follower import ActionFollower
from specvla_ros.control.gripper import Gripper, GripperSettings
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, trajectory_point
from specvla_ros.control.joint_space import JointKinematics, JointMotion, JointSpace
from specvla_ros.control.pose import PoseHistory, Posture
from specvla_ros.engine.outcome import Action
from specvla_ros.lab.simulation.arm import TABLE_ARM, joint_model
from specvla_ros.lab.simulation.commanded_arm import CommandedArm
from specvla_ros.lab.simulation.controllers import CONTROL_DT_S, JointTrajectory, Point
from specvla_ros.lab.simulation.driven_robot import simulation_limits
from specvla_ros.lab.simulation.tasks import draw_layout
from specvla_ros.lab.simulation.world import World
from specvla_ros.messages.action_message import ActionMeaning, stamped_action, vla_action_fields
from specvla_ros.models.checkpoint import load_target

ORACLE = ORACLES / "pi0fast_tiny_a"
pytestmark = needs(ORACLE)
ARM = TABLE_ARM
OF_JOINTS = ConventionSettings(dt=0.1, reference="delta", frame="joints", joints=ARM.joints, joint_unit="deg")


@pytest.fixture(scope="module")
def answer() -> Action:
    """A chunk of ten actions of seven values, decoded from LeRobot's own checkpoint."""
    case = json.loads((ORACLE / "cases.json").read_text())[0]
    names = [name.removeprefix("observation.images.") for name in case["images"]]
    images = {
        name: np.array(Image.open(ORACLE / file).convert("RGB"))
        for name, file in zip(names, case["images"].values(), strict=True)
    }
    policy = load_target(ORACLE / "checkpoint", device="cpu", cameras=tuple(names))
    outcome = Engine(policy, EngineSettings(mode="ar")).act(
        Observation(images, case["task"], 1, state=np.array(case["state"]))
    )
    assert isinstance(outcome, Action) and outcome.actions.shape == (10, 7)
    return outcome


def published(answer, settings=OF_JOINTS):
    meaning = ActionMeaning(settings.convention("", None, answer.names), "", "base")
    fields = vla_action_fields(answer, meaning, seq=0, publish_s=0.0, latency_s=0.0)
    return stamped_action(SimpleNamespace(**fields), 0.0)


def commanded(command, kinematics, target):
    positions, velocities = kinematics.follow(target)
    if command == "position_array":
        return positions
    nothing = np.zeros(0)
    point = Point(TRAJECTORY_AHEAD_S, trajectory_point(positions, velocities), nothing, nothing)
    return JointTrajectory(0.0, ARM.joints, (point,))


@pytest.mark.parametrize("command", ["position_array", "joint_trajectory"])
def test_a_chunk_of_joint_positions_is_where_the_arm_goes(answer, command):
    world = World(ARM)
    world.reset(draw_layout(0))
    arm = CommandedArm(world, command)
    arm.reset()
    acceleration = np.array(ARM.acceleration) / 2
    model = replace(joint_model(world.model, ARM), max_acceleration=acceleration, max_jerk=acceleration / 0.04)
    kinematics, limits, history = JointKinematics(model), simulation_limits(ARM), PoseHistory[Posture]()
    follower = ActionFollower(
        JointSpace(kinematics, limits), JointMotion(kinematics, model, limits), Gripper(GripperSettings()), history
    )
    begin = world.joint_state()[0][:7]
    kinematics.start(dict(zip(ARM.joints, begin.tolist(), strict=True)))
    follower.rest_at(Posture(begin))
    history.add(0.0, Posture(begin))
    follower.take(published(answer, replace(OF_JOINTS, joint_unit="rad")), 0.0)
    seen, now_s = [begin], 0.0
    for _ in range(round(3.0 / CONTROL_DT_S)):
        now_s += CONTROL_DT_S
        arm.controller.take(commanded(command, kinematics, follower.step(now_s)), now_s)
        arm.advance(now_s)
        seen.append(world.joint_state()[0][:7])
        history.add(now_s, Posture(seen[-1]))
    np.testing.assert_allclose(seen[-1], begin + answer.actions[-1], atol=0.01)
    assert np.abs(seen[-1] - begin).max() > 0.1
    assert (np.abs(np.diff(seen, axis=0)) / CONTROL_DT_S <= 1.1 * np.array(ARM.speed)).all()


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"joint_unit": "auto"}, r"action\.joint_unit \(rad, deg or percent\)"),
        ({"joints": ("",)}, r"action\.joints \(names of the joints"),
        ({"reference": "auto"}, r"action\.reference"),
        ({"joints": ARM.joints[:6]}, "has 6 names, but"),
        ({"joints": (*ARM.joints[:6], "gripper")}, r"action\.gripper"),
        ({"frame": "base"}, r"set action\.frame to joints"),
    ],
)
def test_what_an_action_of_joints_means_is_never_guessed(answer, changed, words):
    with pytest.raises(UserError, match=words):
        published(answer, replace(OF_JOINTS, **changed))


def test_no_joint_is_named_twice():
    with pytest.raises(UserError, match="names joint1 more than once"):
        replace(OF_JOINTS, joints=("joint1", "joint1"))


def test_a_gripper_beside_the_joints_is_not_an_angle(answer):
    settings = replace(OF_JOINTS, joints=(*ARM.joints[:6], "gripper"), gripper="close_high")
    action = published(answer, settings)
    assert action.names[-1] == "gripper"
    np.testing.assert_allclose(action.values[:, 6], answer.actions[:, 6] / 100)
    np.testing.assert_allclose(action.values[:, :6], np.radians(answer.actions[:, :6]))
