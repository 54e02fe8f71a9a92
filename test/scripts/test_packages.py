# SPDX-License-Identifier: Apache-2.0
"""One ROS package at the root, which colcon builds with or without its Python side; and what pip takes of it."""

import re
from pathlib import Path

import pytest

from specvla_ros.lab.bags.message_types import MessageTypes

ROOT = Path(__file__).resolve().parents[2]


def depends(kind: str) -> set[str]:
    """Dependencies of the kinds whose names match, such as buildtool."""
    return set(re.findall(rf"<(?:{kind})depend>([\w-]+)<", (ROOT / "package.xml").read_text()))


def test_the_root_is_one_package_that_cmake_builds() -> None:
    assert "<name>specvla_ros</name>" in (ROOT / "package.xml").read_text()
    assert "project(specvla_ros " in (ROOT / "CMakeLists.txt").read_text()
    # colcon does not look below it; a second one there would never be built.
    assert [*ROOT.glob("*/package.xml")] == []


def test_messages_and_actions_need_generators_and_the_messages_they_hold_alone() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    before, rest = text.split("if(SPECVLA_INTERFACES_ONLY)")
    needed = set(re.findall(r"find_package\((\w+)", before))
    assert needed == {"ament_cmake", "rosidl_default_generators", "std_msgs", "action_msgs"}
    assert needed <= depends("buildtool_|")
    generated = set(re.findall(r"^  ((?:msg|action)/\w+\.\w+)$", before, re.MULTILINE))
    assert generated == {f"{path.parent.name}/{path.name}" for path in (*ROOT.glob("msg/*"), *ROOT.glob("action/*"))}
    assert rest.lstrip().startswith("ament_package()\n  return()")


@pytest.mark.parametrize("name", ["VlaAction", "DecodeStats"])
def test_bags_are_written_with_the_messages_own_definitions(name: str) -> None:
    text = (ROOT / "msg" / f"{name}.msg").read_text()
    assert MessageTypes().definition(f"specvla_ros/msg/{name}").startswith(text.rstrip())


def test_every_script_is_installed() -> None:
    match = re.search(r"foreach\(script ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert match is not None
    assert {*match[1].split()} == {
        path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix
    }


def test_every_ros_package_that_is_imported_is_a_dependency() -> None:
    declared = depends("exec_|") | {"specvla_ros"}  # whose messages are its own
    files = [*(ROOT / "specvla_ros").rglob("ros/**/*.py"), *(ROOT / "launch").glob("*.py")]
    imported = {
        name for path in files for name in re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    }
    ros = {name for name in imported if name.endswith(("_msgs", "_srvs", "_interfaces"))}
    assert ros | ({"rclpy", "launch", "launch_ros", "ament_index_python"} & imported) <= declared
