# SPDX-License-Identifier: Apache-2.0
"""The fault suite with the nodes as processes over DDS: policy, driver, guard, simulated arm and operator.

Judged by the record of the simulated arm, on /clock, which all nodes have. A round takes about half a minute.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from faults.guard_stop import KINDS
from faults.judge import Judge
from geometry_msgs.msg import PoseStamped
from rclpy.executors import SingleThreadedExecutor
from rosgraph_msgs.msg import Clock
from std_msgs.msg import Empty
from std_srvs.srv import Trigger
from support.fault_scene import guard_settings
from trajectory_msgs.msg import JointTrajectory

from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.files import write_parameters
from specvla_ros.lab.ros.demo.processes import LifecycleClient, NodeProcesses
from specvla_ros.lab.simulation.arms import TABLE_ARM
from specvla_ros.lab.simulation.controllers import COMMAND_TIMEOUT_S
from specvla_ros.lab.simulation.motion_record import MotionRecord, read_motion_record
from specvla_ros.msg import GuardState
from specvla_ros.ros.qos import CLOCK, COMMAND, DIAGNOSTICS, LATCHED_STATE, STATE
from specvla_ros.settings.parameter import values_of

SPEED = 0.25  # m/s, the tool's limit
_KINDS: dict[str, tuple[Any, str]] = {**KINDS, "joint_trajectory": (JointTrajectory, "joint_trajectory")}
_CAMERA = "/camera/image_raw"
_UP_S, _MOVES_S, _WHILE_S, _AFTER_S = 120.0, 120.0, 2.0, 3.0
_MOVED_M = 0.03
_SMALL_DISK = "64k"


@dataclass(frozen=True)
class _RealFault:
    """What is done to whom.

    Args:
        who: the process; empty: none.
        how: a signal, or one of `stop`, `twin`, `disk`.
        timeout_s: of the promise, from the guard's settings; None: at once.
    """

    who: str
    how: str
    timeout_s: Callable[[GuardSettings], float]


def _at_once(settings: GuardSettings) -> float:
    return 0.0


_TIMEOUTS: dict[str, Callable[[GuardSettings], float]] = {
    "policy": lambda settings: settings.action_timeout_s,
    "driver": lambda settings: settings.command_timeout_s,
    "operator": lambda settings: settings.enable_timeout_s,
    "guard": lambda settings: COMMAND_TIMEOUT_S,
}
_ALL = {
    **{f"kill {who}": _RealFault(who, "SIGKILL", timeout) for who, timeout in _TIMEOUTS.items()},
    **{f"freeze {who}": _RealFault(who, "SIGSTOP", timeout) for who, timeout in _TIMEOUTS.items()},
    "press stop": _RealFault("", "stop", _at_once),
    "twin of command": _RealFault("", "twin", _at_once),
    "fill disk": _RealFault("", "disk", _at_once),
}
REAL_FAULTS = tuple(_ALL)


class _Watch:
    """A node that hears what happens, and does what people do.

    Args:
        output: the driver's.

    Attributes:
        now_s: on /clock.
        changes: when on /clock the guard began or ceased to let motion through.
        box: what the guard says of its black box.
    """

    def __init__(self, output: str) -> None:
        self.now_s, self.changes, self.box = 0.0, list[tuple[float, bool]](), dict[str, str]()
        self._places: deque[tuple[float, np.ndarray]] = deque(maxlen=200)
        self.node = rclpy.create_node("watch", enable_rosout=False)
        kind, name = _KINDS[output]
        self._command: Any = None
        self._command_kind, self._command_topic = kind, f"/driver/{name}"
        listen = self.node.create_subscription
        listen(Clock, "/clock", self._on_clock, CLOCK)
        listen(GuardState, "/guard/state", self._on_state, LATCHED_STATE)
        listen(PoseStamped, "/sim_robot/tool_pose", self._on_pose, STATE)
        listen(DiagnosticArray, "/diagnostics", self._on_diagnostics, DIAGNOSTICS)
        listen(kind, self._command_topic, self._on_command, COMMAND)
        self._stop = self.node.create_publisher(Empty, "/guard/stop", 1)
        self._clear: Any = self.node.create_client(Trigger, "/guard/clear_stop")
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)

    def _on_state(self, message: GuardState) -> None:
        passing = message.state == GuardState.PASSING
        if passing is not self.passing:
            self.changes.append((self.now_s, passing))

    @property
    def passing(self) -> bool:
        """Whether the guard lets motion through."""
        return bool(self.changes) and self.changes[-1][1]

    def spin(self, seconds: float) -> None:
        """Listens for so many seconds of the steady clock."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left_s)

    def until(self, condition: Callable[[], bool], patience_s: float) -> bool:
        """Listens until a condition holds; False: it does not."""
        end_s = time.monotonic() + patience_s
        while not condition() and time.monotonic() < end_s:
            self.spin(0.05)
        return condition()

    def moves(self) -> bool:
        """Whether the tool goes, and the guard lets it."""
        recent = [place for at_s, place in self._places if at_s > self.now_s - 1.0]
        return self.passing and len(recent) > 5 and float(np.linalg.norm(recent[-1] - recent[0])) > _MOVED_M

    def press_stop(self) -> None:
        """What a hand on a button does."""
        self._stop.publish(Empty())

    def clear_stop(self) -> None:
        """Lets motion through again."""
        self._clear.call_async(Trigger.Request())

    def repeat_commands(self) -> Callable[[], None]:
        """A second publisher of the driver's commands, which says them again; returns what ends it."""
        publisher = self.node.create_publisher(self._command_kind, self._command_topic, COMMAND)
        timer = self.node.create_timer(0.02, lambda: publisher.publish(self._command))

        def end() -> None:
            self.node.destroy_timer(timer)
            self.node.destroy_publisher(publisher)

        return end

    def close(self) -> None:
        """Leaves."""
        self._executor.shutdown()
        self.node.destroy_node()

    def _on_clock(self, message: Clock) -> None:
        self.now_s = message.clock.sec + message.clock.nanosec * 1e-9

    def _on_command(self, message: Any) -> None:
        self._command = message

    def _on_pose(self, message: PoseStamped) -> None:
        place = message.pose.position
        self._places.append((self.now_s, np.array([place.x, place.y, place.z])))

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == "guard: black box":
                self.box = {"message": status.message, **{each.key: each.value for each in status.values}}


