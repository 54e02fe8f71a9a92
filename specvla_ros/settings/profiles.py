# SPDX-License-Identifier: Apache-2.0
"""Parameters from files and the command line.

Launch files merge them in this order: common < profile < the user's file < non-empty launch arguments. ROS itself
prefers a file that names the node to one for all nodes (`/**`), whatever their order, so the merge is done here.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import shown

PROFILES = ("cpu", "desktop", "orin")  # files of config/
_MAX_BYTES = 1 << 20

Value = str | bool | int | float | list[Any]


def merge_parameters(
    files: Sequence[Path], arguments: Mapping[str, str], *, node: str, namespace: str = ""
) -> dict[str, Value]:
    """Returns the parameters of one node by dotted name.

    Args:
        files: ROS 2 parameter files; later ones override earlier ones.
        arguments: strings by parameter name; an empty one keeps the files' value.
        namespace: with or without slashes.

    Raises UserError if a file is missing, is not a parameter file, or has nothing for this node.
    """
    merged: dict[str, Value] = {}
    for file in files:
        merged |= _read(file, node, namespace.strip("/"))
    return merged | {name: text for name, text in arguments.items() if text}


def names_for(file: Path, node: str) -> set[str]:
    """Parameter names in the file's sections for this node, without those for all nodes (`/**`)."""
    sections = _sections(file, node, "")
    return {name for key, parameters in sections if key != "**" for name in _flatten(parameters)}


def read_assignments(assignments: Sequence[str]) -> dict[str, Value]:
    """Parses `name:=value` assignments, with YAML values, into a dict."""
    values: dict[str, Value] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition(":=")
        if not separator:
            raise UserError(f"invalid parameter '{assignment}'; write name:=value, for example decode.mode:=spec")
        try:
            values[name] = _parsed(text)
        except ValueError as error:
            raise UserError(f"the value of {shown(assignment)} cannot be read as YAML ({error}); quote it") from None
    return values


def as_bool(name: str, text: str) -> bool:
    """Parses a boolean launch argument."""
    if text.lower() not in ("true", "false"):
        raise UserError(f"launch argument {name}:={text} must be true or false")
    return text.lower() == "true"


def as_number(name: str, text: str) -> float:
    """Parses a numeric launch argument: seconds, a factor or a count."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UserError(f"launch argument {name}:={text} must be a non-negative number")
    return number


def _read(file: Path, node: str, namespace: str) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for _, parameters in _sections(file, node, namespace):
        values |= _flatten(parameters)
    for name, value in values.items():
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, (str, bool, int, float)) for part in parts):
            allowed = "a string, a number, true, false, or a list of these"
            raise UserError(f"parameter file {file}: '{name}' is {shown(value)}; write {allowed}")
    return values


def read_parameter_file(file: Path) -> dict[Any, Any]:
    """The sections of a ROS 2 parameter file by name, unchecked; raises UserError if it is not a mapping."""
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise UserError(f"parameter file {file} exceeds {_MAX_BYTES} bytes; is it the right file?")
        content = _parsed(text.decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"parameter file {file} does not exist; give a relative or absolute path") from None
    except (OSError, ValueError) as error:
        raise UserError(f"parameter file {file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"parameter file {file} is empty or not a mapping; begin with '/**:' and 'ros__parameters:'")
    return content


def _sections(file: Path, node: str, namespace: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Parameters in a file's sections for a node: those for all nodes (`**`) first, its own last."""
    content = read_parameter_file(file)
    ranks = {"**": 0, f"**/{node}": 1, node: 2}
    if namespace:
        ranks |= {f"{namespace}/**": 3, f"{namespace}/{node}": 4}
    sections = [key for key in content if str(key).strip("/") in ranks]
    if not sections:
        raise UserError(f"parameter file {file} has nothing for the node '{node}'; begin it with '/**:' or '{node}:'")
    found: list[tuple[str, Mapping[str, Any]]] = []
    for key in sorted(sections, key=lambda each: ranks[str(each).strip("/")]):
        section = content[key]
        parameters = section.get("ros__parameters") if isinstance(section, dict) else None
        if not isinstance(parameters, dict):
            raise UserError(f"parameter file {file}: '{key}' needs 'ros__parameters:' and the parameters under it")
        found.append((str(key).strip("/"), parameters))
    return found


class _Loader(yaml.SafeLoader):
    """YAML as ROS reads it: 1e-3 is a number, while YAML 1.1 reads it as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parsed(text: str) -> Any:
    """Parses YAML; ValueError if it is malformed or holds an invalid date or number."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _flatten(parameters: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    flat: dict[str, Value] = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
