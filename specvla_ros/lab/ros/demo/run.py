# SPDX-License-Identifier: Apache-2.0
"""`specvla demo`: the policy drives the simulated arm over topics; the terminal shows it and takes instructions."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rclpy
import rclpy.node
from ament_index_python.packages import get_package_share_directory
from rclpy.executors import ExternalShutdownException
from rich.console import Console
from rich.live import Live

from specvla_ros.control.guard.settings import Output
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.paired import Rate
from specvla_ros.lab.evaluation.rerun_recording import RECORDING_FILE, RerunSettings
from specvla_ros.lab.evaluation.simulate_summary import SimulateSummary
from specvla_ros.lab.files import write_parameters
from specvla_ros.lab.planning.measure import CpuTimes, busy_machine
from specvla_ros.lab.ros.demo.operator import CLEAR_KEY, STOP_KEY, Operator, TypedLine, picture
from specvla_ros.lab.ros.demo.processes import LifecycleClient, NodeProcesses
from specvla_ros.lab.ros.demo.record import DemoRecord
from specvla_ros.lab.ros.sim_robot.episodes import ACTIONS
from specvla_ros.lab.ros.sim_robot.outputs import IMAGE_TOPIC, JOINTS_TOPIC, WRIST_TOPIC
from specvla_ros.lab.simulation import require_gl
from specvla_ros.lab.simulation.arm import Arm
from specvla_ros.lab.simulation.driven_robot import simulation_limits, touching
from specvla_ros.lab.simulation.rollout import EpisodeResult
from specvla_ros.lab.simulation.tasks import Task, choose_tasks
from specvla_ros.models.families.openvla.config import OpenVLAConfig, read_config
from specvla_ros.models.observation import normalise_instruction
from specvla_ros.msg import SimEpisode
from specvla_ros.ros.driver.parameters import JOINTS
from specvla_ros.ros.wiring import Remaps, RobotTopics, image_remappings
from specvla_ros.settings.parameter import values_of
from specvla_ros.settings.profiles import merge_parameters

PARAMETERS_FILE, ROBOT_FILE, BLACK_BOX = "parameters.yaml", "robot.yaml", "black_box"
MODEL_FILE = "robot.xml"
CHUNKS = Output.JOINT_TRAJECTORY_CHUNK.value
DRIVER_LOG, GUARD_LOG = "driver.log", "guard.log"
_CONFIGURE_TIMEOUT_S = 300.0
_DIAGNOSTICS_PERIOD_S = 0.25  # short enough for the live view and for the counts at the demo's end
_SILENCE_S = 60.0  # maximum time without news of an episode
_CLOCK = "realtime"
_STOP_S = 0.12  # of a joint from full speed: with what the guard adds for chunks it fits into stop_time_s
_OWN_NODES = ("/driver", "/guard", "/policy", "/sim_robot")
_DISCOVERY_S = 1.0  # until nodes that run already are seen
_REMEMBERED_S = 25.0  # DDS lists a killed process's nodes for 20 s
_PAUSE_S = 1.0  # between episodes: if a busy machine delivers old poses after the reset, the arm seems to jump
_CAMERA = image_remappings("image", IMAGE_TOPIC)
# Further cameras of a policy get the robot's in their order; the first is always the one above.
_FURTHER, _STATE = (WRIST_TOPIC,), [("state", JOINTS_TOPIC)]


@dataclass(frozen=True)
class DemoRobot:
    """A simulated arm, moved by a policy's actions or, like commercial arms, by commands."""

    arm: Arm
    # `action`: the simulator follows actions itself. Otherwise driver and guard send it commands; the values are those
    # of the simulated robot's `command`.
    interface: str = ACTIONS

    @property
    def commanded(self) -> bool:
        """True if driver and guard run between the policy and the arm."""
        return self.interface != ACTIONS

    @property
    def of_joints(self) -> bool:
        """True if the policy's actions are positions of the joints."""
        return self.interface == CHUNKS

    @property
    def topics(self) -> RobotTopics:
        command = Output(self.interface).topic if self.commanded else self.interface
        commands = {name: f"/sim_robot/command/{name}" for name in (command, "gripper")}
        return RobotTopics("/sim_robot/tool_pose", "/joint_states", "/instruction", commands)

    def parameters(self, out: Path) -> dict[str, Any]:
        """Parameters of driver and guard by name: the simulated arms' limits, and this arm's workspace and gripper.

        An arm that is moved by its joints also has their limits, and its kinematics in a file in `out`.
        """
        config = Path(get_package_share_directory("specvla_ros"), "config", "robots", "simulated.yaml")
        return {
            **merge_parameters([config], {}, node="driver"),
            "output": self.interface,
            "limits.workspace_min": self.arm.low,
            "limits.workspace_max": self.arm.high,
            "gripper.open_value": self.arm.gripper.open[0],
            "gripper.closed_value": self.arm.gripper.closed[0],
            "diagnostics_period_s": _DIAGNOSTICS_PERIOD_S,
            "use_sim_time": True,
            **(self._of_joints(out / MODEL_FILE) if self.of_joints else {}),
        }

    def _of_joints(self, model: Path) -> dict[str, Any]:
        arm = self.arm
        model.parent.mkdir(parents=True, exist_ok=True)
        model.write_text(arm.kinematics(), encoding="utf-8")
        speeds = [min(speed, _STOP_S * limit) for speed, limit in zip(arm.speed, arm.acceleration, strict=True)]
        return {
            "tool_pose_source": "joint_states",
            "joints.names": list(arm.joints),
            "joints.model": str(model.resolve()),
            "joints.tool": "pinch",
            "joints.max_speed": speeds,
            "joints.max_acceleration": list(arm.acceleration),
            "limits.workspace_min": list(touching(simulation_limits(arm)).workspace_min),
        }


