# SPDX-License-Identifier: Apache-2.0
"""ROS parameters come from the settings that declare them, with their meaning, unit, range and choices."""

from collections.abc import Iterator

import pytest

rclpy = pytest.importorskip("rclpy")

from rclpy.context import Context  # noqa: E402
from rclpy.node import Node  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402

from specvla_ros.errors import UserError  # noqa: E402
from specvla_ros.ros.parameters import declare_parameters, read_parameters, unknown_parameters  # noqa: E402
from specvla_ros.ros.policy.parameters import PolicyParameters  # noqa: E402


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
    with pytest.raises(UserError, match="say the same thing"):
        read_parameters(made, PolicyParameters, {"acceptance.tolerance_m": 0.1})
    made.destroy_node()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(draft__nodes=65), "parameter 'draft.nodes' is 65, but it must be a whole number from 1 to 64"),
        (dict(acceptance__bins=[1, 300]), "a list of whole numbers from 0 to 254"),
        (dict(acceptance__rule="kind"), "one of: strict"),
        ({"action.dt": 1}, "a number with a decimal point from 0 to 10"),
    ],
)
def test_a_wrong_value_stops_the_node(context: Context, given: dict, message: str) -> None:
    made = node(context, **given)
    with pytest.raises(UserError, match=message):
        declare_parameters(made, PolicyParameters)
    made.destroy_node()


def test_a_parameter_that_is_none_gets_a_hint(context: Context) -> None:
    made = node(context, draft__node=8, elsewhere=1)
    declare_parameters(made, PolicyParameters)
    assert unknown_parameters(made) == {"draft.node": "did you mean 'draft.nodes'?", "elsewhere": "it is ignored"}
    made.destroy_node()
