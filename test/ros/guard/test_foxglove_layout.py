# SPDX-License-Identifier: Apache-2.0
"""The layout for the black box shows what the guard records, by the names that the launch files give it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rclpy
from rclpy.parameter import Parameter
from support.guard_scene import PARAMETERS, TOPICS

from specvla_ros.ros.guard.node import GuardNode
from specvla_ros.ros.wiring import RobotTopics

LAYOUT = Path(__file__).resolve().parents[3] / "config" / "foxglove" / "guard.json"
TOPIC = re.compile(r"^(/[\w/]+)")


def shown_topics(content: Any) -> Iterator[str]:
    """Of plots, state transitions and panels with one topic."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key in ("value", "topicPath", "topicToRender") and TOPIC.match(value):
                yield TOPIC.match(value)[1]  # type: ignore[index]
            else:
                yield from shown_topics(value)
    elif isinstance(content, list):
        for each in content:
            yield from shown_topics(each)


def panels(layout: Any) -> Iterator[str]:
    """The panels of a part of the layout."""
    if isinstance(layout, str):
        yield layout
    else:
        yield from (panel for side in ("first", "second") for panel in panels(layout[side]))


def recorded_topics(output: str, folder: Path) -> set[str]:
    """What a guard that was started as the launch file does announces to its black box."""
    chosen = {**PARAMETERS, "output": output, "black_box_s": 10.0, "black_box_dir": str(folder)}
    overrides = [
        Parameter(name, value=list(value) if isinstance(value, tuple) else value) for name, value in chosen.items()
    ]
    remaps = [part for source, target in RobotTopics().guard for part in ("-r", f"{source}:={target}")]
    rclpy.init()
    guard = GuardNode(parameter_overrides=overrides, cli_args=["--ros-args", *remaps])
    try:
        assert guard.black_box is not None
        return set(guard.black_box._channels)
    finally:
        guard.close()
        guard.destroy_node()
        rclpy.shutdown()


def test_every_topic_of_the_layout_is_one_that_the_black_box_records(tmp_path: Path) -> None:
    recorded = {output: recorded_topics(output, tmp_path) for output in TOPICS}
    shown = set(shown_topics(json.loads(LAYOUT.read_text())["configById"]))
    assert shown <= set().union(*recorded.values())
    for output, topics in recorded.items():
        assert {"/tool_pose", "/policy/action", "/guard/enable", "/guard/stop", "/diagnostics"} <= topics & shown
        assert {f"/{who}/{TOPICS[output]}" for who in ("driver", "guard")} <= topics & shown, output


def test_every_panel_is_configured_and_shown_once() -> None:
    content = json.loads(LAYOUT.read_text())
    configured = content["configById"]
    tabs = [tab["layout"] for panel in configured.values() for tab in panel.get("tabs", ())]
    placed = [panel for part in (content["layout"], *tabs) for panel in panels(part)]
    assert sorted(placed) == sorted(configured)
    assert {"globalVariables", "userNodes", "playbackConfig"} <= set(content)
