# SPDX-License-Identifier: Apache-2.0
"""The record of what the arm did: true, complete as far as it goes, and refused where it is none."""

from contextlib import closing

import numpy as np
import pytest
from faults.judge import acceleration

from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.commanded_arm import CommandedArm
from specvla_ros.lab.simulation.motion_record import (
    TOUCHES_TABLE,
    TOUCHES_THING,
    MotionRecorder,
    read_motion_record,
)
from specvla_ros.lab.simulation.tasks import draw_layout
from specvla_ros.lab.simulation.world import World


@pytest.fixture(scope="module")
def world():
    return World()


def record(world: World, path, rows: int, velocity: float = 0.1) -> list[np.ndarray]:
    """Records a joint that turns; returns the tool's positions."""
    arm = CommandedArm(world, "position_array")
    world.reset(draw_layout(0))
    arm.reset()
    start = world.joint_state()[0][:7]
    positions = []
    with closing(MotionRecorder(path, world)) as recorder:
        for row in range(rows):
            arm.controller.take(start + np.eye(7)[0] * velocity * 0.01 * (row + 1), 1.0)
            arm.advance(1.0)
            recorder.add(1.0 + 0.01 * (row + 1), episode=row // 200, running=row % 200 > 10)
            positions.append(world.tool().position)
    return positions


def test_rows_say_what_the_world_did(world, tmp_path):
    positions = record(world, tmp_path / "motion", 250)
    read = read_motion_record(tmp_path / "motion")
    assert read.arm is world.arm and len(read.rows) == 250
    np.testing.assert_array_equal(read.rows["position"], positions)
    np.testing.assert_allclose(np.diff(read.rows["time_s"]), 0.01)
    assert read.rows["episode"].tolist() == [row // 200 for row in range(250)]
    settled = read.rows[100:200]
    measured = np.gradient(settled["position"], 0.01, axis=0)[1:-1]
    np.testing.assert_allclose(settled["velocity"][1:-1, :3], measured, atol=2e-3)
    assert settled["velocity"][:, 5] == pytest.approx(0.1, abs=0.01), "the joint turns the tool about z"
    assert settled["joint_velocity"][:, 0] == pytest.approx(0.1, abs=0.01)
    np.testing.assert_allclose(np.linalg.norm(settled["quaternion"], axis=1), 1.0)
    assert not settled["touching"].any() and (settled["opening"] > 0.075).all()


def test_acceleration_is_that_of_the_velocity_and_none_across_a_reset(world, tmp_path):
    record(world, tmp_path / "motion", 250)
    read = read_motion_record(tmp_path / "motion")
    found = acceleration(read.rows)
    assert np.isnan(found[[0, 200]]).all() and np.isfinite(np.delete(found, [0, 200], axis=0)).all()
    gained = np.nansum(found[:200] * 0.01, axis=0)
    np.testing.assert_allclose(gained, read.rows["velocity"][199] - read.rows["velocity"][0], atol=1e-9)


def test_what_the_arm_touches_is_told(world, tmp_path):
    arm = CommandedArm(world, "position_array")
    world.reset(draw_layout(0))
    arm.reset()
    down = world.joint_state()[0][:7] + np.array([0, 0.6, 0, 0, 0, 0, 0])  # the arm bends into the table
    arm.controller.take(down, 1.0)
    with closing(MotionRecorder(tmp_path / "motion", world)) as recorder:
        for row in range(120):
            arm.advance(1.0)
            recorder.add(1.0 + 0.01 * row, 0, True)
    rows = read_motion_record(tmp_path / "motion").rows
    touching = int(np.bitwise_or.reduce(rows["touching"]))
    assert touching & TOUCHES_TABLE and not rows["touching"][0]
    assert (rows["contact_force"][rows["touching"] == 0] == 0.0).all()
    assert rows["contact_force"].max() > 20.0
    assert touching in (TOUCHES_TABLE, TOUCHES_TABLE | TOUCHES_THING)


def test_a_record_whose_writer_was_killed_reads_up_to_its_last_whole_row(world, tmp_path):
    record(world, tmp_path / "motion", 150)
    content = (tmp_path / "motion").read_bytes()
    (tmp_path / "cut").write_bytes(content[:-7])
    whole, cut = (read_motion_record(tmp_path / name).rows for name in ("motion", "cut"))
    assert len(cut) == len(whole) - 1 and (cut == whole[:-1]).all()


def test_what_is_written_is_there_before_the_recorder_is_closed(world, tmp_path):
    world.reset(draw_layout(0))
    recorder = MotionRecorder(tmp_path / "motion", world)
    for row in range(205):
        recorder.add(0.01 * row, 0, True)
    assert len(read_motion_record(tmp_path / "motion").rows) >= 200
    recorder.close()
    recorder.close()
    assert len(read_motion_record(tmp_path / "motion").rows) == 205


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"format": "another", "robot": "table"}\n']
)
def test_another_file_is_no_record(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="is not a record"):
        read_motion_record(tmp_path / "file")


def test_a_place_that_cannot_be_written_is_told(world, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        MotionRecorder(tmp_path / "file" / "motion", world)
    with pytest.raises(UserError, match="cannot be read"):
        read_motion_record(tmp_path / "nothing")
