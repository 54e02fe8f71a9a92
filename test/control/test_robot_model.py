# SPDX-License-Identifier: Apache-2.0
"""Robot descriptions as people have them: their meshes are elsewhere, and only the kinematics are read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.descriptions import ARMS, Z1, Joint, X, Y, Z, moved, write_urdf

from specvla_ros.control.inverse_kinematics import JointSolver
from specvla_ros.control.limits import JointLimits, Joints
from specvla_ros.control.robot_model import completed, load_joint_model, load_robot_model
from specvla_ros.errors import UserError


def rotation(axis: Sequence[float], angle: float) -> np.ndarray:
    x, y, z = axis
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def tool_by_hand(joints: Sequence[Joint], positions: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """The product of the transforms from the root to tool0."""
    chain: list[Joint] = []
    link = "tool0"
    while found := next((each for each in joints if each.child == link), None):
        chain.insert(0, found)
        link = found.parent
    position, turn = np.zeros(3), np.eye(3)
    for each in chain:
        roll, pitch, yaw = each.rpy
        position = position + turn @ np.array(each.xyz, dtype=float)
        turn = turn @ rotation(Z, yaw) @ rotation(Y, pitch) @ rotation(X, roll)
        if each.axis is not None:
            turn = turn @ rotation(each.axis, positions[each.name])
    return position, turn


@pytest.mark.parametrize("arm", ARMS)
def test_a_fixed_tool0_is_where_the_product_of_the_transforms_puts_it(tmp_path: Path, arm: str) -> None:
    joints = moved(ARMS[arm])
    names = tuple(each.name for each in joints)
    settings = Joints(names=names, model=str(write_urdf(tmp_path / "robot.urdf", ARMS[arm])), tool="tool0")
    model = load_joint_model(settings)
    assert model.max_speed.tolist() == [each.speed for each in joints]
    solver, draw = JointSolver(model, 0.01), np.random.default_rng(0)
    for _ in range(5):
        at = {each.name: draw.uniform(*(each.ends or (-2.0, 2.0))) for each in joints}
        position, turn = tool_by_hand(ARMS[arm], at)
        pose = solver.pose_of(at)
        np.testing.assert_allclose(pose.position, position, atol=1e-9)
        np.testing.assert_allclose(pose.rotation, turn, atol=1e-9)


@pytest.mark.parametrize("arm", ARMS)
def test_the_guard_takes_ranges_and_speeds_that_are_not_given_from_the_model(tmp_path: Path, arm: str) -> None:
    joints = moved(ARMS[arm])
    names, model = tuple(each.name for each in joints), str(write_urdf(tmp_path / "robot.urdf", ARMS[arm]))
    limits = completed(JointLimits(names=names, model=model, max_acceleration=(20.0,)))
    limits.require("output: position_array")
    for joint, low, high in zip(joints, limits.position_min, limits.position_max, strict=True):
        assert (low, high) == (joint.ends or (-1000.0, 1000.0))
    assert limits.max_speed == tuple(joint.speed for joint in joints)


@pytest.mark.parametrize(
    ("limit", "speeds"),
    [
        ("", {}),
        ('<limit effort="9"/>', {}),
        ('<limit velocity="fast"/>', {}),
        ('<limit velocity="inf"/>', {}),
        ('<limit velocity="0"/>', {}),
        ('<limit velocity="-1"/>', {}),
        ('<limit velocity="0.5"/>', {"turns": 0.5}),
    ],
)
def test_a_joint_of_a_model_has_the_speed_that_its_limit_says_or_none(
    tmp_path: Path, limit: str, speeds: dict[str, float]
) -> None:
    joints = [
        Joint("mount", "world", "base"),
        Joint("turns", "base", "tool0", axis=Z, kind="continuous", more=limit),
    ]
    assert load_robot_model(write_urdf(tmp_path / "robot.urdf", joints)).max_speed == speeds


def test_a_number_that_is_given_wins_for_driver_and_guard(tmp_path: Path) -> None:
    names = tuple(each.name for each in moved(Z1))
    given = JointLimits(
        names=names,
        model=str(write_urdf(tmp_path / "z1.urdf", Z1)),
        tool="tool0",
        position_min=(0.1, 0.2, -2.0, -1.0, -1.0, -1.0),
        position_max=(0.5, 0.6, -1.0, 1.0, 1.0, 1.0),
        max_speed=(0.4,),
        max_acceleration=(4.0,),
    )
    assert completed(given) is given
    assert completed(replace(given, max_speed=(0.0,))).position_min == given.position_min
    model = load_joint_model(given)
    assert model.max_speed.tolist() == [0.4] * 6
    np.testing.assert_allclose(JointSolver(model, 0.01).ranges, np.array([given.position_min, given.position_max]).T)
    with pytest.raises(UserError, match=r"joints\.position_min: 6 numbers"):
        load_joint_model(replace(given, position_min=(0.1, 0.2)))


def test_joints_may_be_called_otherwise_in_the_model(tmp_path: Path) -> None:
    settings = JointLimits(
        names=tuple(f"left_{each.name}" for each in moved(Z1)),
        model_names=tuple(each.name for each in moved(Z1)),
        model=str(write_urdf(tmp_path / "z1.urdf", Z1)),
        tool="tool0",
        max_acceleration=(20.0,),
    )
    completed(settings).require("output: position_array")
    solver = JointSolver(load_joint_model(settings), 0.01)
    at = dict(zip(settings.names, (0.1, 0.5, -0.5, 0.2, 0.3, 0.4), strict=True))
    solver.start(at)
    np.testing.assert_allclose(solver.positions, [*at.values()])
    position, _ = tool_by_hand(Z1, {name.removeprefix("left_"): value for name, value in at.items()})
    np.testing.assert_allclose(solver.pose_of(at).position, position, atol=1e-9)
    with pytest.raises(UserError, match="joint_states has no 'left_joint1'"):
        solver.start(dict.fromkeys(settings.model_names, 0.0))
    with pytest.raises(UserError, match=r"joints\.model_names has 2 names for the 6 of joints\.names"):
        replace(settings, model_names=("joint1", "joint2"))
    with pytest.raises(UserError, match=r"has no joint 'left_joint1'; it has: joint1, .*joints\.model_names"):
        load_joint_model(replace(settings, model_names=("",)))


def test_a_limit_that_neither_file_has_is_asked_for_with_both_ways(tmp_path: Path) -> None:
    joints = [replace(each, low=None, high=None, speed=0.0) if each.name == "joint2" else each for each in Z1]
    path = write_urdf(tmp_path / "z1.urdf", joints)
    settings = JointLimits(
        names=tuple(each.name for each in moved(Z1)), model=str(path), tool="tool0", max_acceleration=(9.0,)
    )
    with pytest.raises(UserError, match=r"'joint2' of .* has no range; give joints\.position_min and"):
        completed(settings)
    given = replace(settings, position_min=(-3.0,) * 6, position_max=(3.0,) * 6)
    with pytest.raises(UserError, match=r"needs joints\.max_speed.*<limit velocity>"):
        completed(given).require("output: position_array")
    with pytest.raises(UserError, match=r"joints\.max_speed must be set.*<limit velocity>"):
        load_joint_model(given)
    with pytest.raises(UserError, match=r"joints\.position_min: 6 numbers.*set joints\.model"):
        completed(replace(settings, model="")).require("output: position_array")


def test_what_is_not_a_robot_is_refused_in_words(tmp_path: Path) -> None:
    second = '<link name="table"/><link name="camera"/>'
    with pytest.raises(UserError, match=r"has 3 roots \(world, table, camera\).*join them with fixed joints"):
        load_robot_model(write_urdf(tmp_path / "roots.urdf", Z1, second))
    loop = [replace(Z1[0], parent="tool0"), *Z1[1:]]
    with pytest.raises(UserError, match="its joints form a loop"):
        load_robot_model(write_urdf(tmp_path / "loop.urdf", loop))
    macro = tmp_path / "arm.urdf.xacro"
    macro.write_text('<robot xmlns:xacro="http://www.ros.org/wiki/xacro"><xacro:include filename="x"/></robot>')
    with pytest.raises(UserError, match=r"is xacro: run `xacro .*arm\.urdf\.xacro > arm\.urdf`"):
        load_robot_model(macro)
    unbound = tmp_path / "arm.urdf"
    unbound.write_text("<robot><xacro:arm/></robot>")
    with pytest.raises(UserError, match=r"arm\.urdf > arm_plain\.urdf`"):
        load_robot_model(unbound)
    for text, words in (
        ("<robot", "cannot be read by MuJoCo"),
        ("<mujoco><worldbody><b/></worldbody></mujoco>", "'b'"),
    ):
        unbound.write_text(text)
        with pytest.raises(UserError, match=words):
            load_robot_model(unbound)
    with pytest.raises(UserError, match=r"nowhere\.xml"):
        load_robot_model(tmp_path / "nowhere.xml")


def test_what_xacro_wrote_is_no_xacro(tmp_path: Path) -> None:
    path = write_urdf(tmp_path / "z1.urdf", Z1, "<!-- made by xacro from z1.xacro: <xacro:arm/> -->")
    text = path.read_text(encoding="utf-8").replace("<robot ", '<robot xmlns:xacro="http://wiki.ros.org/xacro" ')
    path.write_text(text, encoding="utf-8")
    assert load_robot_model(path).model.njnt == 6
