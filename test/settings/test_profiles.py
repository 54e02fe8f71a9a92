# SPDX-License-Identifier: Apache-2.0
"""Parameters merge common < profile < the user's file < launch arguments that are not empty."""

from pathlib import Path

import pytest

from specvla_ros.errors import UserError
from specvla_ros.lab.planning.device import read_device
from specvla_ros.lab.planning.plan import make_plan
from specvla_ros.models.settings import WeightFormat
from specvla_ros.policy_parameters import PolicyParameters
from specvla_ros.settings.parameter import walk
from specvla_ros.settings.profiles import as_bool, as_number, merge_parameters, read_assignments

CONFIG = Path(__file__).resolve().parents[2] / "config"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_strongest_wins_wherever_it_stands(tmp_path: Path) -> None:
    common = write(
        tmp_path / "common.yaml", "/**: {ros__parameters: {a: 1, b: 1, c: 1, d: x, decode: {mode: ar, e: 1}}}"
    )
    profile = write(tmp_path / "profile.yaml", "policy: {ros__parameters: {b: 2, c: 2, decode: {e: 2}}}")
    user = write(tmp_path / "user.yaml", "/**: {ros__parameters: {c: 3}}")
    merged = merge_parameters([common, profile, user], {"d": "argument", "a": ""}, node="policy")
    assert merged == {"a": 1, "b": 2, "c": 3, "d": "argument", "decode.mode": "ar", "decode.e": 2}


@pytest.mark.parametrize(
    "key", ["/**", "policy", "/policy", "/arm/policy", "arm/policy", "/**/policy", "/arm/**", "arm/**"]
)
def test_sections_of_a_namespaced_node(tmp_path: Path, key: str) -> None:
    file = write(tmp_path / "user.yaml", f"{key}: {{ros__parameters: {{a: 1}}}}\nother: {{ros__parameters: {{a: 2}}}}")
    assert merge_parameters([file], {}, node="policy", namespace="/arm/") == {"a": 1}


def test_within_one_file_the_node_beats_all_nodes(tmp_path: Path) -> None:
    file = write(tmp_path / "user.yaml", "policy: {ros__parameters: {a: 1}}\n/**: {ros__parameters: {a: 2, b: 2}}")
    assert merge_parameters([file], {}, node="policy") == {"a": 1, "b": 2}


def test_within_one_file_an_arms_own_section_beats_those_for_both_arms(tmp_path: Path) -> None:
    sections = ["/left/driver: {a: 4}", "/left/**: {a: 3, b: 3}", "/driver: {a: 2, b: 2, c: 2}", "/**: {a: 1, d: 1}"]
    text = "\n".join(each.replace(": {", ": {ros__parameters: {", 1) + "}" for each in sections)
    file = write(tmp_path / "robot.yaml", text)
    assert merge_parameters([file], {}, node="driver", namespace="left") == {"a": 4, "b": 3, "c": 2, "d": 1}
    assert merge_parameters([file], {}, node="driver", namespace="right") == {"a": 2, "b": 2, "c": 2, "d": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read"),
        ("", "empty or not a mapping"),
        ("a: 1", "nothing for the node 'policy'"),
        ("/**: {a: 1}", "needs 'ros__parameters:'"),
        ("/**: {ros__parameters: {a: {b: }}}", "'a.b' is None; write a string, a number"),
        ("/**: {ros__parameters: {a: 2001-01-01}}", "'a' is datetime.date"),
        ("/**: {ros__parameters: {a: [[1]]}}", r"'a' is \[\[1\]\]; write"),
    ],
)
def test_a_file_that_is_no_parameter_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        merge_parameters([write(tmp_path / "user.yaml", text)], {}, node="policy")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        merge_parameters([tmp_path / "no.yaml"], {}, node="policy")


def test_booleans() -> None:
    assert as_bool("x", "True") and not as_bool("x", "false")
    with pytest.raises(UserError, match="x:=1 must be true or false"):
        as_bool("x", "1")


def test_numbers() -> None:
    assert as_number("x", "2.5") == 2.5
    for text in ("soon", "", "nan", "inf", "-1"):
        with pytest.raises(UserError, match=f"x:={text} must be a non-negative number"):
            as_number("x", text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("-1.5E2", -150.0), (".5e1", 5.0), ("[1e3, 2]", [1e3, 2]), ("1e", "1e"), ("1e-3m", "1e-3m")],
)
def test_numbers_with_an_exponent_are_numbers_as_for_ros(text: str, value: object) -> None:
    assert read_assignments([f"a:={text}"]) == {"a": value}


@pytest.mark.parametrize("profile", ["cpu", "desktop", "orin"])
def test_every_parameter_of_a_profile_is_one_of_the_policys(profile: str) -> None:
    declared = {each.name: each for each in walk(PolicyParameters())}
    merged = merge_parameters([CONFIG / "common.yaml", CONFIG / f"{profile}.yaml"], {}, node="policy")
    problems = [declared[name].problem(value) for name, value in merged.items()]
    assert not any(problems)


@pytest.mark.parametrize(("profile", "device", "lossy"), [("orin", "orin", True), ("desktop", "rtx5090", False)])
def test_a_shipped_profile_runs_what_the_plan_derives(profile: str, device: str, lossy: bool) -> None:
    """The mode that acts on the youngest images; on an Orin, where bfloat16 is slow, also the weight format."""
    merged = merge_parameters([CONFIG / "common.yaml", CONFIG / f"{profile}.yaml"], {}, node="policy")
    formats = (WeightFormat.NONE, WeightFormat.W8A8) if lossy else (WeightFormat.NONE,)
    plans = {each.value: make_plan(read_device(device), each).profile for each in formats}
    youngest = min(plans, key=lambda name: plans[name].limit.derated_image_age_s)
    assert merged.get("model.quantization", "none") == youngest
    planned = plans[youngest].settings
    assert merged["decode.mode"] == planned.mode == "auto"
    nodes = merged["draft.nodes"]
    assert isinstance(nodes, int) and nodes <= planned.draft.nodes
    assert merged["draft.depth"] == planned.draft.depth
