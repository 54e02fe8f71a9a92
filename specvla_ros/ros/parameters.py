# SPDX-License-Identifier: Apache-2.0
"""ROS parameters from the tree of settings that declares them."""

from array import array
from collections.abc import Mapping
from typing import Any, TypeVar

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.exceptions import ParameterException
from rclpy.node import Node

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import Declared, hint, walk, with_values

Parameters = TypeVar("Parameters")


def declare_parameters(node: Node, kind: type[Parameters]) -> None:
    """Declares every parameter of `kind` at the node.

    Raises:
        UserError: a value of the wrong type, out of range or not among the choices.
    """
    for declared in walk(kind()):
        try:
            value = node.declare_parameter(declared.name, declared.value, _descriptor(declared)).value
        except ParameterException as error:
            given = _overrides(node).get(declared.name)
            raise UserError(declared.problem(given.value) if given else str(error)) from None
        problem = declared.problem(_hashable(value))
        if problem:
            raise UserError(problem)


def read_parameters(node: Node, kind: type[Parameters], changed: Mapping[str, Any] | None = None) -> Parameters:
    """The values that the parameters have now, or, by name in `changed`, are about to have.

    Raises:
        UserError: they do not fit together.
    """
    new, defaults = changed or {}, kind()
    names = [declared.name for declared in walk(defaults)]
    values = {name: new[name] if name in new else node.get_parameter(name).value for name in names}
    return with_values(defaults, {name: _hashable(value) for name, value in values.items()})


def unknown_parameters(node: Node) -> dict[str, str]:
    """Parameters that were given but that the node does not have, each with a hint. ROS ignores them silently."""
    declared = [*node.get_parameters_by_prefix(""), *filter(node.has_parameter, _overrides(node))]
    known = dict.fromkeys(declared)
    unknown = [name for name in _overrides(node) if name not in known and not name.startswith("qos_overrides")]
    hints = {name: hint(name, known) for name in unknown}
    return {name: text if text.startswith("did you mean") else "it is ignored" for name, text in hints.items()}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, array)) else value


def _descriptor(declared: Declared) -> ParameterDescriptor:
    parameter = declared.parameter
    descriptor = ParameterDescriptor(description=declared.description, read_only=not parameter.writable)
    if parameter.choices:
        descriptor.additional_constraints = "one of: " + ", ".join(parameter.allowed)
    if parameter.minimum is not None and parameter.maximum is not None:
        if declared.kind is float:
            descriptor.floating_point_range = [
                FloatingPointRange(from_value=float(parameter.minimum), to_value=float(parameter.maximum))
            ]
        else:
            descriptor.integer_range = [
                IntegerRange(from_value=int(parameter.minimum), to_value=int(parameter.maximum))
            ]
    return descriptor


def _overrides(node: Node) -> Mapping[str, Any]:
    # Only the node itself knows what it was given before a parameter is declared.
    overrides: Mapping[str, Any] = getattr(node, "_parameter_overrides", {})
    return overrides
