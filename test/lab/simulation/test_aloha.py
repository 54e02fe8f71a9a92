# SPDX-License-Identifier: Apache-2.0
"""ALOHA's two arms: each has a driver and a guard, and follows its own values of a policy's answer for both."""

import importlib.util
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.gl import needs_gl
from support.paths import ORACLES, needs
from typer.testing import CliRunner

from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.control.convention import ActionConvention, ActionFrame, ConventionSettings, StampedAction
from specvla_ros.engine.outcome import Action
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.simulation.arms import ALOHA, GYM_ALOHA
from specvla_ros.lab.simulation.driven_robot import DrivenRobot, Follow
from specvla_ros.messages.action_message import ActionMeaning, stamped_action, vla_action_fields
from specvla_ros.models.checkpoint import load_target
from specvla_ros.settings.profiles import merge_parameters

OFT, PI0_FAST = ORACLES / "oft_tiny_a", ORACLES / "pi0fast_tiny_a"
CONFIG = Path(__file__).parents[3] / "config" / "robots" / "aloha.yaml"
HAS_MODEL = importlib.util.find_spec("gym_aloha") is not None
has_model = pytest.mark.skipif(not HAS_MODEL, reason="needs requirements/robots.txt")
SIDES = ("left_", "right_")
NAMES = tuple(side + name for side in SIDES for name in (*ALOHA.joints, "gripper"))
HOME = np.array(ALOHA.home)
SETTINGS = ConventionSettings(
    dt=0.04, reference="absolute", frame="joints", joints=NAMES, joint_unit="rad", gripper="open_high"
)
# Each arm moves about its home: the left one with an open gripper, the right one further and closed.
MIDDLE, SWINGS = np.array([*HOME, 0.9, *HOME, 0.1]), np.repeat([0.05, 0.1], 7)


def published(answer: Action) -> StampedAction:
    """The answer as a driver receives it."""
    convention = SETTINGS.convention("", None, answer.names)
    fields = vla_action_fields(answer, ActionMeaning(convention, "", "base"), seq=0, publish_s=0.0, latency_s=0.0)
    return stamped_action(SimpleNamespace(**fields), 0.0)


def act(checkpoint: Path, cameras: Sequence[str], observation: Observation) -> Action:
    policy = load_target(checkpoint, device="cpu", cameras=tuple(cameras))
    outcome = Engine(policy, EngineSettings("ar")).act(observation)
    assert isinstance(outcome, Action)
    return outcome


def copied(checkpoint: Path, into: Path) -> Path:
    shutil.copytree(checkpoint, into, ignore=shutil.ignore_patterns("proprio_projector*"))
    for path in (into, *into.rglob("*")):
        path.chmod(0o755)
    return into


@pytest.fixture(scope="module")
def oft(tmp_path_factory) -> StampedAction:
    """A chunk of 25 actions of 14 values: OpenVLA-OFT's oracle, with a head of twice the values."""
    directory = copied(OFT / "checkpoint", tmp_path_factory.mktemp("aloha") / "oft")
    low, high = ((MIDDLE + sign * SWINGS).tolist() for sign in (-1, 1))
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
    case = json.loads((OFT / "cases.json").read_text())[0]
    image = np.array(Image.open(OFT / case["images"][0]).convert("RGB"))
    seen = Observation({"image": image}, "", 1, prompt_ids=tuple(case["input_ids_given"]))
    return published(act(directory, ["image"], seen))