def real_round(fault: str, output: str, seed: int) -> dict[str, Any]:
    """Starts everybody, waits for motion, does a fault at a random moment, and judges what the arm did."""
    os.environ["ROS_DOMAIN_ID"] = str(60 + seed % 40)  # a dead participant is remembered for 20 s
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    head = {"fault": fault, "output": output, "robot": TABLE_ARM.name, "seed": seed}
    settings, chosen = guard_settings(TABLE_ARM, output, SPEED), _ALL[fault]
    with TemporaryDirectory() as folder, _black_box_folder(Path(folder), chosen.how) as box:
        rclpy.init(args=[])
        watch = _Watch(output)
        try:
            with NodeProcesses() as nodes, _operator() as operator:
                _start(nodes, settings, seed, Path(folder), box)
                for name in ("policy", "driver"):
                    LifecycleClient(watch.node, f"/{name}").activate(partial(_runs, nodes, name), _UP_S)
                if not watch.until(watch.moves, _MOVES_S):
                    return head | {"problem": "the arm never moved"}
                watch.spin(random.Random(seed).uniform(0.0, _WHILE_S))
                watch.until(watch.moves, _MOVES_S)
                signal_to = operator.send_signal if chosen.who == "operator" else partial(nodes.send, chosen.who)
                began_s, ended_s, cleared = _do(chosen, watch, signal_to)
        except UserError as error:
            return head | {"problem": str(error)}
        finally:
            watch.close()
            rclpy.try_shutdown()
        record = read_motion_record(Path(folder, "record"))
        files = sorted(path.name for path in box.iterdir())
    found = _judged(record, settings, chosen, watch, (began_s, ended_s))
    return head | found | {"cleared": cleared, "black_box": files}


def _runs(nodes: NodeProcesses, name: str) -> bool:
    return nodes.exit_code(name) is None


@contextmanager
def _operator() -> Iterator[subprocess.Popen[bytes]]:
    """A hand on the dead-man's switch."""
    hand = [sys.executable, "-m", "faults.guard_stop", "--play", "operator"]
    process = subprocess.Popen(hand)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def _black_box_folder(folder: Path, how: str) -> Iterator[Path]:
    """Where stops are written: for a full disk, one that is too small."""
    box = folder / "black_box"
    box.mkdir()
    if how != "disk":
        yield box
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SMALL_DISK}", "tmpfs", str(box)], check=True)
    try:
        yield box
    finally:
        subprocess.run(["umount", str(box)], check=True)


