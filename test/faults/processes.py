# SPDX-License-Identifier: Apache-2.0
"""Rounds of the fault suite with the nodes as processes over DDS: policy, driver, guard, arm, camera and operator.

Judged by the record of the simulated arm, on the arm's own time. Starting takes about 20 s, a round about 10.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import rclpy
from faults.judge import Extremes, Judge
from faults.real_kinds import REAL_FAULTS, Hands, RealFault
from faults.robot_process import IMAGE_SIZE, RESTS_S, RUNNING_TOPIC, SPEED, TIDY
from faults.watch import ACTIONS, COMMANDS, RAW_ACTION, Watch
from support.fault_scene import guard_settings

from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.files import write_parameters
from specvla_ros.lab.ros.demo.processes import LifecycleClient, NodeProcesses
from specvla_ros.lab.ros.sim_robot.outputs import IMAGE_TOPIC
from specvla_ros.lab.simulation.arm import Arm
from specvla_ros.lab.simulation.arms import choose_arm
from specvla_ros.lab.simulation.motion_record import MotionRecord, read_motion_record
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.ros.wiring import image_remappings
from specvla_ros.settings.parameter import values_of

_UP_S, _MOVES_S, _GOES_ON_S, _END_S = 120.0, 60.0, 15.0, 15.0
_BEGINS_S, _REST_S, _AFTER_S = 2.0, 1.0, 2.0
_CATCHES_UP_S = 0.5  # an arm that is let go, up to where Servo was sent meanwhile
_STATE_S = 0.15  # between two states of the guard, and a message on its way
_SMALL_DISK = "64k"


@dataclass(frozen=True)
class RealJob:
    """A round: which fault, of what, by which seed."""

    fault: str
    output: str
    robot: str
    seed: int

    @property
    def key(self) -> str:
        """Names it, for a run that goes on."""
        return " ".join(map(str, asdict(self).values()))


@dataclass(frozen=True)
class _Round:
    """What was seen of a round. Times are the arm's.

    Args:
        states: the guard's, up to the end of the round.
        halts_s: when the arm said that it stopped by itself.
        since_s: of the round; `moved_s`: since when the guard let motion through; `began_s`, `ended_s`: of the fault.
        noticed_s: from when a stop is promised, as it was when the fault ended.
        rest: goes into the result as it is.
    """

    job: RealJob
    fault: RealFault
    states: list[tuple[float, str, str]]
    halts_s: list[float]
    since_s: float
    moved_s: float
    began_s: float
    ended_s: float
    over_s: float
    noticed_s: float
    stale: bool
    rest: dict[str, Any]


def real_rounds(jobs: Sequence[RealJob]) -> list[dict[str, Any]]:
    """Starts everybody once, and for each job waits for motion, does its fault at a random moment, and judges.

    All of one robot, output and clock, and only the last may kill; where a stack does not come back to motion, the
    rounds that were left have a problem.
    """
    first = jobs[0]
    os.environ["ROS_DOMAIN_ID"] = str(60 + first.seed % 40)  # a dead participant is remembered for 20 s
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    arm, fault = choose_arm(first.robot), REAL_FAULTS[first.fault]
    settings = _settings(arm, first.output)
    found, problem = list[_Round](), ""
    with TemporaryDirectory() as name:
        folder, box = Path(name), Path(name, "black_box")
        box.mkdir()
        rclpy.init(args=[])
        watch = Watch(first.output)
        try:
            with (
                _small_disk(box) if fault.fills_disk else nullcontext(),
                NodeProcesses() as nodes,
                _players(first, fault.on_clock, folder) as players,
            ):
                _start(nodes, settings, arm, fault.on_clock, folder)
                _activate(nodes)
                if dead := [name for name, player in players.items() if player.poll() is not None]:
                    raise UserError(f"{', '.join(dead)} ended by itself")
                for job in jobs:
                    since_s = found[-1].over_s if found else 0.0
                    hands = Hands(watch, partial(_send, nodes, players), Random(job.seed))
                    found.append(_act(job, hands, settings, since_s, box))
        except UserError as error:
            problem = str(error)
        finally:
            watch.close()
            rclpy.try_shutdown()
        record = read_motion_record(folder / "record") if found else None
    rows = [asdict(each.job) | _judged(record, settings, each) for each in found if record is not None]
    return rows + [asdict(job) | {"problem": problem} for job in jobs[len(found) :]]


def _settings(arm: Arm, output: str) -> GuardSettings:
    """Those of the suite in virtual time, in what this arm reaches; and the arm says whether it runs."""
    settings = guard_settings(arm, output, SPEED)
    low, high = settings.limits.workspace_min, settings.limits.workspace_max
    inner = replace(
        settings.limits,
        workspace_min=tuple(map(max, low, arm.low)),
        workspace_max=tuple(map(min, high, arm.high)),
    )
    return replace(settings, limits=inner, robot_states=(f"{RUNNING_TOPIC} std_msgs/msg/Bool data=true",))


# Who takes part


def _activate(nodes: NodeProcesses) -> None:
    """By a node of its own: who spins one takes it from the executor that had it."""
    client = rclpy.create_node("activates", enable_rosout=False)
    try:
        for name in ("policy", "driver"):
            LifecycleClient(client, f"/{name}").activate(partial(_runs, nodes, name), _UP_S)
    finally:
        client.destroy_node()


def _runs(nodes: NodeProcesses, name: str) -> bool:
    return nodes.exit_code(name) is None


@contextmanager
def _small_disk(box: Path) -> Iterator[None]:
    """A black box that is full with its first stop."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SMALL_DISK}", "tmpfs", str(box)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(box)], check=True)


