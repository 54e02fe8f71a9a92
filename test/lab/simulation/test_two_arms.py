# SPDX-License-Identifier: Apache-2.0
"""A policy for two arms, as OpenVLA-OFT's for ALOHA: a driver takes the values of its own arm and leaves the others."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from support.paths import ORACLES, needs

from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.control.convention import ActionConvention, ActionFrame, ConventionSettings, StampedAction
from specvla_ros.engine.outcome import Action
from specvla_ros.lab.simulation.arms import UR5E
from specvla_ros.lab.simulation.driven_robot import DrivenRobot, Follow
from specvla_ros.messages.action_message import ActionMeaning, stamped_action, vla_action_fields
from specvla_ros.models.checkpoint import load_target

ORACLE = ORACLES / "oft_tiny_a"
SIDES = ("left_", "right_")
VALUES = (*UR5E.joints, "gripper")
NAMES = tuple(side + name for side in SIDES for name in VALUES)
SETTINGS = ConventionSettings(
    dt=0.04, reference="absolute", frame="joints", joints=NAMES, joint_unit="rad", gripper="open_high"
)
# Each arm moves about its home, the right one further.
HOMES = {"left_": np.array([*UR5E.home, 0.5]), "right_": np.array([*UR5E.home, 0.5])}
SWINGS = {"left_": 0.05, "right_": 0.1}


@pytest.fixture(scope="module")
def answer(tmp_path_factory) -> Action:
    """A chunk of 25 actions of 14 values: the oracle's policy, with a head of twice the values."""
    directory = tmp_path_factory.mktemp("aloha") / "checkpoint"
    shutil.copytree(ORACLE / "checkpoint", directory, ignore=shutil.ignore_patterns("proprio_projector*"))
    for path in (directory, *directory.iterdir()):
        path.chmod(0o755)
    low, high = (np.concatenate([HOMES[side] + sign * SWINGS[side] for side in SIDES]).tolist() for sign in (-1, 1))
    ends = {"min": low, "max": high, "q01": low, "q99": high}
    statistics = {"action": ends | {"mask": [True] * len(NAMES)}}
    (directory / "dataset_statistics.json").write_text(json.dumps({"aloha_fold": statistics}))
    (head,) = directory.glob("action_head*")
    saved = torch.load(head)
    for name, tensor in saved.items():
        if "layer_norm1" in name or ".fc2." in name:
            saved[name] = torch.cat([tensor, tensor])
        elif name.endswith(".fc1.weight"):
            saved[name] = torch.cat([tensor, tensor], dim=1) / 2
    torch.save(saved, head)
    case = json.loads((ORACLE / "cases.json").read_text())[0]
    image = np.array(Image.open(ORACLE / case["images"][0]).convert("RGB"))
    outcome = Engine(load_target(directory, device="cpu", cameras=("image",)), EngineSettings()).act(
        Observation({"image": image}, "", 1, prompt_ids=tuple(case["input_ids_given"]))
    )
    assert isinstance(outcome, Action) and outcome.actions.shape == (25, 14)
    return outcome


@pytest.fixture(scope="module")
def published(answer) -> StampedAction:
    meaning = ActionMeaning(SETTINGS.convention("", None, answer.names), "", "base")
    fields = vla_action_fields(answer, meaning, seq=0, publish_s=0.0, latency_s=0.0)
    return stamped_action(SimpleNamespace(**fields), 0.0)


@needs(ORACLE)
@pytest.mark.parametrize("side", SIDES)
def test_each_arm_goes_where_its_own_values_say(published, side):
    mine = published.of_arm(side, UR5E.joints)
    assert mine.names == VALUES
    robot = DrivenRobot(UR5E, "position_array", Follow.GUARDED, joints=True)
    robot.reset("put_red", 0)
    for row in (*mine.values, *[mine.values[-1]] * 3):
        robot.take(np.append(row[:6] - robot.world.joint_state()[0][:6], row[6]))
        for _ in range(4):  # 0.2 s, an action of this robot
            robot.advance()
    np.testing.assert_allclose(robot.world.joint_state()[0][:6], mine.values[-1, :6], atol=0.01)
    assert not robot.refused, "the guard lets them through"
    assert np.abs(mine.values - HOMES[side]).max() > 0.5 * SWINGS[side]


ACTION = StampedAction(
    0.0, np.arange(8.0).reshape(2, 4), ActionConvention(0.1, frame=ActionFrame.JOINTS),
    names=("left_waist", "left_gripper", "right_waist", "right_gripper"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "joints", "names", "first"),
    [
        ("left_", ("waist",), ("waist", "gripper"), [0.0, 1.0]),
        ("right_", ("waist",), ("waist", "gripper"), [2.0, 3.0]),
        ("right_", ("right_waist",), ("right_waist", "gripper"), [2.0, 3.0]),  # as its joint_states call it
        ("left_", ("left_waist", "left_gripper"), ("left_waist", "left_gripper"), [0.0, 1.0]),  # a joint like others
    ],
)
def test_the_values_of_an_arm_are_those_of_its_prefix(prefix, joints, names, first):
    found = ACTION.of_arm(prefix, joints)
    assert found.names == names and found.values[0].tolist() == first
    assert (found.stamp_s, found.convention) == (ACTION.stamp_s, ACTION.convention)


def test_an_action_without_values_of_this_arm_is_refused():
    with pytest.raises(ValueError, match="action_prefix is middle_"):
        ACTION.of_arm("middle_", ("waist",))


def test_a_gripper_of_each_arm_is_told_from_the_joints():
    found = replace(SETTINGS, joint_unit="deg").convention("")
    scales = dict(zip(NAMES, found.joint_units, strict=True))
    assert scales["left_gripper"] == scales["right_gripper"] == 0.01
    assert scales[NAMES[0]] == pytest.approx(np.pi / 180)
