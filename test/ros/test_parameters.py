# SPDX-License-Identifier: Apache-2.0
"""ROS parameters come from the settings that declare them, with their meaning, unit, range and choices."""

from collections.abc import Iterator
from typing import Any

import pytest

rclpy = pytest.importorskip("rclpy")

from rcl_interfaces.msg import Parameter as ParameterMessage  # noqa: E402
from rcl_interfaces.msg import ParameterType, ParameterValue, SetParametersResult  # noqa: E402
from rcl_interfaces.srv import SetParameters, SetParametersAtomically  # noqa: E402
from rclpy.client import Client  # noqa: E402
from rclpy.context import Context  # noqa: E402
from rclpy.executors import SingleThreadedExecutor  # noqa: E402
from rclpy.node import Node  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402
from support.patience import wait_until  # noqa: E402

from specvla_ros.errors import UserError  # noqa: E402
from specvla_ros.policy_parameters import PolicyParameters  # noqa: E402
from specvla_ros.ros.parameters import (  # noqa: E402
    check_values,
    declare_parameters,
    read_parameters,
    refuse_fixed,
    unknown_parameters,
)


@pytest.fixture
def context() -> Iterator[Context]:
    made = Context()
    rclpy.init(context=made)
    yield made
    rclpy.shutdown(context=made)


def node(context: Context, **values: object) -> Node:
    overrides = [Parameter(name.replace("__", "."), value=value) for name, value in values.items()]
    return Node("parameters", context=context, parameter_overrides=overrides)


def test_descriptors_say_what_the_declarations_say(context: Context) -> None:
    made = node(context)
    declare_parameters(made, PolicyParameters)
    tolerance = made.describe_parameter("acceptance.tolerance_m")
    assert tolerance.description.endswith("[m]") and not tolerance.read_only
    (metres,) = tolerance.floating_point_range
    assert (metres.from_value, metres.to_value) == (0.0, 1.0)
    (tokens,) = made.describe_parameter("decode.max_text_tokens").integer_range
    assert (tokens.from_value, tokens.to_value) == (1, 4096)
    assert made.describe_parameter("decode.max_text_tokens").read_only
    rule = made.describe_parameter("acceptance.rule").additional_constraints
    assert rule.startswith("one of: strict, bin_distance")
    made.destroy_node()


def test_a_lifecycle_node_reads_anew_what_others_read_once(context: Context) -> None:
    made = node(context)
    declare_parameters(made, PolicyParameters, lifecycle=True)
    assert not made.describe_parameter("checkpoint").read_only
    for active, before in ((True, "deactivate` and `"), (False, "configured: `")):
        with pytest.raises(UserError, match=f"'checkpoint' is read.*{before}ros2 lifecycle set /parameters cleanup`"):
            refuse_fixed(made, PolicyParameters, {"checkpoint": "/a"}, read_in_activate=(), active=active)
    fixed = {"image_transport": "raw"}
    with pytest.raises(UserError, match="is read when the node is activated: `ros2 lifecycle set /parameters deactiv"):
        refuse_fixed(made, PolicyParameters, fixed, read_in_activate=tuple(fixed), active=True)
    refuse_fixed(made, PolicyParameters, fixed, read_in_activate=tuple(fixed), active=False)
    unchanged = {"checkpoint": "", "draft.nodes": made.get_parameter("draft.nodes").value, "max_future_s": 3.0}
    refuse_fixed(made, PolicyParameters, unchanged, read_in_activate=(), active=True)
    made.destroy_node()


def test_each_value_is_checked_by_itself() -> None:
    check_values(PolicyParameters, {"acceptance.rule": "bin_distance", "elsewhere": 3})
    with pytest.raises(UserError, match=r"'acceptance.rule' is 'kind', but it must be one of: strict"):
        check_values(PolicyParameters, {"acceptance.rule": "kind"})