def run_demo(
    out: Path,
    policy: Path,
    *,
    robot: DemoRobot,
    tasks: list[str],
    episodes: int,
    seed: int,
    parameters: Mapping[str, Any],
    shown: RerunSettings | None = None,
) -> int:
    """Shows the policy drive the simulated arm, and writes films and a report to `out`, replacing earlier ones.

    Raises UserError if OpenGL or the arm's model is missing, the checkpoint is bad, or a process does not come up.

    Args:
        tasks: names; all tasks if empty. `seed`: seed of the first start.
        parameters: the policy node's, by name; written to parameters.yaml in `out`.
        shown: settings of the Rerun view; None: no view.

    Returns:
        0 if the arm succeeded at least once and everything ran to its end, otherwise 1.
    """
    require_gl()
    chosen = [task.name for task in choose_tasks(tasks, robot.arm.tasks)]
    robot.arm.build()  # reports a missing model early
    config = read_config(policy)
    senses, taught = _senses(policy, config), config.instructions
    # A robot on the network must not receive the simulated policy's actions.
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    record = DemoRecord(out, policy, robot.commanded, parameters.get("unnorm_key", ""))
    given = {**parameters, "checkpoint": str(policy), "use_sim_time": True}
    write_parameters(out / PARAMETERS_FILE, given, ["Parameters of the policy node in `specvla demo`."])
    console = Console()
    between = "guard ⇄ driver ⇄ " if robot.commanded else ""
    nodes_between = f"sim_robot ({robot.arm.name}) ⇄ ROS 2 topics ⇄ {between}an OpenVLA policy"
    console.print(f"[bold]specvla demo[/bold]: {nodes_between}, trained for this table")
    rclpy.init(args=[])
    try:
        refuse_others(console)
    except UserError:
        rclpy.try_shutdown()
        raise
    operator, before = Operator(record, robot.commanded), CpuTimes.now()
    finished = False
    try:
        with NodeProcesses() as nodes:
            nodes.start("ros.policy.node", params_file=out / PARAMETERS_FILE, remaps=senses)
            world = {"tasks": f"[{', '.join(chosen)}]", "episodes": episodes, "seed": seed}
            _start_robot(nodes, out, robot, world, shown)
            _bring_up(nodes, operator, out, robot)
            finished = _show(console, record, operator, nodes, robot, taught)
    except (KeyboardInterrupt, ExternalShutdownException):
        console.print("interrupted")
    except Exception:
        if rclpy.ok():
            raise
        console.print("interrupted")  # a signal ended the context during a callback
    finally:
        operator.destroy_node()
        rclpy.try_shutdown()
    busy = {"busy": busy_machine(before, CpuTimes.now()) or None}
    summary = record.finish(_context(robot, parameters, operator, shown) | busy)
    _print_results(console, summary, operator, out, shown)
    if record.unseen:
        console.print(f"[red]{record.unseen} episodes were not seen: this machine is too busy[/red]")
    return 0 if finished and summary.success.successes else 1


