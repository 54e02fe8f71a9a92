# SPDX-License-Identifier: Apache-2.0
"""Which mutants cosmic-ray makes of a module, and which of them cannot matter."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import cosmic_ray.plugins
import parso
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.work_item import MutationSpec

_NEGATED = (
    *("Lt_GtE", "LtE_Gt", "Gt_LtE", "GtE_Lt"),
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
)
_BOUNDARY = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")
_ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul", "BitOr_BitAnd")
# One replacement of each operator: a shift of a float, say, raises at once, and would only flatter the score.
CHOSEN = {
    *(f"ReplaceBinaryOperator_{pair}" for pair in _ARITHMETIC),
    *(f"ReplaceComparisonOperator_{pair}" for pair in (*_NEGATED, *_BOUNDARY)),
    *("ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not", "AddNot"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer"),
    *("NumberReplacer", "RemoveDecorator", "ZeroIterationForLoop"),
    "RemoveStatement",
}
_TELLS = re.compile(r"^(self\.)?(get_logger\(\)\.\w+|_say|print)\(")
_DOTTED = re.compile(r"\w*\.")
_OF_INTEGERS = re.compile(r"\blen\(|_ns\b|(?<![\w.])\d+(?![\w.])")


class RemoveStatement(Operator):
    """Leaves out a call whose value nobody takes, or an assignment to a field outside of `__init__`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "simple_stmt" and _removable(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        statement = node.children[0]
        node.children[0] = parso.python.tree.Name("pass", statement.start_pos, statement.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("robot.brake()\n", "pass\n"), Example("self.at_rest = True\n", "pass\n"))


def _removable(statement: Any) -> bool:
    if statement.type == "atom_expr":
        return bool(statement.children[-1].get_code().startswith("("))
    if statement.type != "expr_stmt":
        return False
    augmented = statement.children[1].type == "operator" and statement.children[1].value != "="
    of_a_field = statement.children[0].type == "atom_expr" or augmented
    return of_a_field and not _within(statement, "__init__")


def _within(node: Any, function: str) -> bool:
    while node is not None:
        if node.type == "funcdef" and node.name.value == function:
            return True
        node = node.parent
    return False


class _Chosen:
    """cosmic-ray's interface for operators: those that are chosen, from it and from here."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(CHOSEN))

    def __getitem__(self, name: str) -> type[Operator]:
        found: type[Operator] = RemoveStatement if name == RemoveStatement.__name__ else _CORE[name]
        return found


_CORE = cosmic_ray.plugins.OPERATOR_PROVIDERS.pop("core")
cosmic_ray.plugins.OPERATOR_PROVIDERS["chosen"] = _Chosen()


class Skips:
    """Says of each mutant of a module whether it cannot matter, and why not."""

    def __init__(self, source: str) -> None:
        self._lines = source.splitlines()
        self._spans = list(_spans(ast.parse(source)))

    def reason(self, mutation: MutationSpec) -> str:
        """Why a mutant is left out; empty: it is not."""
        line, column = mutation.start_pos
        at = (line, len(self._lines[line - 1][:column].encode()))  # ast counts bytes
        for begin, end, reason in self._spans:
            if begin <= at < end:
                return reason
        statement = self._lines[line - 1]
        if statement[column:].startswith(("*,", "*\n")):
            return "a mark in a list of arguments"
        if mutation.operator_name.endswith("ExceptionReplacer") and _DOTTED.match(statement[column:]):
            return "an exception's name with a dot, of which cosmic-ray makes no Python"
        if mutation.operator_name.endswith(_BOUNDARY) and not _OF_INTEGERS.search(statement):
            return "a comparison that differs on one float only"
        return ""


def _spans(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Begin, end and reason of all that cannot matter."""
    for node in ast.walk(tree):
        for each, reason in _harmless(node):
            yield (each.lineno, max(0, each.col_offset - 1)), (each.end_lineno, each.end_col_offset), reason


def _harmless(node: ast.AST) -> Iterator[tuple[Any, str]]:
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation, "a type annotation"
    if isinstance(node, ast.FunctionDef):
        if node.returns is not None:
            yield node.returns, "a type annotation"
        if node.name == "main":
            yield node, "the entry point of a process"
        for decorator in node.decorator_list:
            if ast.unparse(decorator) in ("abstractmethod", "classmethod", "staticmethod"):
                yield decorator, "a decorator that says what a method is"
    if isinstance(node, ast.ClassDef):
        for decorator in node.decorator_list:
            if "dataclass" in ast.unparse(decorator):
                yield decorator, "how a dataclass is made"
    if isinstance(node, ast.JoinedStr):
        yield node, "the text of a message"
    if isinstance(node, ast.Expr) and _TELLS.search(ast.unparse(node)):
        yield node, "the text of a message"
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        if function in ("parameter", "section", "_largest"):
            yield node, "a declared parameter: test/settings holds it against the page of parameters"
        if function == "zip":
            yield from ((keyword, "zip's strict") for keyword in node.keywords)
    if isinstance(node, ast.Assign):
        names = [ast.unparse(target) for target in node.targets]
        if "__all__" in names:
            yield node, "__all__"
        if any("TypeVar" in ast.unparse(node.value) or name in _ALIASES for name in names):
            yield node, "a type alias"


_ALIASES = ("Command", "Sent", "Legs", "Onward", "Topics", "OnPose", "OnBad", "OnJoints", "Quaternion")
