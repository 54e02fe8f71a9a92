# SPDX-License-Identifier: Apache-2.0
"""What makes the mutants makes them, and leaves out what cannot matter."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cosmic_ray", reason="pip install -r requirements/mutants.txt")

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_item import MutationSpec
from mutants.mutants import Tree, by_hand, draw, equivalent, reason_of, summary
from mutants.operators import CHOSEN, RemoveStatement, Skips
from mutants.rooms import CONTROL, DRIVER, GUARD, NEAR, WIDER, modules, stages

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Arm:
    joints: int | None = 7

    def stop(self, *, at_s: float | None = None) -> "float | None":
        self.speed = 0.0
        self.brake()
        self.get_logger().info(f"stopped {self.joints - 1} joints")
        if self.way_m > 0.5:
            return at_s
        return at_s if len(self.parts) < 6 and at_s else None

__all__ = ["Arm"[1 - 1:]]
"""


def made(operator: str) -> list[tuple[str, str]]:
    """What an operator makes of the source, and why that is left out, if it is."""
    skips, found = Skips(SOURCE), []
    positions = [
        each
        for node in ast_nodes(get_ast(SOURCE))
        for each in get_operator(f"chosen/{operator}")().mutation_positions(node)
    ]
    for occurrence, (start, end) in enumerate(positions):
        mutated = mutate_code(SOURCE, get_operator(f"chosen/{operator}")(), occurrence)
        (line,) = set(mutated.splitlines()) - set(SOURCE.splitlines())
        found.append((line.strip(), skips.reason(MutationSpec("arm.py", operator, occurrence, start, end))))
    return found


@pytest.mark.parametrize(
    ("operator", "mutants"),
    [
        ("ReplaceBinaryOperator_BitOr_BitAnd", {"a type annotation"}),
        ("ReplaceTrueWithFalse", {"how a dataclass is made"}),
        ("ReplaceBinaryOperator_Sub_Add", {"the text of a message", "__all__"}),
        ("ReplaceComparisonOperator_Gt_GtE", {"a comparison that differs on one float only"}),
        ("ReplaceComparisonOperator_Lt_LtE", {""}),
        ("ReplaceAndWithOr", {""}),
    ],
)
def test_what_cannot_matter_is_left_out_with_its_reason(operator: str, mutants: set[str]) -> None:
    assert operator in CHOSEN
    assert {reason for _, reason in made(operator)} == mutants


@pytest.mark.parametrize(
    ("caught", "left_out"),
    [("OSError", [False]), ("asyncio.TimeoutError", [True]), ("(OSError, asyncio.TimeoutError)", [False, True])],
)
def test_an_exception_whose_name_has_a_dot_is_left_out(caught: str, left_out: list[bool]) -> None:
    source = f"try:\n    brake()\nexcept {caught}:\n    stop()\n"
    skips, operator = Skips(source), get_operator("chosen/ExceptionReplacer")()
    for occurrence, expected in enumerate(left_out):
        (start, end), *_ = [each for node in ast_nodes(get_ast(source)) for each in operator.mutation_positions(node)][
            occurrence:
        ]
        reason = skips.reason(MutationSpec("arm.py", "chosen/ExceptionReplacer", occurrence, start, end))
        assert ("with a dot" in reason) == expected
        if not reason:
            assert "CosmicRayTestingException" in mutate_code(source, operator, occurrence)


def test_calls_and_assignments_to_fields_are_left_out_one_at_a_time() -> None:
    kept = [line for line, reason in made("RemoveStatement") if not reason]
    assert kept == ["pass", "pass"]


@pytest.mark.parametrize("example", RemoveStatement.examples())
def test_examples_are_made(example: object) -> None:
    pre, post = example.pre_mutation_code, example.post_mutation_code  # type: ignore[attr-defined]
    assert mutate_code(pre, RemoveStatement(), 0) == post


def test_a_sample_is_the_same_for_a_seed_and_prefers_the_guard() -> None:
    keys = [
        f"{name}:{number}"
        for name in ("specvla_ros/control/guard/x.py", "specvla_ros/control/pose.py")
        for number in range(500)
    ]
    drawn = draw(keys, 200, seed=1)
    assert len(drawn) == 200 and drawn == draw(reversed(keys), 200, seed=1) != draw(keys, 200, seed=2)
    assert drawn[:50] == draw(keys, 50, seed=1)
    assert sum("guard" in key for key in drawn) > 130


def test_every_module_has_tests_that_are_about_it() -> None:
    for module in modules():
        for tests in stages(module):
            assert all((ROOT / test).exists() for test in tests), module
    assert all(any(name.startswith(begin) for name in modules()) for begin in NEAR)
    assert stages("specvla_ros/ros/driver/node.py")[0] == ("test/ros/driver",) and len(WIDER) == 3


def test_mutants_that_people_thought_of_still_fit_the_code() -> None:
    mutants = by_hand()
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 10
    assert all(mutant.was != mutant.becomes and mutant.line for mutant in mutants)


@pytest.mark.nightly
@pytest.mark.parametrize("room", [CONTROL, DRIVER, GUARD])
def test_mutants_of_motion_that_people_thought_of_are_noticed_by_the_tests_about_them(
    room: str, tmp_path: Path
) -> None:
    tree = Tree(tmp_path)
    try:
        tried = [mutant for mutant in by_hand() if mutant.module.startswith(room)]
        assert tried
        assert not [each.key for each in tried if tree.notices(each, stages(each.module)[0]) == "passed"]
    finally:
        tree.close()


def test_each_equivalent_mutant_is_of_a_line_that_is_there_and_says_why() -> None:
    for each in equivalent():
        lines = {line.strip() for line in (ROOT / each["module"]).read_text(encoding="utf-8").splitlines()}
        assert each["was"] in lines, each
        assert len(each["reason"]) > 10 and each["was"] != each["becomes"]
    assert json.loads((ROOT / "test" / "mutants" / "equivalent.json").read_text()) == equivalent()


def test_the_guide_tells_the_figures_of_the_run() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "mutants.json").read_text(encoding="utf-8"))
    names = ("mutants", "killed", "timeouts", "equivalent")
    tried, killed, timeouts, equal = (sum(row[name] for row in result["modules"].values()) for name in names)
    assert tried == result["drawn"] == killed + timeouts + equal + len(result["survivors"])
    said = f"Of {tried} sampled out of {result['of']} mutants, {equal} are equivalent to the original; of the others, "
    said += f"{killed + timeouts} were detected"
    assert said in " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())


def test_only_a_mutant_on_the_list_is_equivalent() -> None:
    mutant = by_hand()[0]
    listed = {"module": mutant.module, "was": mutant.was, "becomes": mutant.becomes, "reason": "because"}
    assert reason_of(mutant, [listed]) == "because"
    assert reason_of(mutant, [{**listed, "becomes": "pass"}]) == ""


def test_those_drawn_at_random_are_counted_apart_and_as_they_were_at_first() -> None:
    hand = by_hand()[0]
    verdicts: Any = {"x:1": "failed", "x:2": "timeout again", "x:3": "passed", hand.key: "failed"}
    drawn = [hand, *(replace(hand, key=key) for key in verdicts if key != hand.key)]
    found: Any = SimpleNamespace(of=lambda mutant: verdicts[mutant.key])
    told = summary(drawn, 9, found, {})
    assert told["at_random"] == {"mutants": 3, "noticed": 2, "noticed_at_first": 1}
    assert len(told["survivors"]) == 1 and told["modules"][hand.module]["timeouts"] == 1
