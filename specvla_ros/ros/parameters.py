"""ROS parameters as frozen dataclasses: one field is one parameter with its default, description and limits."""

import difflib
from array import array
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.exceptions import ParameterException
from rclpy.node import Node

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import limits_of, problem, ros_name

Parameters = TypeVar("Parameters")


def declare_parameters(node: Node, kind: type[Parameters]) -> Parameters:
    """Declares every field of `kind` at the node and reads them.

    Raises:
        UserError: a value of the wrong type, out of range or not among the choices.
    """
    for declared in fields(kind):  # type: ignore[arg-type]
        try:
            node.declare_parameter(ros_name(declared), declared.default, _descriptor(declared))
        except ParameterException as error:
            given = _overrides(node).get(ros_name(declared))
            raise UserError(problem(declared, given.value) if given else str(error)) from None
    values = read_parameters(node, kind)
    for declared in fields(kind):  # type: ignore[arg-type]
        reason = problem(declared, getattr(values, declared.name))
        if reason:
            raise UserError(reason)
    return values


def read_parameters(node: Node, kind: type[Parameters], changed: Mapping[str, Any] | None = None) -> Parameters:
    """The values that the parameters have now, or, by ROS name in `changed`, are about to have."""
    names = {declared.name: ros_name(declared) for declared in fields(kind)}  # type: ignore[arg-type]
    new = changed or {}
    values = {name: new[there] if there in new else node.get_parameter(there).value for name, there in names.items()}
    return kind(**{name: tuple(value) if isinstance(value, (list, array)) else value for name, value in values.items()})


def unknown_parameters(node: Node) -> dict[str, str]:
    """Parameters that were given but that the node does not have, each with a hint. ROS ignores them silently."""
    known = [name for name in _overrides(node) if node.has_parameter(name)]
    known += [name for name in node.get_parameters_by_prefix("") if name not in known]
    strangers = [name for name in _overrides(node) if name not in known and not name.startswith("qos_overrides")]
    hints = {name: difflib.get_close_matches(name, known, n=1) for name in strangers}
    return {name: f"did you mean '{close[0]}'?" if close else "it is ignored" for name, close in hints.items()}


def _descriptor(declared: "Field[Any]") -> ParameterDescriptor:
    limits = limits_of(declared)
    descriptor = ParameterDescriptor(description=limits.description, read_only=not limits.writable)
    if limits.choices:
        descriptor.additional_constraints = "one of: " + ", ".join(limits.choices)
    if limits.minimum is not None and limits.maximum is not None:
        if isinstance(declared.default, float):
            descriptor.floating_point_range = [
                FloatingPointRange(from_value=float(limits.minimum), to_value=float(limits.maximum))
            ]
        else:
            descriptor.integer_range = [IntegerRange(from_value=int(limits.minimum), to_value=int(limits.maximum))]
    return descriptor


def _overrides(node: Node) -> Mapping[str, Any]:
    # Only the node itself knows what it was given before a parameter is declared.
    overrides: Mapping[str, Any] = getattr(node, "_parameter_overrides", {})
    return overrides
