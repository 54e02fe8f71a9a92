# SPDX-License-Identifier: Apache-2.0
"""The repository holds two ROS packages and one of pip's, each where its tool looks for it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_colcon_finds_both_packages() -> None:
    # It does not look below a folder that is a package itself.
    assert not [
        name for name in ("package.xml", "CMakeLists.txt", "setup.py", "COLCON_IGNORE") if (ROOT / name).exists()
    ]
    for name in ("specvla_msgs", "specvla_ros"):
        assert f"<name>{name}</name>" in (ROOT / name / "package.xml").read_text()
        assert f"project({name} " in (ROOT / name / "CMakeLists.txt").read_text()


def test_the_messages_need_no_more_than_generators_and_the_messages_they_hold() -> None:
    needed = set(re.findall(r"depend>([\w-]+)<", (ROOT / "specvla_msgs" / "package.xml").read_text()))
    tools = {"ament_cmake", "rosidl_default_generators", "rosidl_default_runtime"}
    assert needed == tools | {"std_msgs", "action_msgs"}


@pytest.mark.parametrize("name", ["VlaAction", "DecodeStats", "SimEpisode"])
def test_bags_are_written_with_the_messages_own_definitions(name: str) -> None:
    inside = ROOT / "specvla_ros" / "bags" / "definitions" / f"{name}.msg"
    assert inside.samefile(ROOT / "specvla_msgs" / "msg" / f"{name}.msg")


def test_every_script_is_installed() -> None:
    text = (ROOT / "specvla_ros" / "CMakeLists.txt").read_text()
    match = re.search(r"foreach\(script ([^)]*)\)", text)
    assert match is not None
    assert {*match[1].split()} == {path.name for path in (ROOT / "scripts").iterdir() if not path.suffix}


def test_every_ros_package_that_is_imported_is_a_dependency() -> None:
    declared = set(re.findall(r"depend>([\w-]+)<", (ROOT / "specvla_ros" / "package.xml").read_text()))
    files = [*(ROOT / "specvla_ros" / "ros").rglob("*.py"), *(ROOT / "launch").glob("*.py")]
    imported = {
        name for path in files for name in re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    }
    ros = {name for name in imported if name.endswith(("_msgs", "_srvs", "_interfaces"))}
    assert ros | ({"rclpy", "launch", "launch_ros", "ament_index_python"} & imported) <= declared
