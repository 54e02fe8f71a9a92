# SPDX-License-Identifier: Apache-2.0
"""The live view writes what a policy sees, is told and does; and says what it needs."""

import sys
from pathlib import Path

import pytest
from rclpy.parameter import Parameter
from support.ros import rgb_image, robot

from specvla_ros.errors import UserError
from specvla_ros.ros.live_view import LiveView, LiveViewParameters, Recording


def test_it_needs_somewhere_to_show_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set 'out' to a file such as run.rrd"):
        LiveViewParameters().check()
    with pytest.raises(UserError, match="does not exist; make it first"):
        LiveViewParameters(out=str(tmp_path / "no" / "run.rrd")).check()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(UserError, match=r"pip install -r requirements/rerun.txt"):
        Recording(LiveViewParameters(out=str(tmp_path / "run.rrd")))


def test_a_running_policy_is_written_to_a_file(checkpoint: Path, tmp_path: Path) -> None:
    chunks = pytest.importorskip("rerun.chunk", reason="pip install -r requirements/rerun.txt")
    out = tmp_path / "run.rrd"
    with robot(checkpoint, instruction="put carrot on plate") as r:
        view = LiveView(parameter_overrides=[Parameter("out", value=str(out))])
        logged: dict[str, int] = {}
        stream = view._recording._stream
        log = stream.log

        def note(path: str, *shown: object) -> None:
            logged[path] = logged.get(path, 0) + 1
            log(path, *shown)

        stream.log = note
        r.executor.add_node(view)
        r.start()
        r.until(lambda: r.images.get_subscription_count() == 2 and view.count_publishers("policy/action"))
        for seed in range(3):
            r.act(rgb_image(r.now_ns(), seed=seed))
        r.images.publish(rgb_image(r.now_ns(), encoding="hsv12"))  # refused here too, and no end of it
        r.until(lambda: logged.get("decoding/tau") == 3 and logged.get("camera", 0) >= 1)
        assert view.close()
        view.destroy_node()
    assert logged["instruction"] == 1 and logged["action/x"] == logged["latency/latency_s"] == 3
    with_paths = {str(chunk.entity_path) for chunk in chunks.RrdReader(str(out)).stream()}
    assert {"/camera", "/instruction", "/action/x", "/latency/latency_s", "/decoding/tau"} <= with_paths
