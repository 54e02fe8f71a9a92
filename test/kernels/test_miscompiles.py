# SPDX-License-Identifier: Apache-2.0
"""No kernel contains a pattern that Triton is known to miscompile."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import specvla_kernels
from specvla_ros.engine.kernel_check import MISCOMPILES

KERNELS = sorted(Path(specvla_kernels.__file__).parent.glob("*.py"))
TWO_PRODUCTS = """
for k in range(n):
    sums = tl.dot(a, b, sums)
    sums = tl.dot(c, d, sums)
"""
ADDED = TWO_PRODUCTS.replace("sums = tl.dot(c, d, sums)", "sums += dot(c, d)")
APART = TWO_PRODUCTS.replace("sums = tl.dot(c, d, sums)", "others = tl.dot(c, d, others)")
EITHER = """
for k in range(n):
    if wide:
        sums = tl.dot(a, b, sums)
    else:
        sums = tl.dot(c, d, sums)
"""


def shared_accumulators(source: str) -> list[str]:
    """Names of the accumulators to which one iteration of a loop adds several matrix products."""
    loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)]
    return [name for loop in loops for name, products in _products(loop.body).items() if products > 1]


def _products(statements: list[ast.stmt]) -> Counter[str]:
    """The number of products added to each accumulator; of the two sides of an `if`, only one runs."""
    found: Counter[str] = Counter()
    for each in statements:
        if isinstance(each, ast.If):
            found += _products(each.body) | _products(each.orelse)
        elif isinstance(each, ast.For):
            found += _products(each.body)
        elif isinstance(each, ast.Assign | ast.AugAssign):
            found.update(_accumulators(each))
    return found


def _accumulators(statement: ast.Assign | ast.AugAssign) -> list[str]:
    target = statement.target if isinstance(statement, ast.AugAssign) else statement.targets[0]
    inside = [*ast.walk(statement.value)]
    multiplies = any(isinstance(each, ast.Call) and _multiplies(each) for each in inside)
    if not multiplies or not isinstance(target, ast.Name):
        return []
    read = {each.id for each in inside if isinstance(each, ast.Name)}
    return [target.id] if isinstance(statement, ast.AugAssign) or target.id in read else []


def _multiplies(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2].strip("_") == "dot"


def test_two_products_in_one_accumulator_are_found() -> None:
    assert shared_accumulators(TWO_PRODUCTS) == shared_accumulators(ADDED) == ["sums"]
    assert not shared_accumulators(APART) and not shared_accumulators(EITHER)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_no_accumulator_takes_two_products_in_one_iteration(path: Path) -> None:
    assert not shared_accumulators(path.read_text()), "see specvla_ros/engine/kernel_check.py"


def test_what_is_known_is_told_by_architecture() -> None:
    assert "10821" in MISCOMPILES["sm_103"] and "8695" not in MISCOMPILES["sm_103"]
    assert "sm_87" not in MISCOMPILES
