# SPDX-License-Identifier: Apache-2.0
"""Parameters, declared once: on the fields of frozen dataclasses. Needs no ROS and no torch.

A class of settings has parameters (`parameter`), other classes of settings (`section`) and groups of them by name
(`groups`). ROS parameters, YAML profiles, `-p name:=value`, Python keywords and the reference page come from a walk
over it (`walk`), and its `__post_init__` calls `check`, the only check of ranges and choices.

A parameter's full name is the class's `ROS_PREFIX` and the field's name; a `name=` replaces both. In a group it is the
prefix of the class that has the groups, the group and the field; there a `name=` replaces the last two.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, TypeVar

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import shown

Settings = TypeVar("Settings")
Choices = tuple[str, ...] | Callable[[], tuple[str, ...]]

_PARAMETER, _SECTION, _GROUPS = "parameter", "section", "groups"
_KINDS = {bool: "true or false", int: "a whole number", float: "a number with a decimal point", str: "a text"}
_LISTS = {str: "a list of texts", int: "a list of whole numbers", float: "a list of numbers with a decimal point"}
_ABSTRACT: dict[type, type] = {int: Integral, float: Real}  # NumPy's numbers too


@dataclass(frozen=True)
class Parameter:
    """What a parameter means and may be."""

    description: str  # one sentence
    unit: str = ""  # of its numbers, such as m or tokens
    minimum: float | None = None  # of a number; None: no limit
    maximum: float | None = None  # of a number; None: no limit
    choices: Choices = ()  # the only values of a string; empty: any. A function, where a registry knows them
    writable: bool = False  # whether it may change while a node runs
    name: str = ""  # see the module
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by choice, values of other parameters
    basic: bool = False  # a robot sets it, so that help and reference show it first

    @property
    def text(self) -> str:
        return f"{self.description} [{self.unit}]" if self.unit else self.description

    @property
    def range(self) -> str:
        """The allowed numbers in words; empty: all."""
        if self.minimum is None:
            return "" if self.maximum is None else f"at most {self.maximum:.10g}"
        return f"{self.minimum:.10g} or more" if self.maximum is None else f"{self.minimum:.10g} to {self.maximum:.10g}"

    @property
    def allowed(self) -> tuple[str, ...]:
        """The allowed strings; empty: all."""
        return self.choices() if callable(self.choices) else self.choices


@dataclass(frozen=True)
class Declared:
    """A parameter of a tree of settings."""

    name: str  # full name, such as draft.nodes
    path: tuple[str, ...]  # attributes, and names of groups, from the tree's root to the value
    parameter: Parameter
    default: Any  # the field's own default, whose type is the parameter's
    value: Any  # in this tree; of a tree of defaults it is the default that counts

    @property
    def description(self) -> str:
        """With the unit."""
        return self.parameter.text

    @property
    def kind(self) -> type:
        """Of the value, or of a list's elements."""
        return type(self.default[0]) if self.is_list else type(self.default)

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)

    def problem(self, value: object) -> str:
        """What is wrong with a user's value, and what would be right; empty: nothing."""
        if self._wrong(value, exact=True) is None:
            return ""
        return f"parameter '{self.name}' is {shown(value)}, but it must be {self._words} (default: {self.value!r})"

    def check(self) -> None:
        """UserError if the value is out of range."""
        wrong = self._wrong(self.value, exact=False)
        if wrong is None:
            return
        if self.parameter.choices:
            raise UserError(f"{self.name} is {shown(wrong[0])}, but it must be {self._words}")
        raise UserError(f"{self.name} must be {self.parameter.range or self._words}, got {wrong[0]!r}")

    @property
    def _words(self) -> str:
        if self.parameter.choices:
            return "one of: " + ", ".join(self.parameter.allowed)
        kind = (_LISTS if self.is_list else _KINDS)[self.kind]
        numbers = self.parameter.range
        return f"{kind} from {numbers}" if " to " in numbers else f"{kind}, {numbers}" if numbers else kind

    def _wrong(self, value: object, *, exact: bool) -> tuple[object] | None:
        """The wrong element of the value, or all of it; `exact`: an int is no float, as in ROS."""
        if isinstance(value, tuple) is not self.is_list:
            return (value,)
        elements = value if isinstance(value, tuple) else (value,)
        return next(((each,) for each in elements if not self._fits(each, exact=exact)), None)

    def _fits(self, value: Any, *, exact: bool) -> bool:
        if exact or self.kind is bool:
            right = type(value) is self.kind
        else:
            right = isinstance(value, _ABSTRACT.get(self.kind, self.kind)) and not isinstance(value, bool)
        if not right or (self.parameter.choices and value not in self.parameter.allowed):
            return False
        if self.kind in (bool, str):
            return True
        low, high = self.parameter.minimum, self.parameter.maximum
        return math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)