def _start(nodes: NodeProcesses, settings: GuardSettings, seed: int, folder: Path, box: Path) -> None:
    output, (_, name) = settings.output, _KINDS[settings.output]
    clock, motion = {"use_sim_time": True}, values_of(settings)
    shared = {key: motion[key] for key in motion if key.startswith("limits.") or key in ("output", "base_frame")}
    gripper = {key: motion[f"gripper.{key}"] for key in ("output", "open_value", "closed_value")}
    driver = clock | shared | {f"gripper.{key}": value for key, value in gripper.items()}
    if settings.kind.of_joints:
        model = folder / "arm.xml"
        model.write_text(TABLE_ARM.kinematics(), encoding="utf-8")
        driver |= {"joints.model": str(model), "joints.tool": "pinch", "joints.check_order": False}
        driver |= {key: motion[key] for key in ("joints.names", "joints.max_speed", "joints.max_acceleration")}
    parameters: dict[str, dict[str, Any]] = {
        "policy": clock | {"checkpoint": str(nano_policy()), "base_frame": settings.base_frame},
        "driver": driver,
        "guard": clock | motion | {"black_box_dir": str(box), "rate_hz": 100.0},  # the arm is in Python
        "sim_robot": {
            "command": output,
            "episodes": 0,
            "seed": seed,
            "record": str(folder / "record"),
            "camera_rate_hz": 5.0,  # each picture is drawn on the thread that tells the tool's pose
        },
    }
    inputs = [("action", "/policy/action"), ("tool_pose", "/sim_robot/tool_pose")]
    remaps: dict[str, list[tuple[str, str]]] = {
        "policy": [("image", _CAMERA), ("image/compressed", f"{_CAMERA}/compressed")],
        "driver": [*inputs, ("guard_state", "/guard/state")],
        "guard": [*inputs, *((f"command/{each}", f"/driver/{each}") for each in (name, "gripper"))],
        "sim_robot": [(f"/sim_robot/command/{each}", f"/guard/{each}") for each in (name, "gripper")],
    }
    for node, values in parameters.items():
        write_parameters(folder / f"{node}.yaml", values)
        room = "lab.ros" if node == "sim_robot" else "ros"
        nodes.start(f"{room}.{node}.node", params_file=folder / f"{node}.yaml", remaps=remaps[node])


def _do(fault: _RealFault, watch: _Watch, signal_to: Callable[[signal.Signals], None]) -> tuple[float, float, bool]:
    """The fault; when on /clock it began and ended, and whether a stop had to be cleared."""
    began_s, end_twin = watch.now_s, lambda: None
    if fault.who:
        signal_to(signal.Signals[fault.how])
    elif fault.how == "twin":
        end_twin = watch.repeat_commands()
    else:
        watch.press_stop()
    watch.spin(_WHILE_S)
    end_twin()
    if fault.how == "SIGSTOP":
        signal_to(signal.SIGCONT)
    ended_s, cleared = watch.now_s, False
    watch.spin(1.0)
    if fault.how in ("stop", "disk"):
        watch.clear_stop()
        cleared = True
    watch.spin(_AFTER_S)
    return began_s, ended_s, cleared


def _judged(
    record: MotionRecord, settings: GuardSettings, fault: _RealFault, watch: _Watch, times: tuple[float, float]
) -> dict[str, Any]:
    began_s, ended_s = times
    judge, rows = Judge(record, settings), record.rows
    resumed_s = next((at_s for at_s, passing in watch.changes if passing and at_s > began_s), ended_s)
    noticed_s = began_s + fault.timeout_s(settings)
    extremes, until_s = judge.extremes(), min(resumed_s, ended_s)
    stop = judge.stop(noticed_s, until_s)
    steps = np.diff(rows["time_s"])
    lost_rows = int(np.maximum(0, np.round(steps / np.median(steps)) - 1)[np.diff(rows["episode"]) == 0].sum())
    return {
        **asdict(extremes),
        "beyond": extremes.beyond,
        "promised": noticed_s + settings.stop_time_s < until_s,
        "late": judge.moved_between(noticed_s + settings.stop_time_s, until_s),
        "stop": stop.as_json() if stop is not None else None,
        "recovered_s": resumed_s - ended_s if watch.passing else None,
        "bytes_lost": lost_rows * rows.dtype.itemsize,
        "black_box_said": watch.box,
    }