@pytest.fixture(scope="module")
def pi0_fast(tmp_path_factory) -> StampedAction:
    """A chunk of 5 actions of 14 values: LeRobot's oracle of pi0-FAST, whose 10 x 7 coefficients are read as 5 x 14."""
    directory = copied(PI0_FAST / "checkpoint", tmp_path_factory.mktemp("aloha") / "pi0_fast")
    for file in directory.glob("*.json"):
        fields: dict[str, Any] = json.loads(file.read_text())
        if file.name == "config.json":
            fields |= {"chunk_size": 5, "n_action_steps": 5}
            fields["output_features"]["action"]["shape"] = [14]
        for step in fields.get("steps", []):
            if "action" in step["config"].get("features", {}):
                step["config"]["features"]["action"]["shape"] = [14]
        file.write_text(json.dumps(fields))
    about_home = {"action.mean": torch.tensor(MIDDLE).float(), "action.std": torch.tensor(SWINGS / 4).float()}
    for file in directory.glob("policy_*.safetensors"):
        kept = {name: value for name, value in load_file(file).items() if not name.startswith("action.")}
        save_file(kept | about_home, file)
    case = json.loads((PI0_FAST / "cases.json").read_text())[0]
    files = {name.removeprefix("observation.images."): file for name, file in case["images"].items()}
    images = {name: np.array(Image.open(PI0_FAST / file).convert("RGB")) for name, file in files.items()}
    seen = Observation(images, case["task"], 1, state=np.array(case["state"]))
    return published(act(directory, [*images], seen))


@needs_gl
@has_model
@needs(ORACLES)
@pytest.mark.parametrize("name, rows", [("oft", 25), ("pi0_fast", 5)])
@pytest.mark.parametrize("command", ["joint_trajectory_chunk", "position_array"])
def test_an_answer_for_both_arms_moves_each_by_its_own_half(name, rows, command, request):
    answer: StampedAction = request.getfixturevalue(name)
    assert answer.values.shape == (rows, 14)
    ends = {}
    for column, side in enumerate(SIDES):
        mine = answer.of_arm(side, ALOHA.joints)
        assert mine.names == (*ALOHA.joints, "gripper")
        robot = DrivenRobot(ALOHA, command, Follow.GUARDED, image_size=32, joints=True)
        robot.reset("point_red", 0)
        robot.follow(replace(mine, stamp_s=robot.now_s))
        for moment in range(1, 51):
            robot.advance()
            if moment % 15 == 0:  # another answer, or the guard takes the policy for silent
                robot.follow(replace(mine, stamp_s=robot.now_s, values=mine.values[-1:]))
        goal = answer.values[-1, 7 * column : 7 * column + 7]
        assert not robot.refused, "the guard lets it through"
        ends[side] = robot.feel()[:6]
        np.testing.assert_allclose(ends[side], goal[:6], atol=2e-3)
        assert np.abs(ends[side] - HOME).max() > 0.02, "it moved"
        assert (robot.world.opening() > 0.06) == (side == "left_"), "its gripper follows its own value"
        robot.close()
    assert np.abs(ends["left_"] - ends["right_"]).max() > 0.02, "the arms go to different places"


@has_model
def test_its_parameter_file_is_right(tmp_path):
    model = tmp_path / "aloha.xml"
    model.write_text(ALOHA.kinematics())
    file = tmp_path / "aloha.yaml"
    file.write_text(CONFIG.read_text().replace("tool: ee_gripper_link", "tool: pinch"))
    done = CliRunner().invoke(app, ["robot", "check", str(file), "--urdf", str(model)])
    assert done.exit_code == 0, done.output
    assert not re.search("^wrong", done.output, re.MULTILINE)
    assert "8 of 8 corners" in done.output


@pytest.mark.parametrize("side", SIDES)
def test_its_parameter_file_gives_each_driver_its_own_half(side):
    driver = merge_parameters([CONFIG], {}, node="driver", namespace=side.rstrip("_"))
    assert driver["action_prefix"] == side and driver["action_space"] == "joints"
    assert driver["joints.names"] == list(ALOHA.joints)


def test_without_its_model_the_line_that_installs_it_is_told(monkeypatch, pytestconfig):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip install --no-deps gym-aloha=={GYM_ALOHA} "):
        ALOHA.model()
    assert f"gym-aloha=={GYM_ALOHA}" in (pytestconfig.rootpath / "requirements" / "robots.txt").read_text().split()


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
