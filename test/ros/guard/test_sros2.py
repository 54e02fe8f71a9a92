# SPDX-License-Identifier: Apache-2.0
"""The security policy allows what the guard does, and nobody else what is the guard's or the operator's."""

from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import rclpy
from rclpy.parameter import Parameter
from support.guard_scene import PARAMETERS, TOPICS

from specvla_ros.ros.guard.node import GuardNode
from specvla_ros.ros.wiring import COMMANDS

POLICY = Path(__file__).resolve().parents[3] / "config" / "sros2" / "specvla.policy.xml"
REMAPPED = ["-r", "action:=/policy/action"]
for _kind in COMMANDS:
    REMAPPED += ["-r", f"command/{_kind}:=/driver/{_kind}"]


def allowed() -> dict[tuple[str, str], set[str]]:
    """Names by enclave and what may be done with them."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for enclave in ElementTree.parse(POLICY).iter("enclave"):
        name = enclave.attrib["path"].removeprefix("/specvla/")
        for rules in enclave.iterfind("profiles/profile/*"):
            for verb in rules.attrib:
                for each in rules:
                    found[name, verb].add((each.text or "").replace("~", f"/{name}"))
    return found


@pytest.mark.parametrize("gripper", ["array", "trajectory"])
@pytest.mark.parametrize("output", TOPICS)
def test_the_guard_may_do_what_it_does(output: str, gripper: str) -> None:
    chosen = {**PARAMETERS, "output": output, "gripper.output": gripper, "gripper.joint": "finger"}
    overrides = [
        Parameter(name, value=list(each) if isinstance(each, tuple) else each) for name, each in chosen.items()
    ]
    rclpy.init()
    node = GuardNode(parameter_overrides=overrides, cli_args=["--ros-args", *REMAPPED, "-p", "use_sim_time:=true"])
    try:
        may, me = allowed(), (node.get_name(), node.get_namespace())
        assert {name for name, _ in node.get_publisher_names_and_types_by_node(*me)} <= may["guard", "publish"]
        assert {name for name, _ in node.get_subscriber_names_and_types_by_node(*me)} <= may["guard", "subscribe"]
        assert {name for name, _ in node.get_service_names_and_types_by_node(*me)} <= may["guard", "reply"]
    finally:
        node.close()
        node.destroy_node()
        rclpy.try_shutdown()


@pytest.mark.parametrize(
    "owner, prefix",
    [
        ("guard", ("/guard/pose", "/guard/twist", "/guard/joint", "/guard/gripper")),
        ("driver", ("/driver/pose", "/driver/twist", "/driver/joint", "/driver/gripper")),
        ("operator", ("/guard/enable", "/guard/stop", "/guard/confirm", "/instruction")),
        ("policy", ("/policy/action",)),
        ("robot", ("/tool_pose", "/joint_states")),
    ],
)
def test_each_topic_of_motion_has_one_who_may_publish_it(owner: str, prefix: tuple[str, ...]) -> None:
    may = allowed()
    publishers = {
        name for (name, verb), names in may.items() if verb == "publish" for each in names if each.startswith(prefix)
    }
    assert publishers == {owner}


def test_only_the_operator_may_clear_a_stop() -> None:
    may = allowed()
    assert [name for (name, verb), names in may.items() if verb == "request" and "/guard/clear_stop" in names] == [
        "operator"
    ]
