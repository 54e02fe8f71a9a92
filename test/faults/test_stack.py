# SPDX-License-Identifier: Apache-2.0
"""The faults of the running stack: what is planned and counted, what a fault does to messages, and one round of it."""

import importlib.util
from collections import Counter
from dataclasses import asdict
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from faults.judge import Extremes
from faults.processes import _by_itself, _latched_by_itself
from faults.real_kinds import REAL_FAULTS, Hands
from faults.robot_process import CLOCKS, EPOCH_NS, LIES, PROTECTIVE_STOP, STUCK, FaultyRobot
from faults.stack import _PER_STACK, _do_missing, plan, stacks, summary
from geometry_msgs.msg import PoseStamped
from sensor_msgs.msg import JointState
from std_msgs.msg import String
from support.benchmark_runs import run

from benchmarks.results_page import section
from specvla_ros.lab.simulation.commanded_arm import COMMANDS
from specvla_ros.msg import VlaAction

pytestmark = pytest.mark.fault

FOUND = {
    "fault": "press stop",
    "output": "pose",
    "robot": "panda",
    "seed": 1,
    "load": 2.0,
    "stays": False,
    "beyond": [],
    "in_contact": False,
    "own_halt": False,
    "arm_stops": 0,
    "promised": True,
    "late": False,
    "self_latched": [],
    "latched_in_contact": [],
    "recovered_s": 1.0,
    "cleared": True,
    "stop": {"time_s": 0.1, "distance_m": 0.01, "speed_m_s": 0.2},
    "speed_share": 0.8,
    "acceleration_share": 1.0,
}


def test_each_fault_meets_each_output_of_each_robot():
    jobs = plan(13 * len(REAL_FAULTS), 0, list(REAL_FAULTS), list(COMMANDS), ["panda", "ur5e"])
    met = Counter((job.fault, job.output, job.robot) for job in jobs)
    of_joints = sum(fault.of_joints for fault in REAL_FAULTS.values())
    assert len(met) == 12 * (len(REAL_FAULTS) - of_joints) + 8 * of_joints
    assert len({job.key for job in jobs}) == len(jobs) == 13 * len(REAL_FAULTS)


def test_the_first_rounds_of_a_longer_run_are_those_of_a_shorter_one():
    names = list(REAL_FAULTS), list(COMMANDS), ["panda", "ur5e"]
    assert plan(200, 3, *names)[:50] == plan(50, 3, *names)


def test_a_stack_takes_rounds_that_fit_each_other():
    jobs = plan(200, 0, list(REAL_FAULTS), list(COMMANDS), ["panda", "ur5e"])
    found = stacks(jobs)
    assert sorted(job.seed for stack in found for job in stack) == [job.seed for job in jobs]
    assert max(map(len, found)) <= _PER_STACK + 1 and len(found) < len(jobs) / 3
    for stack in found:
        faults = [REAL_FAULTS[job.fault] for job in stack]
        assert len({(job.robot, job.output) for job in stack}) == 1
        assert len({(fault.on_clock, fault.fills_disk) for fault in faults}) == 1
        assert not any(fault.stays for fault in faults[:-1])


def test_a_run_that_was_cut_off_does_what_is_missing(tmp_path, monkeypatch: pytest.MonkeyPatch):
    jobs, done = plan(3, 0, ["none"], ["pose"], ["panda"]), []

    def real_rounds(jobs):
        rows = []
        for job in jobs:
            done.append(job)
            row = FOUND | asdict(job)
            rows.append(row | {"problem": "the arm did not move"} if job.seed == 1 and len(done) < 3 else row)
        return rows

    monkeypatch.setattr("faults.stack.real_rounds", real_rounds)
    path = tmp_path / "rounds.jsonl"
    _do_missing(jobs[:2], path, 0)
    with path.open("a") as lines:
        lines.write('{"fault": "none", "outp')
    rows = _do_missing(jobs, path, 0)
    assert [job.seed for job in done] == [0, 1, 1, 2]
    assert [row["seed"] for row in rows] == [0, 1, 2] and not any("problem" in row for row in rows)


