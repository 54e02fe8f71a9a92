# SPDX-License-Identifier: Apache-2.0
"""Reads users' JSON files within size limits and with type-checked fields. Needs no torch.

Python's `int`, `bool` and `float` accept nearly everything (`bool("false")` is true). Here each field declares its
type, and an error names the file and the field.
"""

import json
import math
import reprlib
from collections.abc import Sequence, ValuesView
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specvla_ros.errors import UserError

MAX_BYTES = 64 << 20  # the largest tokenizer.json in use has about 35 MB
MAX_DEPTH = 48  # of nested lists and objects; a tokenizer.json has about ten
_MAX_DIGITS = 20  # of a whole number; a longer one is read as a float, often infinite
_REQUIRED: Any = object()


def load_json(path: Path) -> Any:
    """Returns the value in a JSON file. NaN and infinity pass, as unused fields may hold them; `Fields` refuses them.

    Raises:
        FileNotFoundError: the file does not exist.
        UserError: it cannot be read, is not valid JSON, or exceeds the limits on size and nesting.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path} exceeds {MAX_BYTES} bytes, the limit for a JSON file; is it the right file?")
        value = json.loads(content.decode("utf-8"), parse_int=_whole)
        if _too_deep(value):
            raise RecursionError
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        remedy = "copy the file again" if path.suffix == ".json" else "give a JSON file; its name ends in .json"
        raise UserError(f"{path} cannot be read as JSON ({error}); {remedy}") from None
    except RecursionError:
        deep = f"{path} nests its values more than {MAX_DEPTH} levels deep"
        raise UserError(f"{deep}; it may be damaged, copy the file again") from None
    return value


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def _too_deep(value: Any) -> bool:
    at_depth = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = [each.values() if isinstance(each, dict) else each for each in at_depth]
        at_depth = [inner for each in lists if isinstance(each, (list, ValuesView)) for inner in each]
    return bool(at_depth)


def shown(value: object) -> str:
    """Formats a value for a message: short, on one line, in characters that any terminal displays."""
    text = _SHORT.repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 3


@dataclass(frozen=True)
class Fields:
    """A JSON object whose fields are read by name and type. A null field counts as missing.

    Every method raises a UserError that names the file and the field if the value has the wrong type, is out of range,
    or is missing without a default.
    """

    raw: dict[str, Any]  # the object
    path: Path  # its file
    prefix: str = ""  # put before field names in messages, such as `text_config.`
    hint: str = ""  # the remedy for a wrong or missing field; begins with "; "

    def whole(self, name: str, default: Any = _REQUIRED, *, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        """A whole number without a decimal point."""
        words = f"a whole number from {minimum} to {maximum}"
        value = self._value(name, default, words)
        if value is not default and (type(value) is not int or not minimum <= value <= maximum):
            raise self.wrong(name, words)
        return value

    def number(
        self, name: str, default: Any = _REQUIRED, *, above: float = -math.inf, maximum: float = math.inf
    ) -> float:
        """A finite number."""
        words = "a finite number"
        words += f" above {above:g}" if math.isfinite(above) else ""
        words += f", at most {maximum:g}" if math.isfinite(maximum) else ""
        value = self._value(name, default, words)
        if value is not default and (not is_number(value) or not above < value <= maximum):
            raise self.wrong(name, words)
        return value if value is default else float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._value(name, default, "true or false")
        if value is not default and type(value) is not bool:
            raise self.wrong(name, "true or false, without quotes")
        return value

    def text(self, name: str, default: Any = _REQUIRED, *, choices: Sequence[str] = ()) -> str:
        words = f"one of: {', '.join(choices)}" if choices else "a string"
        value = self._value(name, default, words)
        if value is not default and (not isinstance(value, str) or (choices and value not in choices)):
            raise self.wrong(name, words)
        return value

    def list_of(self, name: str, kind: type, words: str, default: Any = _REQUIRED, *, length: int | None = None) -> Any:
        """A list whose elements all have one type.

        Args:
            kind: bool, float (any finite number), int, str, list or dict; object: anything.
            words: description of a valid list, for the message.
            length: required length; None: any.
        """
        value = self._value(name, default, words)
        if value is default:
            return value
        right = isinstance(value, list) and (length is None or len(value) == length)
        if not right or not all(_is(each, kind) for each in value):
            raise self.wrong(name, words)
        return value

    def inner(self, name: str, default: Any = _REQUIRED) -> "Fields":
        """A nested object."""
        value = self._value(name, default, "an object")
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, self.path, f"{self.prefix}{name}.", self.hint)

    def wrong(self, name: str, words: str) -> UserError:
        where = f"{self.path}: {self.prefix}{name}"
        return UserError(f"{where} is {shown(self.raw.get(name))}, but it must be {words}{self.hint}")

    def _value(self, name: str, default: Any, words: str) -> Any:
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise UserError(f"{self.path}: {self.prefix}{name} is missing, it must be {words}{self.hint}")
        return default


def is_number(value: object) -> bool:
    """True for a finite number; False for a bool."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is(value: object, kind: type) -> bool:
    return kind is object or (is_number(value) if kind is float else type(value) is kind)


def read_fields(path: Path, *, missing: str, hint: str = "") -> Fields:
    """Reads the object in a JSON file; UserError if it holds anything else.

    Args:
        missing: end of the message for a file that does not exist.
        hint: see `Fields`.
    """
    try:
        value = load_json(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {missing}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, but an object is expected; copy the file again")
    return Fields(value, path, hint=hint)
