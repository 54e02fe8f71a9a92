"""Parameters as fields of frozen dataclasses: default, description and limits. Needs no ROS."""

import math
from dataclasses import Field, dataclass, field
from typing import Any

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a decimal point",
    str: "a text",
}
_LISTS = {str: "a list of texts", int: "a list of whole numbers"}


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


def parameter(default: object, description: str, **limits: Any) -> Any:
    """A field of a parameter dataclass; `limits` are those of `Limits`.

    A list has a tuple as its default, and never an empty one: ROS could not tell of what it is empty.
    """
    return field(default=default, metadata={"limits": Limits(description, **limits)})


def ros_name(declared: "Field[Any]") -> str:
    """What ROS calls the parameter of a field."""
    return limits_of(declared).name or declared.name


def problem(declared: "Field[Any]", value: object) -> str:
    """What is wrong with a value, and what would be right; empty when nothing is."""
    default: Any = declared.default
    limits, kind = limits_of(declared), type(default)
    element = type(default[0]) if kind is tuple else kind
    allowed = _LISTS[element] if kind is tuple else _KINDS[kind]
    if limits.minimum is not None and limits.maximum is not None:
        allowed += f" from {limits.minimum:g} to {limits.maximum:g}"
    if limits.choices:
        allowed = "one of: " + ", ".join(limits.choices)
    values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    right = type(value) is kind and all(_is_right(each, element, limits) for each in values)
    if right:
        return ""
    return f"parameter '{ros_name(declared)}' is {value!r}, but it must be {allowed} (default: {default!r})"


def _is_right(value: Any, kind: type[Any], limits: Limits) -> bool:
    if type(value) is not kind or (limits.choices and value not in limits.choices):
        return False
    if limits.minimum is None or limits.maximum is None or kind is str:
        return True
    return math.isfinite(value) and bool(limits.minimum <= value <= limits.maximum)


def limits_of(declared: "Field[Any]") -> Limits:
    """The limits of a field."""
    limits: Limits = declared.metadata["limits"]
    return limits
