"""The demo: camera frames through real ROS 2 topics into a policy, actions out."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.client import Client
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from rich.console import Console
from rich.live import Live
from rich.table import Table

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.evaluation.bag_reader import open_bag
from specvla_ros.evaluation.rendered_bag import write_rendered_bag
from specvla_ros.evaluation.replay import replay
from specvla_ros.image_message import stamp_ns
from specvla_ros.models.policy import load_policy
from specvla_ros.models.random_checkpoint import write_random_checkpoint
from specvla_ros.msg import VlaAction
from specvla_ros.nodes.qos import ACTION

INSTRUCTION = "pick up the red cube"
FRAMES = 50
_CONFIGURE_TIMEOUT_S = 120.0
_PLAY_TIMEOUT_S = 60.0
_SHOWN = 8


class _Watcher(Node):
    """Brings the policy node up and collects its actions."""

    def __init__(self, on_action: Callable[[VlaAction], None]) -> None:
        super().__init__("demo")
        self._change_state: Client = self.create_client(ChangeState, "/policy/change_state")
        self.create_subscription(VlaAction, "/policy/action", on_action, ACTION)

    def bring_up(self, policy: "subprocess.Popen[bytes]") -> None:
        """Configures and activates the policy.

        Raises:
            UserError: it cannot be reached or refuses.
        """
        deadline = time.monotonic() + _CONFIGURE_TIMEOUT_S
        while not self._change_state.wait_for_service(timeout_sec=0.5):
            if policy.poll() is not None or time.monotonic() > deadline:
                raise UserError("the policy node did not come up; `specvla doctor` says what to fix")
        for transition in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE):
            future = self._change_state.call_async(ChangeState.Request(transition=Transition(id=transition)))
            rclpy.spin_until_future_complete(self, future, timeout_sec=_CONFIGURE_TIMEOUT_S)
            response = future.result() if future.done() else None
            if response is None or not response.success:
                raise UserError("the policy node refused to start; its own message above says why")


def run_demo(out: Path) -> int:
    """Writes a random checkpoint and a rendered bag, plays them live and in process, and compares.

    Returns:
        0 when actions came out live and equal those in process, else 1.
    """
    # A policy with random weights must not be heard by a robot on the network.
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    console = Console()
    console.print("[bold]specvla demo[/bold]: rendered camera frames → ROS 2 topics → an OpenVLA policy → actions")
    console.print("[yellow]The weights are random: the actions mean nothing yet. Everything else is real.[/yellow]")
    checkpoint, bag = _prepare(out)
    actions: dict[int, VlaAction] = {}
    try:
        _play_live(console, checkpoint, bag, actions)
    except (KeyboardInterrupt, ExternalShutdownException):
        console.print("interrupted")
        return 1
    latencies = [action.latency_s * 1e3 for action in actions.values()]
    console.print(f"\nlive: {len(actions)} of {FRAMES} frames answered, each stamped with its frame")
    if latencies:
        p50, p95 = np.percentile(latencies, (50, 95))
        console.print(f"observation-to-action latency: p50 {p50:.1f} ms, p95 {p95:.1f} ms")
    equal = _compare_in_process(console, out, checkpoint, bag, actions)
    return 0 if equal and actions else 1


def _prepare(out: Path) -> tuple[Path, Path]:
    checkpoint, bag = out / "checkpoint", out / "bag"
    for name in ("checkpoint", "bag", "replay"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_random_checkpoint(checkpoint)
    write_rendered_bag(bag, frames=FRAMES, instruction=INSTRUCTION)
    return checkpoint, bag


def _play_live(console: Console, checkpoint: Path, bag: Path, actions: dict[int, VlaAction]) -> None:
    policy = _start(
        "policy", f"checkpoint:={checkpoint}", "device:=cpu", "use_sim_time:=true", image_topic="/camera/image_raw"
    )
    player = None
    rclpy.init(args=[])
    with Live(console=console, refresh_per_second=8, vertical_overflow="crop") as view:

        def on_action(action: VlaAction) -> None:
            actions[stamp_ns(action.header)] = action
            view.update(_table(actions))

        watcher = _Watcher(on_action)
        try:
            watcher.bring_up(policy)
            player = _start("bag_player", f"bag:={bag}", "wait_for_subscriber:=/camera/image_raw")
            deadline = time.monotonic() + _PLAY_TIMEOUT_S
            while player.poll() is None and policy.poll() is None and time.monotonic() < deadline:
                rclpy.spin_once(watcher, timeout_sec=0.1)
            for _ in range(5):  # the last action may still be on its way
                rclpy.spin_once(watcher, timeout_sec=0.1)
        finally:
            for process in (player, policy):
                _stop(process)
            watcher.destroy_node()
            rclpy.try_shutdown()


def _start(name: str, *parameters: str, image_topic: str = "") -> "subprocess.Popen[bytes]":
    arguments = [part for parameter in parameters for part in ("-p", parameter)]
    if image_topic:
        arguments += ["-r", f"image:={image_topic}", "-r", f"image/compressed:={image_topic}/compressed"]
    code = f"from specvla_ros.nodes.{name} import main; main()"
    quiet = ["--log-level", "warn"]
    return subprocess.Popen([sys.executable, "-c", code, "--ros-args", *arguments, *quiet])


def _stop(process: "subprocess.Popen[bytes] | None") -> None:
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _table(actions: dict[int, VlaAction]) -> Table:
    newest = list(actions.values())[-_SHOWN:]
    table = Table(title=f"/policy/action   “{newest[-1].instruction}”   {len(actions)} actions")
    for name in ("stamp", *newest[-1].names, "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    first_ns = min(actions)
    for action in newest:
        values = (f"{value:+.2f}" for value in action.values)
        stamp = f"+{(stamp_ns(action.header) - first_ns) * 1e-9:.1f} s"
        table.add_row(stamp, *values, f"{action.latency_s * 1e3:.0f}")
    return table


def _compare_in_process(
    console: Console, out: Path, checkpoint: Path, bag: Path, actions: dict[int, VlaAction]
) -> bool:
    """Replays the same bag without DDS; True when all live actions equal the replayed ones."""
    replay(load_policy(checkpoint, device="cpu"), EngineSettings(), bag, out / "replay", progress=False)
    with open_bag(out / "replay" / "actions_bag") as recorded:
        replayed = {stamp_ns(each.message().header): each.message() for each in recorded.messages(("/policy/action",))}
    equal = sum(
        stamp in replayed and list(replayed[stamp].tokens) == list(action.tokens) for stamp, action in actions.items()
    )
    console.print(f"in process: {len(replayed)} actions, {equal} of {len(actions)} live actions are equal")
    console.print(f"report: {out / 'replay' / 'report.html'}")
    return equal == len(actions)
