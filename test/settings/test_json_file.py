# SPDX-License-Identifier: Apache-2.0
"""JSON files that a user gives: a wrong field is named, and nothing is made to fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.errors import UserError
from specvla_ros.settings import json_file
from specvla_ros.settings.json_file import Fields, load_json, read_fields

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ASKED = {
    "whole": lambda fields: fields.whole("it", minimum=1, maximum=100),
    "number": lambda fields: fields.number("it", above=0.0, maximum=100.0),
    "flag": lambda fields: fields.flag("it"),
    "text": lambda fields: fields.text("it", choices=("a", "b")),
    "list": lambda fields: fields.list_of("it", float, "a list of two numbers", length=2),
    "inner": lambda fields: fields.inner("it"),
}
FITS = {
    "whole": lambda value: type(value) is int and 1 <= value <= 100,
    "number": lambda value: type(value) in (int, float) and 0 < value <= 100,
    "flag": lambda value: type(value) is bool,
    "text": lambda value: value in ("a", "b"),
    "list": lambda value: isinstance(value, list) and len(value) == 2 and all(type(v) in (int, float) for v in value),
    "inner": lambda value: isinstance(value, dict),
}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("asked", ASKED)
@given(value=VALUES)
def test_a_field_is_what_was_asked_for_or_is_refused_by_name(asked: str, value: Any) -> None:
    fields = Fields({"it": value}, Path("config.json"), "outer.", "; copy it")
    try:
        found = ASKED[asked](fields)
    except UserError as error:
        assert str(error).startswith("config.json: outer.it is ")
        assert str(error).endswith("; copy it")
        assert len(str(error)) < 300
        assert str(error).isprintable()
        finite = "inf" not in repr(value) and "nan" not in repr(value)
        assert not (FITS[asked](value) and finite)
    else:
        assert FITS[asked](value)
        assert (found.raw if isinstance(found, Fields) else found) == value


@pytest.mark.parametrize("asked", ASKED)
def test_a_missing_field_is_named(asked: str) -> None:
    with pytest.raises(UserError, match=r"config\.json: it is missing, it must be "):
        ASKED[asked](Fields({}, Path("config.json")))


def test_null_and_a_missing_field_take_the_default() -> None:
    for raw in ({}, {"it": None}):
        fields = Fields(raw, Path("config.json"))
        assert fields.whole("it", 7) == 7
        assert fields.number("it", None) is None
        assert fields.flag("it", False) is False
        assert fields.inner("it", {}).raw == {}


@given(value=VALUES)
def test_what_json_writes_is_read_alike(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.getbasetemp() / "value.json", json.dumps(value))
    expected = json.loads(
        json.dumps(value), parse_int=lambda digits: int(digits) if len(digits) < 21 else float(digits)
    )
    assert repr(load_json(path)) == repr(expected)


@pytest.mark.parametrize("depth", [json_file.MAX_DEPTH + 2, 10**6])
@pytest.mark.parametrize("pair", ["[]", ('{"x":', "}")])
def test_deep_files_are_refused(tmp_path: Path, depth: int, pair: str) -> None:
    path = write(tmp_path / "deep.json", pair[0] * depth + "1" + pair[1] * depth)
    with pytest.raises(UserError, match=r"deep\.json nests its values more than 48 levels deep"):
        load_json(path)


def test_a_number_of_many_digits_is_named_by_its_field(tmp_path: Path) -> None:
    fields = read_fields(write(tmp_path / "c.json", '{"layers": ' + "9" * 5000 + "}"), missing="")
    with pytest.raises(UserError, match=r"c\.json: layers is inf, but it must be a whole number"):
        fields.whole("layers")


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_BYTES", 10)
    with pytest.raises(UserError, match="exceeds 10 bytes, the limit"):
        load_json(write(tmp_path / "large.json", json.dumps("x" * 12)))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"nul", b'{"a": 1,}'])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(UserError, match=r"c\.json cannot be read as JSON"):
        load_json(tmp_path / "c.json")


def test_files_that_are_missing_or_directories(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json is missing: where is it\?"):
        read_fields(tmp_path / "none.json", missing="where is it?")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        read_fields(tmp_path, missing="")
    with pytest.raises(UserError, match="holds a JSON list, but an object is expected"):
        read_fields(write(tmp_path / "list.json", "[]"), missing="")


def test_a_file_of_another_kind_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "my_robot.yaml").write_text("/**:\n")
    with pytest.raises(UserError, match=r"my_robot\.yaml cannot be read as JSON .*; give a JSON file"):
        load_json(tmp_path / "my_robot.yaml")