def refuse_others(console: Console, patience_s: float = _REMEMBERED_S) -> None:
    """Raises UserError if a policy, driver, guard or simulated robot runs already: the demo's topics would reach it."""
    node = rclpy.create_node("demo_looks_around")
    deadline_s, others = time.monotonic() + patience_s, ""
    try:
        time.sleep(_DISCOVERY_S)
        while found := _running_nodes(node):
            if time.monotonic() > deadline_s:
                raise UserError(
                    f"{found} already run in this ROS domain, and would receive the demo's images, instructions and "
                    "enable signal: end them, or choose another domain, such as ROS_DOMAIN_ID=77"
                )
            if found != others:
                console.print(f"waiting for {found} to end")
            others = found
            time.sleep(_DISCOVERY_S)
    finally:
        node.destroy_node()


def _running_nodes(node: rclpy.node.Node) -> str:
    """Names of running nodes whose topics are the demo's."""
    found = {f"{space.rstrip('/')}/{name}" for name, space in node.get_node_names_and_namespaces()}
    return ", ".join(name for name in _OWN_NODES if name in found)


def _senses(policy: Path, config: OpenVLAConfig) -> Remaps:
    """Remaps of the policy's inputs to the simulated robot's topics."""
    further = config.cameras[1:]
    if len(further) > len(_FURTHER):
        robot = 1 + len(_FURTHER)
        raise UserError(f"--policy {policy} needs images of {len(config.cameras)} cameras, but this robot has {robot}")
    remaps = list(_CAMERA)
    for name, topic in zip(further, _FURTHER, strict=False):
        remaps += image_remappings(f"{name}/image", topic)
    return [*remaps, *(_STATE if config.state_dims else ())]


def _start_robot(
    nodes: NodeProcesses, out: Path, robot: DemoRobot, world: Mapping[str, Any], shown: RerunSettings | None
) -> None:
    """Starts the other nodes that may run before the policy is active; `world`: the simulated robot's parameters."""
    world = {"robot": robot.arm.name, "command": robot.interface, "clock": _CLOCK, "pause_between_s": _PAUSE_S, **world}
    nodes.start("lab.ros.sim_robot.node", *(f"{name}:={value}" for name, value in world.items()))
    limits = {}
    if robot.commanded:
        limits = robot.parameters(out)
        write_parameters(out / ROBOT_FILE, limits, ["Parameters of driver and guard in `specvla demo`."])
        space = [f"action_space:={JOINTS}"] if robot.of_joints else []
        nodes.start(
            "ros.driver.node", *space, params_file=out / ROBOT_FILE, remaps=robot.topics.driver, log=out / DRIVER_LOG
        )
    if shown is not None:
        of_the_arm = {name: value for name, value in limits.items() if name.startswith("limits.")}
        given = {name: json.dumps(value) for name, value in (values_of(shown) | of_the_arm).items()}
        remaps = [*_CAMERA, *(robot.topics.live_view if robot.commanded else ())]
        nodes.start("lab.ros.live_view", *(f"{name}:={value}" for name, value in given.items()), remaps=remaps)


def _bring_up(nodes: NodeProcesses, operator: Operator, out: Path, robot: DemoRobot) -> None:
    """Activates driver and policy, then starts the guard; the first episode starts once its command topic exists."""
    if robot.commanded:
        driver = LifecycleClient(operator, "/driver", f"{out / DRIVER_LOG} says why")
        driver.activate(lambda: nodes.exit_code("driver") is None, _CONFIGURE_TIMEOUT_S)
    LifecycleClient(operator, "/policy").activate(lambda: nodes.exit_code("policy") is None, _CONFIGURE_TIMEOUT_S)
    if robot.commanded:
        black_box = f"black_box_dir:={json.dumps(str((out / BLACK_BOX).resolve()))}"
        nodes.start(
            "ros.guard.node", black_box, params_file=out / ROBOT_FILE, remaps=robot.topics.guard, log=out / GUARD_LOG
        )


