# SPDX-License-Identifier: Apache-2.0
"""Parameters are declared once; names, checks, other values and groups come from a walk over the declarations."""

import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from specvla_ros.control.guard.settings import GuardParameters
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.app import app
from specvla_ros.models.settings import ModelSettings
from specvla_ros.policy_parameters import PolicyParameters
from specvla_ros.ros.driver.parameters import DriverParameters
from specvla_ros.settings.parameter import (
    Groups,
    check,
    groups,
    parameter,
    section,
    values_of,
    walk,
    with_values,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Loose:
    theta: float = parameter(0.3, "Entropy.", minimum=0.0, maximum=10.0, name="loose_theta")
    window: int = parameter(2, "Tokens after it.", unit="tokens", minimum=1, maximum=32, writable=True)


@dataclass(frozen=True)
class Near:
    bins: tuple[int, ...] = parameter((0,), "How near.", unit="bins", minimum=0, maximum=254)


KINDS: dict[str, type] = {"loose": Loose, "near": Near}


@dataclass(frozen=True)
class Accept:
    ROS_PREFIX: ClassVar[str] = "accept."

    rule: str = parameter("strict", "Which.", choices=lambda: ("strict", *KINDS))
    rules: Mapping[str, Any] = groups(lambda: KINDS)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Top:
    rate: float = parameter(1.0, "How often.", unit="Hz", minimum=0.5)
    age: float = parameter(1.0, "How old.", name="image.age")
    accept: Accept = section(Accept, rule="near")


def test_names_values_and_descriptions_come_from_the_declarations() -> None:
    assert values_of(Top()) == {
        "rate": 1.0,
        "image.age": 1.0,
        "accept.rule": "near",
        "accept.loose_theta": 0.3,
        "accept.loose.window": 2,
        "accept.near.bins": (0,),
    }
    declared = {each.name: each for each in walk(Top())}
    assert declared["accept.loose.window"].description == "Tokens after it. [tokens]"
    assert declared["accept.loose.window"].parameter.writable and not declared["rate"].parameter.writable
    assert declared["accept.near.bins"].kind is int and declared["accept.near.bins"].is_list
    assert declared["accept.rule"].parameter.allowed == ("strict", "loose", "near")


def test_other_values_reach_every_depth_and_leave_the_rest() -> None:
    before = Top()
    changed = with_values(before, {"accept.loose_theta": 1, "accept.near.bins": [1, 2], "rate": 2})
    assert changed.accept.rules == {"loose": Loose(1.0), "near": Near((1, 2))}
    assert (changed.rate, changed.accept.rule, changed.age) == (2.0, "near", 1.0)
    assert before == Top() and with_values(changed, values_of(before)) == before
    assert with_values(before, {"accept.near.bins": 7}).accept.rules["near"] == Near((7,))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "accept.loose.windw",
            3,
            r"there is no parameter '.*windw'; did you mean 'accept\.loose\.window'",
        ),
        ("accept.loose.window", 0, "must be a whole number from 1 to 32 \\(default: 2\\)"),
        ("accept.loose.window", True, "a whole number"),
        ("accept.loose_theta", float("nan"), "a float from 0 to 10"),
        ("rate", 0.1, r"a float, 0\.5 or more"),
        ("rate", float("inf"), "parameter 'rate' is inf"),
        ("accept.rule", "any", "one of: strict, loose, near"),
        ("accept.near.bins", [1, 255], "a list of whole numbers from 0 to 254"),
        ("accept.near.bins", ["a"], "a list of whole numbers"),
    ],
)
def test_what_a_user_gives_is_looked_at(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_values(Top(), {name: value})


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(
        UserError, match=r"'rate' is 0\.1.*; and .*'accept\.rule' is 'any'.*; and there is no parameter"
    ):
        with_values(Top(), {"rate": 0.1, "accept.rule": "any", "accept.loose.windw": 3})


def test_settings_of_a_group_are_checked_with_their_full_names() -> None:
    with pytest.raises(UserError, match=r"^accept\.loose_theta must be 0 to 10, got 11\.0$"):
        Accept(rules=Groups({"loose": Loose(11.0)}))
    with pytest.raises(UserError, match=r"^accept\.near\.bins must be 0 to 254, got -1$"):
        Accept(rules=Groups({"near": Near((3, -1))}))


def test_numbers_of_numpy_and_whole_floats_are_numbers() -> None:
    assert Accept(rules=Groups({"loose": Loose(np.float64(0.5), np.int64(3)), "near": Near((np.int32(4),))}))
    assert Accept(rules=Groups({"loose": Loose(1)}))
    with pytest.raises(UserError, match=r"accept\.loose\.window must be 1 to 32, got True"):
        Accept(rules=Groups({"loose": Loose(window=True)}))


def test_groups_are_values() -> None:
    one, same, other = Accept(), Accept(), Accept(rules=Groups({"loose": Loose(1.0), "near": Near()}))
    assert one == same and hash(one) == hash(same) and one != other
    for again in (pickle.loads(pickle.dumps(other)), deepcopy(other)):
        assert again == other and isinstance(again.rules, Groups)
    assert asdict(other)["rules"] == {"loose": {"theta": 1.0, "window": 2}, "near": {"bins": (0,)}}
    held: Any = one.rules
    for change in (
        lambda: held.update(loose=Loose(2.0)),
        lambda: held.pop("loose"),
        lambda: held.__setitem__("loose", Loose()),
        lambda: held.__delitem__("loose"),
        held.clear,
    ):
        with pytest.raises(TypeError, match="are immutable"):
            change()


def test_every_parameter_of_the_policy_has_a_name_of_its_own_and_a_default_that_is_allowed() -> None:
    declared = list(walk(PolicyParameters()))
    assert len({each.name for each in declared}) == len(declared) >= 40
    assert [each.problem(each.value) for each in declared] == [""] * len(declared)
    assert {each.name for each in walk(EngineSettings())} <= {each.name for each in declared}
    assert values_of(PolicyParameters())["max_image_age_s"] == 1.0 and EngineSettings().max_image_age_s == 0.0


@pytest.mark.parametrize("settings", [PolicyParameters(), DriverParameters(), GuardParameters()])
def test_about_a_dozen_parameters_of_a_node_are_basic(settings: object) -> None:
    assert 8 <= sum(each.parameter.basic for each in walk(settings)) <= 16


def test_help_shows_the_basic_parameters_and_hides_the_others() -> None:
    done = CliRunner().invoke(app, ["predict", "--help"], env={"COLUMNS": "400", "TERM": "dumb"})
    shown = {*re.findall(r"--[a-z-]+", done.output), *re.findall(r"[a-z]+\.[a-z_]+", done.output)}
    model = {f"--{each.path[0].replace('_', '-')}": each.parameter.basic for each in walk(ModelSettings())}
    engine = {each.name: each.parameter.basic for each in walk(EngineSettings()) if "." in each.name}
    wanted = {name for name, basic in (model | engine).items() if basic}
    assert shown & (model.keys() | engine.keys()) == wanted and "docs/reference/parameters.md" in done.output


def test_the_reference_page_is_up_to_date() -> None:
    """In a process of its own: other tests register rules and drafters."""
    pytest.importorskip("rclpy")
    script = [sys.executable, str(ROOT / "scripts" / "parameter_reference.py")]
    page = (ROOT / "docs" / "reference" / "parameters.md").read_text()
    reference = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert page == reference, "python scripts/parameter_reference.py > docs/reference/parameters.md"
    rows = re.findall(r"^\| `([a-z_.]+)`", page, re.MULTILINE)
    assert {each.name for each in walk(PolicyParameters())} <= set(rows)
