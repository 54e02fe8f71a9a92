# SPDX-License-Identifier: Apache-2.0
"""Stopping times and ways from the guard's black box, held against an arm whose braking is known."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.writer import Writer
from typer.testing import CliRunner

from specvla_ros.control.guard.guard import State
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.reader import open_storage
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.evaluation.stops import (
    BlackBoxFile,
    NotMeasuredError,
    Stop,
    Stops,
    find_black_boxes,
    measure_stops,
)
from specvla_ros.lab.evaluation.stops_page import linear_speed, tabulate

pytest.importorskip("rclpy")
from std_msgs.msg import Empty
from support.guard_scene import TOPICS, scene
from support.guarding import HOME
from support.nightly import nightly_but
from support.stopping_arm import BRAKES_M_S2, StoppingArm

LIMIT_M_S = 0.25
NEAR_S, NEAR_M = 0.016, 0.0015  # a period of the poses, and what half of a window blurs


def release(arm: StoppingArm) -> None:
    arm.held = False


def fall_silent(who: str) -> Callable[[StoppingArm], None]:
    return lambda arm: arm.silent.add(who)


def say_nan(arm: StoppingArm) -> None:
    arm.command(float("nan"))
    arm.silent.add("command")


def stop(arm: StoppingArm, how: Callable[[StoppingArm], None]) -> None:
    """Stops an arm at full speed."""
    arm.until_at_speed()
    how(arm)
    arm.run(2.0)
    arm.close()


@pytest.fixture
def arm_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StoppingArm]:
    def make(speed: float, folder: str = "box", **changes: Any) -> StoppingArm:
        return StoppingArm(tmp_path / folder, speed, **changes).open(monkeypatch)

    return make


# Each cause, what brings it about, and how long after its message, or the last one before silence, the guard brakes.
CAUSES = [
    ("stop", StoppingArm.press_stop, "the message on ~/stop", 0.0),
    ("not_enabled", release, "~/enable with false, or the last one with true", 0.0),
    ("not_enabled", fall_silent("enable"), "~/enable with false, or the last one with true", 0.51),
    ("driver_silent", fall_silent("command"), "the last new command", 0.11),
    ("policy_silent", fall_silent("action"), "the last new action", 1.01),
    ("not_finite", say_nan, "the refused command", 0.0),
]


@pytest.mark.parametrize(("cause", "how", "judged_by", "noticed_s"), CAUSES)
def test_time_and_way_are_those_of_the_arm(
    arm_at: Callable[..., StoppingArm], cause: str, how: Any, judged_by: str, noticed_s: float
) -> None:
    speed = 0.2
    arm = arm_at(speed)
    stop(arm, how)
    (found,) = measure_stops(find_black_boxes([str(arm.directory)])).measured
    assert (found.output, found.cause, found.time_zero) == ("twist", cause, judged_by)
    braking_s = (speed - 0.01) / BRAKES_M_S2  # until it is slower than 10 mm/s
    assert found.time_s == pytest.approx(noticed_s + braking_s, abs=NEAR_S)
    assert found.braking_s == pytest.approx(braking_s, abs=NEAR_S)
    assert found.way_m == pytest.approx(speed * noticed_s + speed**2 / (2 * BRAKES_M_S2), abs=NEAR_M)
    assert found.speed_m_s == pytest.approx(speed, rel=0.01)


def test_noise_of_the_measurement_adds_little(arm_at: Callable[..., StoppingArm]) -> None:
    arm = arm_at(0.2, noise_m=5e-5)
    stop(arm, StoppingArm.press_stop)
    (found,) = measure_stops(find_black_boxes([str(arm.directory)])).measured
    assert found.way_m == pytest.approx(0.2**2 / (2 * BRAKES_M_S2), abs=NEAR_M)
    assert found.time_s == pytest.approx(0.19, abs=0.03)


def test_files_without_a_stop_are_named_with_the_reason(tmp_path: Path, arm_at: Callable[..., StoppingArm]) -> None:
    def leap(arm: StoppingArm) -> None:
        arm.position[1] -= 0.2

    def miss_poses(arm: StoppingArm) -> None:
        arm.silent.add("tool")
        arm.run(0.5)
        arm.silent.clear()

    scenes: dict[str, tuple[float, Callable[[StoppingArm], None], float]] = {
        "blind": (0.2, miss_poses, 1.0),
        "cut": (0.2, StoppingArm.press_stop, 0.1),
        "leapt": (0.2, leap, 1.0),
        "stood": (0.0, StoppingArm.press_stop, 1.0),
    }
    for name, (speed, how, aftermath_s) in scenes.items():
        arm = arm_at(speed, name)
        arm.run(1.0)
        arm.until_at_speed()
        how(arm)
        arm.run(aftermath_s)
        arm.close()
    (tmp_path / "text.mcap").write_text("no recording")
    with (tmp_path / "void.mcap").open("wb") as file:
        writer = Writer(file)
        writer.start()
        writer.finish()
    found = measure_stops(find_black_boxes([str(tmp_path)]))
    assert not found.measured
    assert [each.why.partition(" 0.5")[0] for each in found.left_out[:4]] == [
        "no measured pose for",
        "the file ends before the tool stands still",
        "the measured pose jumped: the tool's motion is unknown",
        "the tool was at rest before the stop",
    ]
    assert "is neither MCAP nor sqlite3" in found.left_out[4].why
    assert found.left_out[5].why == "it names no cause: not written by the guard's black box"
    done = CliRunner().invoke(app, ["robot", "stops", str(tmp_path)])
    assert done.exit_code == 1
    assert "0 stops measured, 6 files skipped" in done.stdout and "void.mcap" in done.stdout


def test_nothing_is_written_beside_a_recording(tmp_path: Path) -> None:
    file = tmp_path / "recording#1.db3"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE topics (id INTEGER)")
        connection.commit()
        before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
        assert before[f"{file.name}-wal"], "its recorder was killed"
        (left_out,) = measure_stops([file]).left_out
        assert str(file) in left_out.why and "same file" not in left_out.why
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def stop_of(**changes: Any) -> Stop:
    usual: dict[str, Any] = {"file": "a.mcap", "output": "twist", "cause": "stop", "time_zero": "", "reach_m": 0.9}
    return Stop(**{**usual, "speed_m_s": 0.25, "time_s": 0.2, "braking_s": 0.2, "way_m": 0.03, **changes})


def test_rows_are_the_nearest_share_of_speed_and_the_third_of_the_reach() -> None:
    measured = (
        stop_of(speed_m_s=0.24, time_s=0.2, way_m=0.02),
        stop_of(speed_m_s=0.26, time_s=0.3, way_m=0.04),
        stop_of(speed_m_s=0.25, time_s=0.7, way_m=0.03),
        stop_of(speed_m_s=0.1, reach_m=0.3),
        stop_of(speed_m_s=0.15, reach_m=0.5),
    )
    table = tabulate(Stops(measured, (), 0.9), LIMIT_M_S)
    assert [(row.speed_percent, row.reach_percent, row.n) for row in table.rows] == [
        (33, 66, 1),
        (66, 66, 1),
        (100, 100, 3),
    ]
    assert table.rows[-1].cells == ("twist", "stop", "100", "100", "3", "0.300", "0.700", "30.0", "40.0")
    assert "100 % speed: 0.25 m/s, limits.linear_speed" in table.caption
    unknown = tabulate(Stops(measured, (), 0.9), None)
    assert "0.26 m/s, the fastest of these stops, since no --robot gives the limit" in unknown.caption


def test_the_command_tabulates_files_folders_and_globs_and_writes_a_report(
    tmp_path: Path, arm_at: Callable[..., StoppingArm]
) -> None:
    for folder, speed, start in (("slow", 0.08, (0.5, -0.3, 0.3)), ("fast", 0.24, (0.25, -0.3, 0.1))):
        stop(arm_at(speed, folder, start=start), StoppingArm.press_stop)
    (tmp_path / "robot.yaml").write_text("/**: {ros__parameters: {limits: {linear_speed: 0.25}}}")
    slow, out = next((tmp_path / "slow").iterdir()), tmp_path / "out"
    given = [str(slow), str(tmp_path / "fas*" / "*.mcap"), str(tmp_path / "slow")]
    command = ["robot", "stops", *given, "--robot", str(tmp_path / "robot.yaml"), "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "2 stops measured, 0 files skipped" in done.stdout
    found = json.loads((out / "stops.json").read_text())
    shares = {(row["speed_percent"], row["reach_percent"], row["n"]) for row in found["rows"]}
    assert shares == {(33, 100, 1), (100, 66, 1)}
    (fast,) = (row for row in found["rows"] if row["speed_percent"] == 100)
    assert fast["way_worst_mm"] == pytest.approx(0.24**2 / 2 * 1e3, abs=NEAR_M * 1e3)
    assert {each["file"] for each in found["measured"]} >= {str(slow)}
    report = (out / "report.html").read_text()
    assert "distance, mm" in report and "the message on ~/stop" in report and "ISO 10218-1" in report
    assert CliRunner().invoke(app, command).exit_code == 0, "again, in its own directory"


def test_what_leads_nowhere_and_limits_without_a_speed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \.mcap file matches .*none\*/; give files of the guard's black box"):
        find_black_boxes([f"{tmp_path}/none*/"])
    (tmp_path / "robot.yaml").write_text("/**: {ros__parameters: {output: pose}}")
    with pytest.raises(UserError, match=r"robot\.yaml: limits\.linear_speed is missing"):
        linear_speed(tmp_path / "robot.yaml")


@pytest.mark.parametrize("output", nightly_but(lambda output: output in ("twist", "pose"), TOPICS))
def test_the_topics_of_a_real_guard_are_told_apart(output: str, tmp_path: Path) -> None:
    """Of poses there are three topics: the commands, a second source's, and the tool's."""
    with scene(output, black_box_s=60.0, black_box_dir=str(tmp_path), override=output == "pose") as each:
        pose_at, gone = each.pose_at, [0.0]

        def follow(_: float) -> Any:
            gone[0] += 0.0005 if each.state is State.PASSING else 0.0
            return pose_at(gone[0])

        if output == "twist":
            each.pose_at = follow  # type: ignore[method-assign, assignment]
        each.start()
        each.until(lambda: max(each.position, gone[0]) > 0.01)
        each.stops.publish(Empty())
        each.until_stopped("stop")
        each.until(lambda: list(tmp_path.glob("*.mcap")))
    (file,) = tmp_path.glob("*.mcap")
    with closing(open_storage(file, tmp_path)) as storage:
        box = BlackBoxFile(file, storage)
        assert (box.output, box.cause) == (output, "stop")
        assert box.tool.positions[:, [0, 2]] == pytest.approx(HOME[[0, 2]] * np.ones((len(box.tool.positions), 1)))
        try:
            found = box.stop()
        except NotMeasuredError as error:  # a busy machine
            assert "no measured pose for" in str(error)
        else:
            assert found.time_zero == "the message on ~/stop" and found.time_s >= found.braking_s