@pytest.mark.parametrize("kind", [99, 200, 255])
@pytest.mark.parametrize("service", [SetParameters, SetParametersAtomically])
def test_a_value_of_an_unknown_type_is_answered(context: Context, service: type, kind: int) -> None:
    made = node(context)
    declare_parameters(made, PolicyParameters)
    name = "set_parameters" if service is SetParameters else "set_parameters_atomically"
    client: Client[Any, Any] = made.create_client(service, f"parameters/{name}")
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(made)

    def answer_to(*values: ParameterValue) -> list[SetParametersResult]:
        sent = [ParameterMessage(name="max_future_s", value=value) for value in values]
        future = client.call_async(service.Request(parameters=sent))  # type: ignore[attr-defined]
        wait_until(future.done, meanwhile=lambda: executor.spin_once(timeout_sec=0.05))
        answer: Any = future.result()
        return list(answer.results) if service is SetParameters else [answer.result]

    good = ParameterValue(type=ParameterType.PARAMETER_DOUBLE, double_value=0.3)
    wait_until(client.service_is_ready)
    for result in answer_to(good, ParameterValue(type=kind)):
        assert not result.successful and f"'max_future_s' has type {kind}" in result.reason
    assert made.get_parameter("max_future_s").value == PolicyParameters().robot.max_future_s
    assert all(result.successful for result in answer_to(good))
    assert made.get_parameter("max_future_s").value == 0.3
    executor.shutdown()
    made.destroy_node()


def test_a_preset_is_what_other_parameters_begin_with(context: Context) -> None:
    made = node(context, decode__preset="fly-paper", acceptance__fly_window=4)
    declare_parameters(made, PolicyParameters, lifecycle=True)
    assert made.get_parameter("draft.nodes").value == 16
    read = read_parameters(made, PolicyParameters).engine
    assert read.preset_summary == "fly-paper, except acceptance.fly_window 4"
    read = read_parameters(made, PolicyParameters, {"acceptance.rule": "strict"}).engine
    assert read.acceptance.rule == "strict", "what is set later wins too"
    assert made.describe_parameter("decode.preset").read_only, "the others would not follow"
    made.destroy_node()


def test_what_is_given_is_read_into_the_tree(context: Context) -> None:
    made = node(
        context, draft__nodes=8, acceptance__bins=[1, 2], model__action_head=True, acceptance__fly_entropy="code"
    )
    declare_parameters(made, PolicyParameters)
    read = read_parameters(made, PolicyParameters, {"decode.mode": "spec", "max_image_age_s": 3.0})
    assert (read.engine.mode, read.engine.draft.nodes, read.engine.max_image_age_s) == ("spec", 8, 3.0)
    assert read.engine.acceptance.bins == (1, 2) and read.engine.acceptance.rules["fly"].entropy == "code"
    assert read.model.action_head
    assert read_parameters(made, PolicyParameters).engine.max_image_age_s == 1.0
    with pytest.raises(UserError, match="are exclusive"):
        read_parameters(made, PolicyParameters, {"acceptance.tolerance_m": 0.1})
    made.destroy_node()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(draft__nodes=65), "parameter 'draft.nodes' is 65, but it must be a whole number from 1 to 64"),
        (dict(acceptance__bins=[1, 300]), "a list of whole numbers from 0 to 254"),
        (dict(acceptance__rule="kind"), "one of: strict"),
        ({"action.dt": 1}, r"'action.dt' is 1, but it must be a float from 0 to 10 \(default: .*; write 1\.0$"),
        ({"action.dt": 99}, r"from 0 to 10 \(default: [0-9.]+\)$"),
    ],
)
def test_a_wrong_value_stops_the_node(context: Context, given: dict, message: str) -> None:
    made = node(context, **given)
    with pytest.raises(UserError, match=message):
        declare_parameters(made, PolicyParameters)
    made.destroy_node()


def test_all_wrong_values_are_named_at_once(context: Context) -> None:
    made = node(context, decode__mode="fast", draft__nodes=65, device=5)
    with pytest.raises(UserError) as refused:
        declare_parameters(made, PolicyParameters)
    for words in ("'decode.mode' is 'fast', but it must be one of", "'draft.nodes' is 65, but", "'device' is 5, but"):
        assert words in str(refused.value)
    made.destroy_node()


def test_a_parameter_that_is_none_gets_a_hint(context: Context) -> None:
    made = node(context, draft__node=8, elsewhere=1, **{"qos_overrides./imag.depth": 1, "later": 2})
    declare_parameters(made, PolicyParameters)
    assert unknown_parameters(made, ["later", "qos_overrides./image.depth"]) == {
        "draft.node": "did you mean 'draft.nodes'?",
        "elsewhere": "it is ignored",
        "qos_overrides./imag.depth": "did you mean 'qos_overrides./image.depth'?",
    }
    made.destroy_node()
