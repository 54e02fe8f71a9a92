# SPDX-License-Identifier: Apache-2.0
"""A few runs of the fault suite: what is promised holds, and its judge sees what would break it."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faults.faults import MODES, _require_young_actions, plan, summary
from faults.judge import Judge
from faults.kinds import FAULTS, NONE
from faults.runs import Job, run_fault
from faults.timing import Timing
from support.fault_scene import BASE_FRAME, Scene, Setup
from support.limited_arm import LimitedPose
from support.nightly import nightly_but

from benchmarks.results_page import SAFETY, safety_page
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.control.pose import Pose
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.commanded_arm import COMMANDS
from specvla_ros.lab.simulation.motion_record import (
    TOUCHES_ITSELF,
    TOUCHES_THING,
    MotionRecord,
    read_motion_record,
)

pytestmark = pytest.mark.fault

PICTURED_S = tuple((0.2 * np.arange(40)).tolist())
TIMING = Timing("spec", PICTURED_S, tuple(time_s + 0.3 for time_s in PICTURED_S), 8.0)


def run(fault: str, output: str, *, guarded: bool = True, seed: int = 1, **changes):
    job = Job(fault, "spec", output, "table", 0.25, seed, guarded)
    return run_fault(job, TIMING, replace(FAULTS[fault], **changes))


@pytest.mark.parametrize(
    "output", nightly_but(lambda output: output in ("pose", "velocity_array", "joint_trajectory_chunk"), COMMANDS)
)
def test_a_driver_that_is_killed_stops_the_arm_in_time_and_within_limits(output):
    found = run("kill driver", output)
    assert found["promised"] and not found["late"]
    assert not found["beyond"]
    assert found["stop"] is None or 0 < found["stop"]["time_s"] < 0.2, "None: it stood before the guard knew"
    assert found["causes"]["driver_silent"] >= 1
    assert found["recovered_s"] is not None, "started again, it goes on"


def test_a_leap_gets_to_the_arm_without_the_guard_alone():
    assert "speed" in run("commands that leap", "pose", guarded=False)["beyond"]
    found = run("commands that leap", "pose")
    assert not found["beyond"] and not found["late"]
    assert found["left"], "the guard let nothing more through"


def test_a_stop_that_does_not_come_is_late():
    found = run(NONE.name, "pose", noticed=FAULTS["press stop"].noticed)
    assert found["promised"] and found["late"]


def test_the_judge_holds_the_arm_to_the_limits(tmp_path: Path):
    scene = Scene(Setup("table", "twist", 0.25, TIMING, 1), tmp_path / "record")
    scene.time.run_until(4.0)
    scene.close()
    record, settings = read_motion_record(tmp_path / "record"), scene.settings
    assert not Judge(record, settings).extremes().beyond
    tighter = replace(settings.limits, linear_speed=settings.limits.linear_speed / 3)
    assert Judge(record, replace(settings, limits=tighter)).extremes().beyond == ["speed"]
    for touching, excused in ((TOUCHES_ITSELF, False), (TOUCHES_THING, True)):  # closed fingers touch one another
        rows = record.rows.copy()
        rows["touching"], rows["contact_force"] = touching, 5.0
        found = Judge(MotionRecord(record.arm, rows), replace(settings, limits=tighter)).extremes()
        assert found.beyond == ["speed"] and found.in_contact == excused
    x, y, z = settings.limits.workspace_min
    smaller = replace(settings.limits, workspace_min=(x, y, z + 0.3))
    assert Judge(record, replace(settings, limits=smaller)).extremes().beyond == ["workspace"]


@pytest.mark.parametrize(("touched_row", "excused"), [(39, True), (60, False)])
def test_an_arm_is_thrown_by_what_it_touched_before_and_not_after(twists, touched_row, excused):
    record, settings = twists
    rows = record.rows.copy()
    rows["velocity"], rows["touching"] = 0.0, 0
    rows["velocity"][40:90, 0] = 2 * settings.limits.linear_speed
    rows["touching"][touched_row] = TOUCHES_THING
    found = Judge(MotionRecord(record.arm, rows), settings).extremes()
    assert "speed" in found.beyond and found.in_contact is excused


@pytest.fixture
def twists(tmp_path: Path) -> tuple[MotionRecord, GuardSettings]:
    """A second of a task by twists, and its settings."""
    scene = Scene(Setup("table", "twist", 0.25, TIMING, 1, limited=True), tmp_path / "record")
    scene.time.run_until(1.0)
    scene.close()
    return read_motion_record(tmp_path / "record"), scene.settings


@pytest.mark.parametrize(
    ("touching", "rows", "moves"), [(0, 1, True), (TOUCHES_THING, 1, False), (TOUCHES_THING, 20, True)]
)
def test_a_standing_tool_that_something_shakes_does_not_move(twists, touching, rows, moves):
    record, settings = twists
    seen = record.rows.copy()
    seen["velocity"], seen["touching"] = 0.0, touching
    seen["velocity"][40 : 40 + rows, 0] = 0.02
    assert Judge(MotionRecord(record.arm, seen), settings).moved_between(0.2, 0.9) is moves


def test_a_limited_arm_whose_joint_cannot_follow_halts_until_it_is_sent_to_where_it_stands(tmp_path: Path):
    """Else its joints lag, and it makes up for that at any speed of the tool."""
    scene = Scene(Setup("panda", "pose", 0.25, TIMING, 1, limited=True), tmp_path / "record")
    arm = scene._commanded
    assert isinstance(arm.controller, LimitedPose)
    speed = arm._servo._speed.copy()
    arm._servo._speed[0] = 0.0
    start = scene.world.tool()
    far = replace(start, position=start.position + np.array([0.0, 0.2, 0.0]))

    def sent_to(pose: Pose, steps: int) -> np.ndarray:
        for _ in range(steps):
            arm.controller.take((BASE_FRAME, pose), scene._now_s)
            arm.advance(scene._now_s)
        return scene.world.tool().position

    halted_at = sent_to(far, 100)
    assert arm.controller.halted and np.linalg.norm(sent_to(far, 100) - halted_at) < 1e-3
    here = scene.world.tool()
    arm._servo._speed[:] = speed
    sent_to(here, 30)
    near = replace(here, position=here.position + np.array([0.0, 0.003, 0.0]))
    assert np.linalg.norm(sent_to(near, 100) - near.position) < 5e-4
    scene.close()


@pytest.mark.parametrize("fault", ["late guard", "busy machine"])
def test_who_runs_late_makes_no_arm_leap(fault):
    found = run(fault, "pose")
    assert not found["beyond"] and found["recovered_s"] is not None


def test_what_an_arm_does_without_the_fault_too_is_not_caused_by_it():
    job = Job("commands that leap", "spec", "pose", "table", 0.25, 1, guarded=False)
    assert "speed" in run_fault(job, TIMING, paired=True)["caused"]
    same = run_fault(job, TIMING, NONE, paired=True)
    assert same["caused"] == []


@pytest.mark.parametrize(("latency_s", "moves"), [(0.9, True), (1.1, False)])
def test_a_mode_whose_actions_are_too_old_for_the_driver_is_no_evidence(latency_s, moves):
    timings = {"slow": Timing("slow", (0.0, 1.0), (latency_s, 1.0 + latency_s), 2.0)}
    with nullcontext() if moves else pytest.raises(UserError, match="slow answers after more than 1 s"):
        _require_young_actions("orin", timings)


def test_the_plan_has_each_fault_in_each_mode_by_each_output():
    names = {"faults": list(FAULTS), "modes": list(MODES), "outputs": list(COMMANDS), "robots": ["table", "panda"]}
    jobs = list(plan(2000, 10, 0, names=names, speeds=[0.25, 0.1]))
    kinds = {(job.fault, job.mode, job.output) for job in jobs if job.guarded}
    of_joints = sum(fault.of_joints for fault in FAULTS.values())
    assert len(kinds) == (len(FAULTS) - of_joints) * 24 + of_joints * 16
    assert sum(not job.guarded for job in jobs) == 10
    assert len({job.key for job in jobs}) == len(jobs)


def test_what_is_counted_is_what_was_found():
    right, wrong = run("press stop", "twist"), run(NONE.name, "twist", noticed=FAULTS["press stop"].noticed)
    counted = summary([right, wrong | {"beyond": ["speed"]}])
    assert (counted["runs"], counted["promised"], counted["late"], counted["beyond"]) == (2, 2, 1, 1)
    (pressed,) = [row for row in counted["faults"] if row["fault"] == "press stop"]
    assert pressed["late"] == 0 and pressed["cleared"] == 1
    assert pressed["time_s_max"] == right["stop"]["time_s"]
    braked = right | {"beyond": ["acceleration"], "caused": ["acceleration"]}
    assert (summary([braked])["own_halts"], summary([braked])["caused"]) == (0, 1)
    for own in ({"fault": "lose guard/command"}, {"halted": True}):
        assert (summary([braked | own])["own_halts"], summary([braked | own])["caused"]) == (1, 0)
    assert summary([right | {"halted": True}])["own_halts"] == 0


def test_the_page_on_safety_has_the_figures_of_the_result():
    assert SAFETY.read_text(encoding="utf-8") == safety_page(), "run python -m benchmarks.results_page"
