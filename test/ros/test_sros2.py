# SPDX-License-Identifier: Apache-2.0
"""The security policy allows what the nodes do, and nobody else what is the guard's or the operator's."""

from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import rclpy
from rclpy.node import Node
from rclpy.parameter import Parameter
from support.driving import arm
from support.guard_scene import PARAMETERS, TOPICS
from support.ros import robot

import specvla_ros.lab.simulation
from specvla_ros.ros.guard.node import GuardNode
from specvla_ros.ros.task import TaskNode
from specvla_ros.ros.wiring import COMMANDS

POLICY = Path(__file__).resolve().parents[2] / "config" / "sros2" / "specvla.policy.xml"
REMAPPED = ["-r", "action:=/policy/action"]
for _kind in COMMANDS:
    REMAPPED += ["-r", f"command/{_kind}:=/driver/{_kind}"]
# As the launch file connects driver and policy.
CONNECTED = {
    "/action": "/policy/action",
    "/guard_state": "/guard/state",
    "/image": "/camera/image_raw",
    "/image/compressed": "/camera/image_raw/compressed",
    "/state": "/joint_states",
}
TABLE = Path(specvla_ros.lab.simulation.__file__).parent / "assets" / "table.xml"


def allowed() -> dict[tuple[str, str], set[str]]:
    """Names by enclave and what may be done with them; an action is its topics and services."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for enclave in ElementTree.parse(POLICY).iter("enclave"):
        name = enclave.attrib["path"].removeprefix("/specvla/")
        for profile in enclave.iter("profile"):
            for rules in profile:
                names = {(each.text or "").replace("~", f"/{profile.attrib['node']}") for each in rules}
                for verb in rules.attrib:
                    found[name, verb] |= names
    for (name, verb), actions in [*found.items()]:
        if verb == "execute":
            for action in actions:
                found[name, "publish"] |= {f"{action}/_action/{topic}" for topic in ("feedback", "status")}
                services = ("send_goal", "cancel_goal", "get_result")
                found[name, "reply"] |= {f"{action}/_action/{service}" for service in services}
    return found


def assert_allowed(node: Node, enclave: str) -> None:
    may, me = allowed(), (node.get_name(), node.get_namespace())
    for verb, listed in (
        ("publish", node.get_publisher_names_and_types_by_node(*me)),
        ("subscribe", node.get_subscriber_names_and_types_by_node(*me)),
        ("reply", node.get_service_names_and_types_by_node(*me)),
    ):
        names = {CONNECTED.get(name, name) for name, _ in listed}
        assert names and names <= may[enclave, verb], f"{enclave} may not {verb} {names - may[enclave, verb]}"


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
        assert_allowed(node, "guard")
    finally:
        node.close()
        node.destroy_node()
        rclpy.try_shutdown()


@pytest.mark.parametrize("output", TOPICS)
def test_the_driver_may_do_what_it_does(output: str) -> None:
    joints = {
        "joints__model": str(TABLE),
        "joints__names": [f"joint{i}" for i in range(1, 8)],
        "joints__tool": "pinch",
        "joints__max_speed": [2.0],
        "joints__check_order": False,
    }
    with arm(output=output, gripper__output="array", gripper__open_value=0.08, **joints) as moved:
        assert moved.driver.trigger_configure().name == moved.driver.trigger_activate().name == "SUCCESS"
        assert_allowed(moved.driver, "driver")


def test_the_policy_may_do_what_it_does(checkpoint: Path) -> None:
    with robot(checkpoint, image_transport="compressed") as acting:
        assert acting.policy.trigger_configure().name == acting.policy.trigger_activate().name == "SUCCESS"
        assert_allowed(acting.policy, "policy")


def test_the_task_node_may_do_what_it_does_as_the_operator() -> None:
    rclpy.init()
    node = TaskNode(parameter_overrides=[Parameter("judge", value="topic")])
    try:
        assert_allowed(node, "operator")
    finally:
        node.close()
        node.destroy_node()
        rclpy.try_shutdown()


@pytest.mark.parametrize(
    "owner, prefix",
    [
        ("guard", ("/guard/pose", "/guard/twist", "/guard/joint", "/guard/gripper")),
        ("driver", ("/driver/pose", "/driver/twist", "/driver/joint", "/driver/gripper")),
        ("operator", ("/guard/enable", "/guard/stop", "/guard/speed_scale", "/guard/confirm", "/instruction")),
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


def test_all_that_the_guard_hears_somebody_may_say() -> None:
    may = allowed()
    said = set().union(*(names for (_, verb), names in may.items() if verb == "publish"))
    assert may["guard", "subscribe"] - said == {"/clock"}


def test_only_the_operator_may_clear_a_stop() -> None:
    may = allowed()
    assert [name for (name, verb), names in may.items() if verb == "request" and "/guard/clear_stop" in names] == [
        "operator"
    ]