@contextmanager
def _players(job: RealJob, on_clock: bool, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The arm, its camera, and a hand on the dead-man's switch."""
    tasks = [task.name for task in Random(job.seed).sample(TASKS, len(TASKS))]
    parameters = {
        "robot": job.robot,
        "command": job.output,
        "tasks": tasks,
        "episodes": 0,
        "seed": job.seed,
        "record": str(folder / "record"),
        "camera_rate_hz": 5.0,
        "image_size": IMAGE_SIZE,
        "policy_lost_after_s": 3600.0,
    }
    write_parameters(folder / "robot.yaml", parameters)
    topics = (COMMANDS[job.output][1], "gripper")
    remaps = [word for each in topics for word in ("-r", f"/sim_robot/command/{each}:=/guard/{each}")]
    camera = ["--robot", job.robot, "--task", tasks[0], "--seed", str(job.seed)]
    begun = {
        "robot": _player(
            "with_clock" if on_clock else "robot", "--ros-args", "--params-file", str(folder / "robot.yaml"), *remaps
        ),
        "camera": _player("camera", *camera),
        "operator": _player("operator"),
    }
    try:
        yield begun
    finally:
        begun["robot"].send_signal(signal.SIGINT)  # it writes the rest of the record
        for name in ("camera", "operator"):
            begun[name].kill()
        for process in begun.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _player(role: str, *arguments: str) -> subprocess.Popen[bytes]:
    end_with = f"from specvla_ros.lab.jobs.workers import end_with_parent; end_with_parent({os.getpid()})"
    main = "from faults.robot_process import main; main()"
    if role == "operator":
        main = "from faults.guard_stop import play; play('operator', 'twist')"
    command = [sys.executable, "-c", f"{end_with}; {main}", role, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # pytest puts `test` on sys.path
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)


def _start(nodes: NodeProcesses, settings: GuardSettings, arm: Arm, on_clock: bool, folder: Path) -> None:
    """Policy, driver and guard, as a user starts them."""
    name = COMMANDS[settings.output][1]
    clock, motion = {"use_sim_time": on_clock}, values_of(settings)
    shared = {key: motion[key] for key in motion if key.startswith("limits.") or key in ("output", "base_frame")}
    gripper = {f"gripper.{key}": motion[f"gripper.{key}"] for key in ("output", "open_value", "closed_value")}
    driver = clock | shared | gripper
    if settings.kind.of_joints:
        model = folder / "arm.xml"
        model.write_text(arm.kinematics(), encoding="utf-8")
        kinematics = {"joints.model": str(model), "joints.tool": "pinch"}
        motion |= kinematics
        driver |= kinematics | {"joints.check_order": False}
        driver |= {key: motion[key] for key in ("joints.names", "joints.max_speed", "joints.max_acceleration")}
    parameters: dict[str, dict[str, Any]] = {
        "policy": clock | {"checkpoint": str(nano_policy()), "base_frame": settings.base_frame},
        "driver": driver,
        # The arm is in Python: at 250 commands a second it falls behind.
        "guard": clock | motion | {"black_box_dir": str(folder / "black_box"), "rate_hz": 100.0},
    }
    inputs = [("action", ACTIONS), ("tool_pose", "/sim_robot/tool_pose")]
    remaps: dict[str, list[tuple[str, str]]] = {
        "policy": [*image_remappings("image", IMAGE_TOPIC), (ACTIONS, RAW_ACTION)],
        "driver": [*inputs, ("guard_state", "/guard/state")],
        "guard": [*inputs, *((f"command/{each}", f"/driver/{each}") for each in (name, "gripper"))],
    }
    for node, values in parameters.items():
        write_parameters(folder / f"{node}.yaml", values)
        nodes.start(f"ros.{node}.node", params_file=folder / f"{node}.yaml", remaps=remaps[node])


def _send(nodes: NodeProcesses, players: dict[str, subprocess.Popen[bytes]], who: str, number: signal.Signals) -> None:
    if who in players:
        players[who].send_signal(number)
    else:
        nodes._running[who].send_signal(number)


# What happens, and what came of it


def _act(job: RealJob, hands: Hands, settings: GuardSettings, since_s: float, box: Path) -> _Round:
    """The fault at a random moment of the motion."""
    watch, fault = hands.watch, REAL_FAULTS[job.fault]
    files = {path.name for path in box.iterdir()}
    if since_s:
        watch.tell_robot(TIDY)
    if not _gets_moving(watch):
        raise UserError(f"the arm did not move; the guard: {watch.said[-3:]}")
    moved_s = watch.now_s
    watch.forget_lateness()
    watch.spin(hands.random.uniform(0.0, _BEGINS_S))
    _gets_moving(watch)
    hands.mark()
    fault.begin(hands)
    watch.spin(fault.lasts_s)
    ended_s = watch.now_s
    noticed_s = fault.noticed(hands, settings) if fault.noticed is not None else np.inf
    fault.end(hands)
    watch.spin(_REST_S)
    cleared = watch.clear_stop()
    if not fault.stays:
        watch.until(lambda: watch.passing, _GOES_ON_S)
    watch.spin(_AFTER_S)
    rest = {
        "cleared": cleared,
        "load": os.getloadavg()[0],
        "slip_s": watch.slip_s,
        "loop_late_ms": watch.late_ms,
        "guard_said": [(at_s - hands.began_s, *words) for at_s, *words in watch.said if at_s > since_s],
        "black_box_said": watch.box,
        "black_box": sorted({path.name for path in box.iterdir()} - files),
    }
    times = since_s, moved_s, hands.began_s, ended_s, watch.now_s
    halts_s = [at_s for at_s in watch.halts_s if at_s > since_s]
    return _Round(job, fault, list(watch.states), halts_s, *times, noticed_s, _stale(hands, settings), rest)


def _gets_moving(watch: Watch) -> bool:
    """Waits for motion. The operator clears what stops the arm meanwhile, as where it presses too hard, and tidies."""
    end_s = time.monotonic() + _MOVES_S
    while time.monotonic() < end_s:
        if watch.until(lambda: watch.moves() or watch.stopped, _MOVES_S) and not watch.stopped:
            return True
        if watch.clear_stop():
            watch.tell_robot(TIDY)
    return False


def _judged(record: MotionRecord, settings: GuardSettings, seen: _Round) -> dict[str, Any]:
    judge = Judge(record, settings)
    passed_s = [at_s for at_s, state, _ in seen.states if state == "passing"]
    resumed_s = next((at_s for at_s in passed_s if at_s > seen.began_s), np.inf)
    until_s, stands_s = min(resumed_s - _STATE_S, seen.ended_s), seen.noticed_s + settings.stop_time_s
    stop = judge.stop(seen.noticed_s, until_s)
    extremes, then = (judge.extremes(since_s, seen.over_s) for since_s in (seen.moved_s, seen.began_s))
    at_end = [state for at_s, state, _ in seen.states if at_s <= seen.ended_s][-1:] == ["passing"]
    goes_on_s = seen.ended_s if at_end else next((at_s for at_s in passed_s if at_s > seen.ended_s), None)
    latched = [(at_s, cause) for at_s, state, cause in seen.states if state == "stopped" and at_s > seen.since_s]
    wrong = _latched_by_itself(seen, latched)
    return {
        **asdict(extremes),
        "beyond": extremes.beyond + (["gripper"] if seen.stale else []),
        "beyond_then": then.beyond,
        "tool_share_then": then.tool_share,
        "in_contact": extremes.in_contact,
        "own_halt": _by_itself(judge, extremes, seen, settings.output),
        "promised": stands_s < until_s,
        "late": judge.moved_between(stands_s, until_s),
        "stop": stop.as_json() if stop is not None else None,
        "recovered_s": goes_on_s - seen.ended_s if goes_on_s is not None else None,
        "stays": seen.fault.stays,
        "arm_stops": len(seen.halts_s),
        "latched": [cause for _, cause in latched],
        "self_latched": [cause for at_s, cause in wrong if not judge.touched_at(at_s)],
        "latched_in_contact": [cause for at_s, cause in wrong if judge.touched_at(at_s)],
        **seen.rest,
    }


def _by_itself(judge: Judge, extremes: Extremes, seen: _Round, output: str) -> bool:
    """Whether what is beyond the limits is none of the guard's: the arm's own brake or halt, or Servo's catching up.

    Servo keeps what it was sent while an arm was held, and the arm makes up for it once it is let go.
    """
    fault, beyond = seen.fault, extremes.free.beyond
    if beyond == ["acceleration"]:
        stands = fault.halts or fault.pauses
        brakes = fault.brakes or bool(seen.halts_s)
        return brakes or (fault.halts and output == "twist") or (stands and output == "position_array")
    if not (beyond and fault.brakes and output == "twist"):
        return False
    held = judge.extremes(seen.moved_s, seen.ended_s)
    caught_up = judge.extremes(seen.ended_s + _CATCHES_UP_S, seen.over_s)
    return held.beyond in ([], ["acceleration"]) and not caught_up.beyond


def _latched_by_itself(seen: _Round, latched: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """When and for which causes the guard latched, though there was no fault that latches and the arm did not stop."""
    causes = [(at_s, Cause(cause)) for at_s, cause in latched if cause]
    wrong = [(at_s, cause) for at_s, cause in causes if cause not in seen.fault.latches or at_s < seen.began_s]
    told = [each for each in wrong if each[1] is Cause.ROBOT_STOPPED and _heard(each[0], seen.halts_s)]
    # A cleared stop tells why it still holds.
    return [(at_s, cause.value) for at_s, cause in wrong if cause.latches and (at_s, cause) not in told]


def _heard(at_s: float, halts_s: list[float]) -> bool:
    """Whether the arm says that it stands, or said so just before."""
    return any(0 <= at_s - halt_s < RESTS_S + _REST_S for halt_s in halts_s)


def _stale(hands: Hands, settings: GuardSettings) -> bool:
    """Whether the gripper was told again, after a hold, what it was told before."""
    asked_s, opened = hands.asked_s, settings.gripper.open_value
    return asked_s is not None and any(at_s > asked_s and value == opened for at_s, value in hands.watch.gripped)