def _show(
    console: Console,
    record: DemoRecord,
    operator: Operator,
    nodes: NodeProcesses,
    robot: DemoRobot,
    taught: tuple[str, ...],
) -> bool:
    """Shows the demo until the robot's episodes are done; False if a process ended early or nothing happens."""
    others = ("policy", "driver", "guard") if robot.commanded else ("policy",)
    motion = operator.motion if robot.commanded else None
    with TypedLine() as typed, Live(console=console, refresh_per_second=8, vertical_overflow="crop") as view:
        warning, state = "", ""
        deadline = time.monotonic() + _SILENCE_S
        while nodes.exit_code("sim_robot") is None and not nodes.ended(others) and time.monotonic() < deadline:
            news, finished = record.episode, len(record.episodes)
            rclpy.spin_once(operator, timeout_sec=0.05)
            line = typed.poll()
            if line:
                operator.instruct(line)
                warning = _unknown_instruction(line, taught)
            pressed = typed.take_pressed()
            if motion is not None and STOP_KEY in pressed:
                operator.stop()
            elif motion is not None and CLEAR_KEY in pressed:
                operator.clear_stop()
            if record.episode is not news:
                deadline = time.monotonic() + _SILENCE_S
                if _begins(record.episode, news) and (stopped := operator.begin_episode()):
                    console.print(f"new episode: the operator clears the stop ({stopped})", markup=False)
            if not console.is_terminal:  # a log has no live view
                if len(record.episodes) > finished:
                    console.print(_verdict(record.episodes[-1], robot.arm.tasks))
                if motion is not None and motion.guard.partition(":")[0] != state:
                    state = motion.guard.partition(":")[0]
                    console.print(f"guard: {motion.guard}", markup=False)
            view.update(picture(record, motion, typed, operator.answer or warning, robot.arm.tasks))
    if robot.commanded:
        operator.hold_switch(False)
    for _ in range(5):  # the last message may still be in transit
        rclpy.spin_once(operator, timeout_sec=0.1)
    code = nodes.exit_code("sim_robot")
    if code is None:
        why = f"the {ended} exited" if (ended := nodes.ended(others)) else f"nothing happened for {_SILENCE_S:g} s"
        console.print(f"[red]{why}; the results so far are kept[/red]")
    return code == 0


def _verdict(episode: EpisodeResult, tasks: Sequence[Task]) -> str:
    """An episode's end in words; the judged task may be another than the newest instruction asks for."""
    judged = next((task.instruction for task in tasks if task.name == episode.task), episode.task)
    return f"{judged}: {'done' if episode.succeeded else 'not done'} after {episode.time_s:.1f} s"


def _begins(episode: SimEpisode | None, before: SimEpisode | None) -> bool:
    if episode is None or episode.state != SimEpisode.RUNNING:
        return False
    return before is None or (before.episode, before.state) != (episode.episode, SimEpisode.RUNNING)


def _unknown_instruction(line: str, taught: tuple[str, ...]) -> str:
    """A warning, or an empty string if the policy was trained on this, or does not list its instructions."""
    if not taught or normalise_instruction(line) in taught:
        return ""
    return f"the policy was never trained on “{line}”; its instructions are: {'; '.join(taught)}"


def _context(
    robot: DemoRobot, parameters: Mapping[str, Any], operator: Operator, shown: RerunSettings | None
) -> dict[str, Any]:
    processes = ["policy", "robot", "operator", *(["driver", "guard"] if robot.commanded else [])]
    engine = {"mode": parameters["decode.mode"]}
    context: dict[str, Any] = {
        "settings": {"robot": robot.arm.name, "interface": robot.interface, "clock": _CLOCK, "engine": engine},
        "over": f"ROS 2 topics, one process each: {', '.join(processes)}",
    }
    if robot.commanded:
        context["refused"] = operator.motion.refused
        context["refused_in_motion"] = operator.motion.in_motion
    if shown is not None and shown.out:
        context["recording"] = Path(shown.out).name
    return context


def _print_results(
    console: Console, summary: SimulateSummary, operator: Operator, out: Path, shown: RerunSettings | None
) -> None:
    done: Rate = summary.success
    console.print(f"the arm completed {done.successes} of {done.n} tasks ({done}, {_CLOCK})")
    if summary.latency_s:
        p50, p95 = summary.latency_s["p50"] * 1e3, summary.latency_s["p95"] * 1e3
        rate = f"{summary.action_rate_hz:.1f} actions/s"
        console.print(f"observation-to-action latency: p50 {p50:.1f} ms, p95 {p95:.1f} ms; {rate}")
    for sentence in operator.motion.sentences():
        console.print(sentence, markup=False, highlight=False)
    if busy := summary.context["busy"]:
        console.print(busy, markup=False, highlight=False)
    console.print(f"report with films: {out / 'report.html'}")
    if shown is not None and shown.out:
        console.print(f"recording: rerun {out / RECORDING_FILE}")
