# SPDX-License-Identifier: Apache-2.0
"""ROS parameters of a node, declared from a tree of settings."""

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rcl_interfaces.srv import SetParameters, SetParametersAtomically
from rclpy.exceptions import ParameterException
from rclpy.node import Node
from rclpy.parameter import Parameter

from specvla_ros.errors import UserError, together
from specvla_ros.settings.parameter import Declared, hint, preset_values, values_of, walk, with_values

Parameters = TypeVar("Parameters")


@contextmanager
def parameters_declared(
    node: Node,
    kind: type[Parameters],
    *,
    lifecycle: bool = False,
    usual: Parameters | None = None,
    declared_later: Collection[str] = (),
) -> Iterator[None]:
    """Declares every parameter of `kind`, runs the block that makes the node, then warns of unknown parameters.

    A UserError from a parameter or from the block destroys the node. See the functions below for the arguments.
    """
    try:
        declare_parameters(node, kind, lifecycle=lifecycle, usual=usual)
        yield
    except UserError:
        node.destroy_node()
        raise
    for name, note in unknown_parameters(node, declared_later).items():
        node.get_logger().warning(f"there is no parameter '{name}'; {note}")


def declare_parameters(
    node: Node, kind: type[Parameters], *, lifecycle: bool = False, usual: Parameters | None = None
) -> None:
    """Declares every parameter of `kind` at the node.

    Args:
        lifecycle: True if parameters that are not writable are read at each configure. They are then not read-only to
            ROS; the node refuses changes in between with `refuse_fixed`.
        usual: values of parameters that are not given; None: the class's defaults.

    Raises one UserError for all values of the wrong type, out of range or not among the choices.
    """
    defaults = kind() if usual is None else usual
    overrides = {name: override.value for name, override in _overrides(node).items()}
    values = values_of(defaults) | preset_values(defaults, overrides)
    together(*(partial(_declare, node, each, values[each.name], lifecycle) for each in walk(defaults)))
    _answer_unknown_types(node)


def _declare(node: Node, declared: Declared, default: Any, lifecycle: bool) -> None:
    try:
        value = node.declare_parameter(declared.name, default, _descriptor(declared, lifecycle)).value
    except ParameterException as error:
        given = _overrides(node).get(declared.name)
        raise UserError(declared.problem(_hashable(given.value)) if given else str(error)) from None
    if problem := declared.problem(_hashable(value)):
        raise UserError(problem)


def check_values(kind: type[Parameters], changed: Mapping[str, Any]) -> None:
    """Raises UserError for a new value that is not allowed by itself. ROS checks types and ranges, but not choices."""
    for declared in walk(kind()):
        problem = declared.problem(_hashable(changed[declared.name])) if declared.name in changed else ""
        if problem:
            raise UserError(problem)


def refuse_fixed(
    node: Node, kind: type[Parameters], changed: Mapping[str, Any], *, read_in_activate: Collection[str], active: bool
) -> None:
    """Refuses changes of parameters that a configured lifecycle node has already read.

    Args:
        node: holds the present values; setting the same value again is allowed.
        changed: new values by name.
        read_in_activate: parameters that are not read before the node is activated.

    Raises UserError with the transitions after which the parameter can change.
    """
    for declared in walk(kind()):
        name = declared.name
        if declared.parameter.writable or name not in changed or (name in read_in_activate and not active):
            continue
        if _hashable(changed[name]) == _hashable(node.get_parameter(name).value):
            continue
        command = f"`ros2 lifecycle set {node.get_fully_qualified_name()}"
        if name in read_in_activate:
            raise UserError(f"'{name}' is read when the node is activated: {command} deactivate` first, then set it")
        before = f"{command} deactivate` and " if active else ""
        raise UserError(f"'{name}' is read when the node is configured: {before}{command} cleanup` first, then set it")


def read_parameters(node: Node, kind: type[Parameters], changed: Mapping[str, Any] | None = None) -> Parameters:
    """The parameters' values, with those of `changed` in place; raises UserError if they do not fit together."""
    new, defaults = changed or {}, kind()
    names = [declared.name for declared in walk(defaults)]
    values = {name: new[name] if name in new else node.get_parameter(name).value for name in names}
    return with_values(defaults, {name: _hashable(value) for name, value in values.items()})


def unknown_parameters(node: Node, declared_later: Collection[str] = ()) -> dict[str, str]:
    """Parameters that were given but that the node does not have, each with a hint. ROS ignores them silently.

    `declared_later`: parameters that the node declares later, such as those of its subscriptions.
    """
    declared = [*node.get_parameters_by_prefix(""), *filter(node.has_parameter, _overrides(node)), *declared_later]
    known = dict.fromkeys(declared)
    unknown = [name for name in _overrides(node) if name not in known]
    hints = {name: hint(name, known) for name in unknown}
    return {name: text if text.startswith("did you mean") else "it is ignored" for name, text in hints.items()}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, array)) else value


def is_given(node: Node, name: str) -> bool:
    """True if a parameter was set on the command line, in a file or by a launch file."""
    return name in _overrides(node)


def _answer_unknown_types(node: Node) -> None:
    """Refuses values of a type that ROS does not know. rclpy raises for them, and the client waits forever."""
    for service in node.services:
        if service.srv_type in (SetParameters, SetParametersAtomically):
            service.callback = partial(_refuse_unknown_types, service.callback)


def _refuse_unknown_types(set_parameters: Callable[[Any, Any], Any], request: Any, response: Any) -> Any:
    known = {kind.value for kind in Parameter.Type}
    wrong = [f"'{each.name}' has type {each.value.type}" for each in request.parameters if each.value.type not in known]
    if not wrong:
        return set_parameters(request, response)
    refused = SetParametersResult(
        successful=False, reason=f"nothing was set: {', '.join(wrong)}, which rcl_interfaces/ParameterType lacks"
    )
    if hasattr(response, "results"):
        response.results = [refused for _ in request.parameters]
    else:
        response.result = refused
    return response


def _descriptor(declared: Declared, lifecycle: bool) -> ParameterDescriptor:
    parameter = declared.parameter
    # A preset has set the defaults of other parameters when they were declared, and can no longer change.
    read_only = not parameter.writable and (not lifecycle or bool(parameter.presets))
    descriptor = ParameterDescriptor(description=declared.description, read_only=read_only)
    if parameter.choices:
        descriptor.additional_constraints = "one of: " + ", ".join(parameter.allowed)
    low, high = parameter.minimum, parameter.maximum
    if low is not None and high is not None:
        if declared.kind is float:
            descriptor.floating_point_range = [FloatingPointRange(from_value=float(low), to_value=float(high))]
        else:
            descriptor.integer_range = [IntegerRange(from_value=int(low), to_value=int(high))]
    return descriptor


def _overrides(node: Node) -> Mapping[str, Any]:
    # Only this attribute has the given values before a parameter is declared.
    overrides: Mapping[str, Any] = getattr(node, "_parameter_overrides", {})
    return overrides
