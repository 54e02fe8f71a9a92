"""ROS parameters as frozen dataclasses: one field is one parameter with its default, description and limits."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.exceptions import ParameterException
from rclpy.node import Node

from specvla_ros.errors import UserError

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a decimal point",
    str: "a text",
    tuple: "a list of texts",
}


@dataclass(frozen=True)
class Limits:
    """What a parameter may be.

    Args:
        description: one sentence, with the unit.
        name: as ROS sees it; empty: the field's name.
        minimum: the smallest value of a number.
        maximum: the largest value of a number.
        choices: the only values of a text; empty: any.
        writable: whether it may change while the node runs.
    """

    description: str
    name: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    writable: bool = False


Parameters = TypeVar("Parameters")


def parameter(default: object, description: str, **limits: Any) -> Any:
    """A field of a parameter dataclass; `limits` are those of `Limits`.

    A list of texts has a tuple as its default, and never an empty one: ROS could not tell of what it is empty.
    """
    return field(default=default, metadata={"limits": Limits(description, **limits)})


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


def read_parameters(node: Node, kind: type[Parameters]) -> Parameters:
    """The values that the parameters have now."""
    names = {declared.name: ros_name(declared) for declared in fields(kind)}  # type: ignore[arg-type]
    values = {name: node.get_parameter(there).value for name, there in names.items()}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def unknown_parameters(node: Node) -> dict[str, str]:
    """Parameters that were given but that the node does not have, each with a hint. ROS ignores them silently."""
    known = [name for name in _overrides(node) if node.has_parameter(name)]
    known += [name for name in node.get_parameters_by_prefix("") if name not in known]
    strangers = [name for name in _overrides(node) if name not in known and not name.startswith("qos_overrides")]
    hints = {name: difflib.get_close_matches(name, known, n=1) for name in strangers}
    return {name: f"did you mean '{close[0]}'?" if close else "it is ignored" for name, close in hints.items()}


def ros_name(declared: "Field[Any]") -> str:
    """What ROS calls the parameter of a field."""
    return _limits(declared).name or declared.name


def problem(declared: "Field[Any]", value: object) -> str:
    """What is wrong with a value, and what would be right; empty when nothing is."""
    limits, kind = _limits(declared), type(declared.default)
    allowed = _KINDS[kind]
    if limits.minimum is not None and limits.maximum is not None:
        allowed += f" from {limits.minimum:g} to {limits.maximum:g}"
    if limits.choices:
        allowed = "one of: " + ", ".join(limits.choices)
    right = type(value) is kind and (not limits.choices or value in limits.choices)
    if isinstance(value, tuple):
        right = right and all(isinstance(each, str) for each in value)
    if right and isinstance(value, (int, float)) and limits.minimum is not None and limits.maximum is not None:
        right = math.isfinite(value) and limits.minimum <= value <= limits.maximum
    if right:
        return ""
    return f"parameter '{ros_name(declared)}' is {value!r}, but it must be {allowed} (default: {declared.default!r})"


def _descriptor(declared: "Field[Any]") -> ParameterDescriptor:
    limits = _limits(declared)
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


def _limits(declared: "Field[Any]") -> Limits:
    limits: Limits = declared.metadata["limits"]
    return limits


def _overrides(node: Node) -> Mapping[str, Any]:
    # Only the node itself knows what it was given before a parameter is declared.
    overrides: Mapping[str, Any] = getattr(node, "_parameter_overrides", {})
    return overrides