def test_what_is_counted_is_what_was_found():
    wrong = FOUND | {"beyond": ["speed"], "late": True, "self_latched": ["over_speed"], "output": "twist"}
    lost = {"fault": "none", "output": "pose", "robot": "panda", "seed": 2, "problem": "the arm never moved"}
    killed = FOUND | {"fault": "kill guard", "stays": True, "recovered_s": None, "stop": None, "cleared": False}
    found = summary([FOUND, wrong, killed, lost])
    assert [found[name] for name in ("rounds", "ran", "beyond", "late", "promised", "self_latched")] == [
        4,
        3,
        1,
        1,
        3,
        1,
    ]
    assert (found["goes_on"], found["could_go_on"], found["cleared"]) == (2, 2, 2)
    assert {(way["robot"], way["output"]): way["ran"] for way in found["ways"]} == {
        ("panda", "pose"): 2,
        ("panda", "twist"): 1,
    }
    assert len(found["not_run"]) == 1
    head = {"benchmark": "stack", "command": "", "date": "", "hardware": "", "speed_m_s": 0.25}
    assert "| press stop | 2 | 1 | 1 of 2 | 1 |" in section(head | found)


@pytest.mark.parametrize(
    "fault, output, since_s, until_s, own",
    [
        ("stuck", "twist", 12.0, 12.3, True),  # let go at 12 s: the arm makes up for what Servo was sent
        ("stuck", "twist", 11.0, 11.3, False),
        ("stuck", "twist", 13.0, 13.3, False),
        ("stuck", "pose", 12.0, 12.3, False),
        ("press stop", "twist", 12.0, 12.3, False),
    ],
)
def test_only_an_arm_that_servo_sent_on_while_it_was_held_leaps_by_itself(fault, output, since_s, until_s, own):
    fast, slow = Extremes(2.0, 5.0, 0.0, 2.0, 2.0, 0.0), Extremes(0.5, 1.0, 0.0, 0.5, 0.5, 0.0)
    judge = SimpleNamespace(extremes=lambda begin_s, end_s: fast if begin_s < until_s and since_s < end_s else slow)
    seen = SimpleNamespace(fault=REAL_FAULTS[fault], halts_s=[], moved_s=5.0, ended_s=12.0, over_s=20.0)
    assert _by_itself(judge, fast, seen, output) is own  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fault, output, own",
    [
        ("late guard", "position_array", True),
        ("late guard", "twist", False),
        ("late guard", "joint_trajectory", False),
        ("freeze guard", "twist", True),
        ("press stop", "position_array", False),
    ],
)
def test_an_arm_that_hears_nothing_halts_by_itself(fault, output, own):
    sharp = Extremes(0.7, 4.3, 0.0, 0.7, 0.7, 0.0)
    seen = SimpleNamespace(fault=REAL_FAULTS[fault], halts_s=[])
    assert _by_itself(None, sharp, seen, output) is own  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "halts_s, at_s, by_itself",
    [([], 5.0, True), ([4.9], 5.0, False), ([2.0], 5.0, True), ([5.1], 5.0, True), ([], 11.0, False)],
)
def test_a_guard_that_latches_since_the_arm_stopped_does_not_latch_by_itself(halts_s, at_s, by_itself):
    """The last row is the fault itself, which begins at 10 s."""
    seen = SimpleNamespace(fault=REAL_FAULTS["protective stop"], halts_s=halts_s, began_s=10.0)
    found = _latched_by_itself(seen, [(at_s, "robot_stopped")])  # type: ignore[arg-type]
    assert found == ([(at_s, "robot_stopped")] if by_itself else [])


