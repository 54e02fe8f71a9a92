# SPDX-License-Identifier: Apache-2.0
"""The structure of the product: how it is counted, and what of it must hold."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from call_walk import Code, Place

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "count_structure.py"


def counts(*arguments: object) -> dict[str, object]:
    command = [sys.executable, str(SCRIPT), "--json", *map(str, arguments)]
    found: dict[str, object] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_imports_circles_and_private_functions_are_counted(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "specvla_ros/__init__.py": "__version__ = '1'\n",
            "specvla_ros/errors.py": "import specvla_ros\n",
            "specvla_ros/engine/__init__.py": "",
            "specvla_ros/engine/engine.py": (
                "from specvla_ros.models import llama\n\ndef f():\n    from .run import g\n"
            ),
            "specvla_ros/engine/run.py": (
                "from ..errors import UserError\nfrom specvla_ros.engine.engine import f\n\n"
                "def _once(): ...\ndef _twice(): ...\n\ndef g():\n    _once()\n    _twice(_twice)\n"
            ),
            "specvla_ros/models/__init__.py": "",
            "specvla_ros/models/llama.py": "import specvla_ros.engine.run\nfrom specvla_kernels.linear import linear\n",
            "kernels/specvla_kernels/__init__.py": "",
            "kernels/specvla_kernels/linear.py": "import torch\n",
        },
    )
    assert counts("--root", root) == {
        "files": 9,
        "files_without_init": 5,
        "lines": 18,
        "lines_on_a_robot": 18,
        "lines_of_benchmarks": 0,
        "rooms": 5,
        "arrows": 4,
        "climbing_arrows": ["models -> engine"],
        "imports_into_lab": [],
        "circles_of_modules": [
            ["specvla_ros.engine.engine", "specvla_ros.engine.run", "specvla_ros.models.llama"],
        ],
        "circles_of_rooms": [["engine", "models"]],
        "modules_with_one_importer": 4,
        "private_functions": 2,
        "private_functions_used_once": 1,
    }


def test_the_laboratory_is_imported_by_its_entry_in_the_command_line_alone(tmp_path: Path) -> None:
    files = {
        "specvla_ros/lab/__init__.py": "",
        "specvla_ros/lab/jobs/run.py": "import specvla_ros.engine.engine\n",
        "specvla_ros/engine/engine.py": "def f():\n    from specvla_ros.lab.jobs.run import g\n",
        "specvla_ros/cli/laboratory.py": "import specvla_ros.lab.jobs.run\n",
    }
    found = counts("--root", write(tmp_path, files))
    assert found["imports_into_lab"] == ["specvla_ros.engine.engine -> specvla_ros.lab.jobs.run"]
    assert found["climbing_arrows"] == ["engine -> lab/jobs"]
    assert (found["lines"], found["lines_on_a_robot"]) == (4, 3)


def test_no_import_climbs_and_none_goes_in_a_circle() -> None:
    found = counts()
    assert found["climbing_arrows"] == found["imports_into_lab"] == []
    assert found["circles_of_modules"] == found["circles_of_rooms"] == []


WALKED = {
    "a": (
        "from pkg.b import Low, helper\n"
        "class High:\n"
        "    def __init__(self, low: Low | None):\n"
        "        self.low = low\n"
        "    def go(self):\n"
        "        other = Low()\n"
        "        helper(other.up())\n"
        "        return self.low.again()\n"
        "    def back(self): ...\n"
    ),
    "b": (
        "from pkg.c import deep\n"
        "class Low:\n"
        "    def __init__(self): deep()\n"
        "    def up(self):\n"
        "        from pkg.a import High\n"
        "        High(None).back()\n"
        "    def again(self): return deep()\n"
        "def helper(value): return value\n"
    ),
    "c": "def deep(): ...\n",
}


def test_a_walk_meets_files_in_order_and_counts_calls_that_go_up_or_back() -> None:
    trees = {f"pkg.{name}": ast.parse(text) for name, text in WALKED.items()}
    imports: dict[str, set[str]] = {"pkg.a": {"pkg.b"}, "pkg.b": {"pkg.c"}, "pkg.c": set()}
    walk = Code(trees, imports).walk(Place("pkg.a", "High.go"))
    assert walk.files == ["pkg.a", "pkg.b", "pkg.c"]
    assert walk.climbs == walk.callbacks == ["pkg.b -> pkg.a.High.__init__", "pkg.b -> pkg.a.High.back"]
    assert walk.returns == ["pkg.a -> pkg.b", "pkg.b -> pkg.a"]


def test_a_reader_goes_down_and_seldom_back() -> None:
    found: dict[str, dict[str, list[str]]] = counts("--walks")  # type: ignore[assignment]
    for name, walk in found.items():
        assert walk["climbs"] == walk["callbacks"] == [], name
        # A tick calls scheduler, runner, verifier and drafters in turn, and the scheduler again, whose chooser learns
        # and computes the pace. What it published may start the next answer.
        assert len(walk["returns"]) <= (18 if name == "tick" else 10), name
