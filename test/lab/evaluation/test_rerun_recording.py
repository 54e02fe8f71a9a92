# SPDX-License-Identifier: Apache-2.0
"""What Rerun shows of a run."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specvla_ros.control.pose import Pose, rotation_matrix
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.rerun_recording import (
    ImageAge,
    PoseSpeed,
    RerunRecording,
    RerunSettings,
    action_curves,
    decoding_curves,
    require_rerun,
)

STAGES = ("receive_s", "wait_s", "vision_s", "prefill_s", "decode_s", "publish_s", "latency_s")


def action(**changes: Any) -> SimpleNamespace:
    fields = {
        "names": ["x", "y", "z", "roll", "pitch", "yaw", "gripper"],
        "values": [0.03, 0.0, -0.04, 0.0, 0.1, 0.0, 1.0] + [9.0] * 7,  # a chunk of two
        "action_dt": 0.2,
        "reference": "delta",
        "instruction": "lift the red cube",
        **{stage: 0.01 * (1 + index) for index, stage in enumerate(STAGES)},
    }
    return SimpleNamespace(**{**fields, **changes})


def test_it_needs_somewhere_to_show_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set 'out' to a file such as run.rrd"):
        RerunSettings().check()
    with pytest.raises(UserError, match="does not exist; make it first"):
        RerunSettings(out=str(tmp_path / "no" / "run.rrd")).check()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(UserError, match=r"pip install -r requirements/rerun.txt"):
        require_rerun()
    with pytest.raises(UserError, match=r"pip install -r requirements/rerun.txt"):
        RerunRecording(RerunSettings(out=str(tmp_path / "run.rrd")))


def test_an_action_is_shown_with_the_speed_it_asks_for() -> None:
    curves = action_curves(action())
    assert curves["action/x"] == 0.03
    assert curves["action/gripper"] == 1.0, "the first row of a chunk"
    assert curves["speed/linear/policy"] == pytest.approx(0.25)  # 5 cm in 0.2 s
    assert curves["speed/angular/policy"] == pytest.approx(0.5)
    assert [curves[f"latency/{stage}"] for stage in STAGES] == pytest.approx([0.01 * n for n in range(1, 8)])


def test_a_pose_is_no_speed() -> None:
    assert not any(path.startswith("speed/") for path in action_curves(action(reference="absolute")))


def test_drafted_tokens_are_counted_without_the_roots() -> None:
    stats = SimpleNamespace(
        tree_nodes=[9, 5],
        accept_lengths=[3, 1],
        tau=3.0,
        forwards=3,
        in_flight=2,
        drop_reasons=["stale", "superseded"],
        drop_counts=[0, 4],
    )
    curves = decoding_curves(stats)
    assert (curves["decoding/drafted"], curves["decoding/accepted"]) == (12.0, 4.0)
    assert curves["dropped/superseded"] == 4.0
    assert "dropped/stale" not in curves


def test_the_age_of_the_image_acted_on_grows_until_the_next_action_is_there() -> None:
    ages, second = ImageAge(), 10**9
    assert ages.add(10 * second, 0.3) == [(10 * second + 3 * second // 10, 0.3)]
    assert ages.add(10 * second, 0.5) == [], "the rest of an answer whose first actions are followed"
    (before_ns, grown_s), (at_ns, fresh_s) = ages.add(11 * second, 0.4)
    assert (at_ns, at_ns - before_ns, fresh_s) == (11 * second + 4 * second // 10, 1, 0.4)
    assert grown_s == pytest.approx(1.4)
    assert len(ages.add(5 * second, 0.1)) == 1, "a clock that went back: nothing is known of the time between"


def test_speed_of_poses_does_not_follow_the_clocks_ticks() -> None:
    """A clock of 10 ms gives neighbours the same stamp, or stamps that are twice as far apart as they were sent."""
    speed = PoseSpeed()
    random = np.random.default_rng(0)
    found = []
    for step in range(300):
        true_s = 0.01 * step + random.uniform(0.0, 0.004)
        stamp_ns = int(true_s / 0.01) * 10_000_000
        pose = Pose(np.array([0.3 * true_s, 0.0, 0.0]), rotation_matrix(np.array([0.0, 0.0, 1.2 * true_s])))
        found.append(speed.add(stamp_ns, pose))
    assert found[0] is None
    linear, angular = np.array([each for each in found if each is not None]).T
    assert len(linear) > 280
    assert np.abs(linear - 0.3).max() < 0.04
    assert np.abs(angular - 1.2).max() < 0.16


def test_speed_is_unknown_after_silence_and_after_a_clock_that_went_back() -> None:
    speed = PoseSpeed()
    here, there = (Pose(np.array([x, 0.0, 0.0]), np.eye(3)) for x in (0.0, 1.0))
    assert [speed.add(stamp * 10**7, here) for stamp in range(6)][-1] == (0.0, 0.0)
    assert speed.add(10**9, there) is None
    assert speed.add(0, here) is None


def test_a_file_holds_what_was_added(tmp_path: Path) -> None:
    chunks = pytest.importorskip("rerun.chunk", reason="pip install -r requirements/rerun.txt")
    out = tmp_path / "run.rrd"
    recording = RerunRecording(RerunSettings(out=str(out)))
    for stamp_ns in range(10**9, 4 * 10**9, 10**9):
        recording.add_image(stamp_ns, np.zeros((8, 8, 3), np.uint8))
        recording.add_action(stamp_ns, action())
        recording.add_state(stamp_ns, "state/guard", f"holding: nothing new for {stamp_ns * 1e-9:.2f} s")
    assert recording.close() == ""
    rows: dict[str, int] = {}
    for chunk in chunks.RrdReader(str(out)).stream():
        rows[str(chunk.entity_path)] = rows.get(str(chunk.entity_path), 0) + chunk.num_rows
    assert rows["/camera"] == rows["/action/x"] == rows["/speed/linear/policy"] == 3
    assert rows["/age/image_s"] == 5, "two points an action, one at the first"
    assert rows["/instruction"] == rows["/state/guard"] == 1, "what does not change is said once"
