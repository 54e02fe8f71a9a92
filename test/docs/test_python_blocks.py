# SPDX-License-Identifier: Apache-2.0
"""The Python that the documentation shows runs."""

import contextlib
import inspect
import re
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from specvla_ros.lab.bags.frames import TopicChoice, bag_frames, choose_topics
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.models.target import TARGETS, Target
from specvla_ros.speculation import reference
from specvla_ros.speculation.settings import DRAFTERS, RULES

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = "docs/how-to"
PAGES = (
    "README.md",
    f"{HOW_TO}/add-a-data-source.md",
    "docs/python.md",
    "docs/explanation/speculative-decoding.md",
    f"{HOW_TO}/add-a-rule.md",
    f"{HOW_TO}/add-a-drafter.md",
    f"{HOW_TO}/add-a-model-family.md",
    f"{HOW_TO}/add-a-robot-output.md",
    f"{HOW_TO}/run-a-task.md",
    f"{HOW_TO}/speculation.md",
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: str) -> list[str]:
    """A page's Python blocks, after as many empty lines as precede them on it: tracebacks name the page's lines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in BLOCK.finditer(text)]


@pytest.fixture
def run_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a page's blocks in one module, and forgets what they registered."""
    registries = [RULES, DRAFTERS, TARGETS]
    with contextlib.suppress(ImportError):  # without ROS
        from specvla_ros.ros.driver.outputs import ROBOT_OUTPUTS

        registries.append(ROBOT_OUTPUTS)
    for registry in registries:
        monkeypatch.setattr(registry, "_entries", dict(registry.entries()))

    def run(page: str) -> ModuleType:
        module = ModuleType("shown")
        monkeypatch.setitem(sys.modules, "shown", module)
        vars(module).update(directory=nano_policy(), image=np.zeros((64, 64, 3), np.uint8))
        for block in python_blocks(page):
            exec(compile(block, page, "exec"), vars(module))
        return module

    return run


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_from_top_to_bottom(run_page: Any, page: str) -> None:
    assert python_blocks(page)
    run_page(page)


def test_the_readme_acts_in_five_lines() -> None:
    lines = [line for line in python_blocks("README.md")[0].splitlines() if line.strip()]
    assert len(lines) <= 5


def test_every_page_with_python_is_run() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    with_python = {str(page.relative_to(ROOT)) for page in pages if "```python" in page.read_text(encoding="utf-8")}
    assert with_python == {*PAGES}


def test_the_shown_robot_output_takes_the_tool_where_the_action_says(run_page: Any) -> None:
    pytest.importorskip("rclpy")
    from std_msgs.msg import Float64MultiArray
    from support.driving import arm

    run_page(f"{HOW_TO}/add-a-robot-output.md")
    with arm(output="speeds") as robot:
        sent: list[np.ndarray] = []

        def move(message: Float64MultiArray) -> None:
            sent.append(np.array(message.data))
            robot.pose = robot.pose.displaced(sent[-1] * 0.01)

        robot.node.create_subscription(Float64MultiArray, "/driver/speeds", move, 10)
        robot.start()
        robot.until(lambda: sent)
        start = robot.pose
        robot.act()
        robot.rest()
        robot.until(lambda: not sent[-1].any())  # the last command may be on its way
        assert robot.pose.distance(start)[0] == pytest.approx(0.055, abs=0.02)
        assert not sent[-1].any()


def test_the_shown_conversion_makes_bags_that_are_read(
    run_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("episodes").mkdir()
    rgb, actions, times_s = np.zeros((4, 48, 64, 3), np.uint8), np.zeros((4, 7)), 0.2 * np.arange(4)
    np.savez("episodes/seven.npz", rgb=rgb, action=actions, t=times_s, text=np.array("lift the red cube"))
    run_page(f"{HOW_TO}/add-a-data-source.md")
    with open_bag("bags/seven") as bag:
        frames = [*bag_frames(bag, choose_topics(bag, TopicChoice()))]
    assert [frame.instruction for frame in frames] == ["lift the red cube"] * 4
    assert np.diff([frame.image.time_ns for frame in frames]).tolist() == [200_000_000] * 3


def test_the_shown_model_family_has_all_that_a_target_must_give(run_page: Any) -> None:
    shown = run_page(f"{HOW_TO}/add-a-model-family.md").MyTarget
    needed = {name for name in vars(Target) if not name.startswith("_")}
    assert needed <= {*dir(shown), *(each.name for each in fields(shown))}


def test_the_page_shows_the_reference_as_it_is() -> None:
    page = (ROOT / "docs" / "explanation" / "speculative-decoding.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert textwrap.indent(shown, "    ") in inspect.getsource(reference.decode)