class Groups(dict[str, Any]):
    """Settings by the name of their group; immutable and hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Groups, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("settings do not change; make others with `with_values`")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def parameter(
    default: object,
    description: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Choices = (),
    writable: bool = False,
    name: str = "",
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    basic: bool = False,
) -> Any:
    """A field that is a parameter; see `Parameter`.

    A list has a tuple as its default, never an empty one: ROS could not tell its type.
    """
    declared = Parameter(description, unit, minimum, maximum, choices, writable, name, presets or {}, basic)
    return field(default=default, metadata={_PARAMETER: declared})


def parameter_of(declared: "Field[Any]") -> Parameter | None:
    """The declaration on a field, if it is a parameter."""
    found: Parameter | None = declared.metadata.get(_PARAMETER)
    return found


def section(kind: type, **defaults: Any) -> Any:
    """A field that holds settings of their own, with these defaults in place of their class's."""
    return field(default_factory=lambda: kind(**defaults), metadata={_SECTION: kind})


def groups(kinds: Callable[[], Mapping[str, type]]) -> Any:
    """A field that holds settings by name, such as those of every acceptance rule.

    `kinds` gives their classes by name; it is a function, as a registry may grow until it is called.
    """
    return field(
        default_factory=lambda: Groups({name: kind() for name, kind in kinds().items()}), metadata={_GROUPS: kinds}
    )


def walk(settings: object) -> Iterator[Declared]:
    """Every parameter of a tree of settings, in the order of declaration; of a tree of defaults: `walk(Kind())`."""
    yield from _walk(settings, (), "", getattr(settings, "ROS_PREFIX", ""))


def _walk(settings: Any, path: tuple[str, ...], outer: str, inner: str) -> Iterator[Declared]:
    for each in fields(settings):
        value, here = getattr(settings, each.name), (*path, each.name)
        if _PARAMETER in each.metadata:
            declared: Parameter = each.metadata[_PARAMETER]
            name = outer + (declared.name or inner + each.name)
            yield Declared(name, here, declared, each.default, value)
        elif _SECTION in each.metadata:
            yield from _walk(value, here, "", getattr(value, "ROS_PREFIX", ""))
        elif _GROUPS in each.metadata:
            for name, group in value.items():
                yield from _walk(group, (*here, name), inner, f"{name}.")


def check(settings: object) -> None:
    """Checks every parameter of a tree of settings; for `__post_init__`."""
    for declared in walk(settings):
        declared.check()


def values_of(settings: object) -> dict[str, Any]:
    """Values by full name."""
    return {declared.name: declared.value for declared in walk(settings)}


def preset_values(settings: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that presets among those given by full name imply for other parameters of the tree."""
    made: dict[str, Any] = {}
    for declared in walk(settings):
        choice = given.get(declared.name)
        if declared.parameter.presets and isinstance(choice, str):
            made |= declared.parameter.presets.get(choice, {})
    return made


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The same settings with other values, all at once.

    Args:
        values: by full name; a number stands for a list of one, a whole number for one with a decimal point. They
            override a preset's.

    Raises UserError: an unknown name, a value that is not allowed, or values that do not fit together.
    """
    known = {declared.name: declared for declared in walk(settings)}
    changes: dict[tuple[str, ...], Any] = {}
    for name, value in {**preset_values(settings, values), **values}.items():
        if name not in known:
            raise UserError(f"there is no parameter '{name}'; {hint(name, known)}")
        declared = known[name]
        value = _converted(value, declared, is_list=declared.is_list)
        problem = declared.problem(value)
        if problem:
            raise UserError(problem)
        changes[declared.path] = value
    return replaced(settings, changes)


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises a UserError for a name that is not known, with the likely one."""
    names = dict.fromkeys(known)
    for name in given:
        if name not in names:
            raise UserError(f"there is no parameter '{name}'; {hint(name, names)}")


def hint(name: str, known: Mapping[str, object]) -> str:
    """The likely name for an unknown one."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"


def _converted(value: Any, declared: Declared, *, is_list: bool) -> Any:
    if is_list:
        elements = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(_converted(element, declared, is_list=False) for element in elements)
    return float(value) if declared.kind is float and type(value) is int else value


def replaced(settings: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    """The same settings with other values by path, see `Declared`.

    Each class is made once, with all of its changes: they may not fit together one by one.
    """
    if () in changes:
        return changes[()]
    by_field: dict[str, dict[tuple[str, ...], Any]] = {}
    for path, value in changes.items():
        by_field.setdefault(path[0], {})[path[1:]] = value
    held = settings if isinstance(settings, Groups) else vars(settings)
    made = {name: replaced(held[name], deeper) for name, deeper in by_field.items()}
    return Groups({**settings, **made}) if isinstance(settings, Groups) else replace(settings, **made)