def test_an_arm_that_brakes_since_it_presses_brakes_harder_than_the_limits():
    sharp = Extremes(0.7, 4.3, 0.0, 0.7, 0.7, 0.0)
    seen = SimpleNamespace(fault=REAL_FAULTS["press stop"], halts_s=[5.0])
    assert _by_itself(None, sharp, seen, "pose") is True  # type: ignore[arg-type]
    fast_in_contact = Extremes(2.9, 4.3, 0.0, 2.9, 0.7, 0.0)
    assert _by_itself(None, fast_in_contact, seen, "pose") is True  # type: ignore[arg-type]
    fast_in_the_air = Extremes(2.9, 4.3, 0.0, 2.9, 2.9, 0.0)
    assert _by_itself(None, fast_in_the_air, seen, "pose") is False  # type: ignore[arg-type]


def test_no_clock_goes_back_before_its_beginning():
    assert min(jump_s for _, jump_s in CLOCKS.values()) < 0
    assert all(EPOCH_NS + jump_s * 1e9 > 0 for _, jump_s in CLOCKS.values())


class _Held:
    held = False

    def hold(self, position=None) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def start(self, measured) -> None: ...


@pytest.mark.parametrize("fault", [PROTECTIVE_STOP, STUCK])
def test_a_fault_that_begins_while_the_arm_rests_by_itself_outlasts_that_rest(fault):
    told = []
    robot: Any = FaultyRobot.__new__(FaultyRobot)
    robot._said, robot._fault, robot._control_dt = {}, "", 0.002
    robot._now_ns, robot._arm_s, robot._stopped_at_s = 0, 5.0, 4.9
    robot._brake, robot._running = _Held(), SimpleNamespace(publish=lambda message: told.append(message.data))
    robot._tell, robot._measured = lambda: None, lambda: None
    robot._brake.hold()
    robot._on_fault(String(data=fault))
    assert robot._brake.held and told == []
    robot._arm_s = 7.0
    robot._stop_by_itself()
    assert robot._brake.held and told == [fault != PROTECTIVE_STOP]
    robot._on_fault(String(data=""))
    assert not robot._brake.held and told[-1] is True


@pytest.mark.parametrize("name", LIES)
def test_a_lie_changes_what_is_said_and_nothing_else(name: str):
    topic, change = LIES[name]
    message = (
        PoseStamped() if topic == "tool_pose" else JointState(name=["a", "b"], position=[1.0, 2.0], velocity=[0.0, 0.0])
    )
    message.header.stamp.sec = 7
    said = change(message)
    if name.endswith("silent"):
        assert said is None
    elif name.endswith("order"):
        assert dict(zip(said.name, said.position, strict=True)) == {"a": 1.0, "b": 2.0} and list(said.name) == [
            "b",
            "a",
        ]
    elif name.endswith("old"):
        assert said.header.stamp.sec == 6
    else:
        assert said is message


class _Way:
    """What a fault of actions changes."""

    def __init__(self) -> None:
        self.alter = lambda message: [message]


@pytest.mark.parametrize("name", [name for name in REAL_FAULTS if name.startswith("actions")])
def test_bad_actions_leave_the_policys_own_alone(name: str):
    hands = Hands(_Way(), lambda who, number: None, Random(0))  # type: ignore[arg-type]
    values = [0.01, 0.02, 0.03, 0.1, 0.2, 0.3, 1.0]
    right = VlaAction(values=values, horizon=1)
    right.header.stamp.sec, right.header.frame_id = 10, "base_link"
    fault = REAL_FAULTS[name]
    fault.begin(hands)
    changed = [hands.watch.alter(right) for _ in range(20)]
    fault.end(hands)
    assert list(right.values) == values and right.header.stamp.sec == 10
    assert any(len(each) != 1 or each[0] != right for each in changed)
    assert hands.watch.alter(right) == [right]


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("robosuite") is None, reason="the arms' models are not installed")
def test_a_round_of_the_stack(tmp_path):
    options = [
        "--rounds",
        1,
        "--fault",
        "press stop",
        "--robot",
        "panda",
        "--output",
        "pose",
        "--work",
        tmp_path / "work",
    ]
    result = run("faults.stack", tmp_path / "out.json", *options)
    assert (result["ran"], result["beyond"], result["late"], result["self_latched"]) == (1, 0, 0, 0)
    assert result["cleared"] == 1
