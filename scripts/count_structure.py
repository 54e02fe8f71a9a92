#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the structure of the product: files, imports between rooms, cycles, and the files that a frame passes through.

python scripts/count_structure.py                      # this checkout
python scripts/count_structure.py --root DIR --json    # another one, for comparison
python scripts/count_structure.py --walks              # files and calls that a reader meets from a function on
python scripts/count_structure.py --trace              # also runs the policy node on one image (needs ROS 2)

The product is specvla_ros and specvla_kernels. A room is a first-level folder or module of specvla_ros, or
specvla_kernels. All imports count, including those inside functions and for type checkers.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from call_walk import Code, Place

PACKAGE, KERNELS, LAB = "specvla_ros", "specvla_kernels", "lab"
# From the top down; imports go down or stay on a floor. Rooms without a floor may be imported by all others.
FLOORS = (
    ("lab/ros", "lab/cli"),
    ("lab/evaluation", "lab/simulation", "lab/training", "lab/planning"),
    ("lab/jobs", "lab/bags", "lab/bundled"),
    ("ros", "serving", "cli"),
    ("policy",),
    ("engine",),
    ("models", "speculation"),
    (KERNELS,),
)
ALONE = "control"  # neither imports a room with a floor nor is below one
LAB_ENTRY = "cli"  # the only room outside the laboratory that may import it: it starts its commands

# Walks by their first functions; several starts where a message, a thread or a callback is in between.
WALKS: Mapping[str, Sequence[str]] = {
    "image to submitted frame": (
        "ros.policy.inputs:ImageInput._receive",
        "ros.policy.inputs:ObservationInput._add_frame",
        "ros.policy.robot:RobotPart._on_frames",
    ),
    "tick": ("engine.engine:Engine.tick",),
    "outcome to action": ("ros.policy.robot:RobotPart.take_outcome",),
    "action to motion command": ("ros.driver.node:DriverNode._on_action", "ros.driver.node:DriverNode._step"),
    "motion command to robot": ("control.guard.guard:Guard.command", "ros.guard.node:GuardNode._tick"),
    "draft tree": (
        "speculation.drafters.eagle.drafter:EagleDrafter.draft",
        "engine.verifier:Verifier.prepare",
        "engine.verifier:Verifier.verify",
    ),
    "checkpoint to OpenVLA": ("models.families.openvla.target:load_openvla",),
    "checkpoint to Qwen-VL": ("models.families.qwen_vl.target:load_qwen_vl",),
    "checkpoint to StarVLA": ("models.families.starvla:load_starvla",),
    "checkpoint to pi0-FAST": ("models.families.pi0_fast.target:load_pi0_fast",),
    "checkpoint to MiniVLA": ("models.families.minivla:load_minivla",),
}

Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Module:
    """A Python file of the product.

    Args:
        path: the file.
        tree: its syntax tree.
        lines: number of lines.
    """

    path: Path
    tree: ast.Module
    lines: int


def product(root: Path) -> dict[str, Module]:
    """Returns a checkout's modules by dotted name; `__init__.py` has the package's name."""
    modules = {}
    for package, folder in folders(root).items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            modules[name] = Module(path, ast.parse(text), len(text.splitlines()))
    return modules


def folders(root: Path) -> dict[str, Path]:
    """Returns the folder of each package."""
    return {PACKAGE: root / PACKAGE, KERNELS: root / "kernels" / KERNELS}


def imports(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Returns the product's modules that each module imports, except the top package, which only has the version."""
    graph = {}
    for name, module in modules.items():
        package = name if module.path.name == "__init__.py" else name.rpartition(".")[0]
        found = {target for node in ast.walk(module.tree) for target in _targets(node, package)}
        known = {target if target in modules else target.rpartition(".")[0] for target in found}
        graph[name] = {target for target in known if target in modules} - {name, PACKAGE}
    return graph


def _targets(node: ast.AST, package: str) -> Iterable[str]:
    """Dotted names that a statement imports: modules or names in modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    source = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{source}.{alias.name}" for alias in node.names]


def room_of(module: str) -> str:
    """Returns a module's room; each of the laboratory's folders is a room."""
    top, *rest = module.split(".")
    if top == KERNELS or not rest:
        return top
    return "/".join(rest[:2]) if rest[0] == LAB and len(rest) > 1 else rest[0]


def arrows(graph: Graph) -> dict[str, set[str]]:
    """Returns the rooms that each room imports, except the laboratory from its entry, which is meant to climb."""
    rooms: dict[str, set[str]] = {room_of(module): set() for module in graph}
    for module, targets in graph.items():
        room = room_of(module)
        rooms[room] |= {room_of(target) for target in targets if room != LAB_ENTRY or not in_lab(target)} - {room}
    return rooms


def in_lab(module: str) -> bool:
    """Returns True for a module of the laboratory."""
    return module.startswith(f"{PACKAGE}.{LAB}.") or module == f"{PACKAGE}.{LAB}"


def into_lab(graph: Graph) -> list[str]:
    """Returns imports from outside into the laboratory, except its entry's."""
    return sorted(
        f"{module} -> {target}"
        for module, targets in graph.items()
        for target in targets
        if in_lab(target) and not in_lab(module) and room_of(module) != LAB_ENTRY
    )


def climbing(rooms: Graph) -> list[str]:
    """Returns the imports that violate `FLOORS` or `ALONE`."""
    floor = {room: number for number, names in enumerate(FLOORS) for room in names}
    found = []
    for room, targets in sorted(rooms.items()):
        for target in sorted(targets & floor.keys()):
            if room == ALONE or (room in floor and floor[target] < floor[room]):
                found.append(f"{room} -> {target}")
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Returns the groups in which every member reaches every other one."""
    reached = {start: _reachable(graph, start) for start in graph}
    groups = {
        frozenset(name for name in reached[start] if start in reached[name])
        for start in graph
        if start in reached[start]
    }
    return sorted(sorted(group) for group in groups)


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def private_functions(tree: ast.Module) -> tuple[int, int]:
    """Counts functions and methods with a leading underscore, and those referenced in only one place."""
    defined = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("_")
        and not node.name.endswith("__")
    }
    used = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return len(defined), sum(used[name] == 1 for name in defined)


def count(root: Path) -> dict[str, Any]:
    """Returns all static counts of a checkout."""
    modules = product(root)
    graph = imports(modules)
    rooms = arrows(graph)
    importers = Counter(target for targets in graph.values() for target in targets)
    plain = [name for name, module in modules.items() if module.path.name not in ("__init__.py", "__main__.py")]
    private = [private_functions(module.tree) for module in modules.values()]
    return {
        "files": len(modules),
        "files_without_init": sum(module.path.name != "__init__.py" for module in modules.values()),
        "lines": sum(module.lines for module in modules.values()),
        "lines_on_a_robot": sum(module.lines for name, module in modules.items() if not in_lab(name)),
        "lines_of_benchmarks": _lines_of(root / "benchmarks"),
        "rooms": len(rooms),
        "arrows": sum(map(len, rooms.values())),
        "climbing_arrows": climbing(rooms),
        "imports_into_lab": into_lab(graph),
        "circles_of_modules": circles(graph),
        "circles_of_rooms": circles(rooms),
        "modules_with_one_importer": sum(importers[name] == 1 for name in plain),
        "private_functions": sum(total for total, _ in private),
        "private_functions_used_once": sum(once for _, once in private),
    }


def walks(root: Path) -> dict[str, dict[str, Any]]:
    """Counts for each of `WALKS` the files, and the calls that climb, call back or return to an earlier file."""
    modules = product(root)
    code = Code({name: module.tree for name, module in modules.items()}, imports(modules))
    found = {}
    for name, starts in WALKS.items():
        places = [Place(f"{PACKAGE}.{start.partition(':')[0]}", start.partition(":")[2]) for start in starts]
        walk = code.walk(*places)
        kinds = {"climbs": walk.climbs, "callbacks": walk.callbacks, "returns": walk.returns}
        found[name] = {"files": len(walk.files)} | kinds
    return found


def _lines_of(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def trace(root: Path) -> list[str]:
    """Returns the product's files that a frame passes through from image message to action, see `_run_node`."""
    path = os.pathsep.join(str(folder.parent) for folder in folders(root).values())
    environment = os.environ | {"PYTHONPATH": path, "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
    command = [sys.executable, __file__, "--run-node"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"the policy node did not answer:\n{done.stderr}")
    entered = map(Path, json.loads(done.stdout.splitlines()[-1]))
    ours = tuple(folders(root).values())
    return sorted(str(file.relative_to(root)) for file in entered if any(map(file.is_relative_to, ours)))


def _run_node() -> None:
    """Prints the files entered while the policy node, in `ar` on the CPU, answers one image.

    A previous image has triggered all one-time loading; a new instruction in between requires a new prompt. A file is
    entered when a function of its module is called, including functions generated by dataclass.
    """
    entered: set[str] = set()
    tracing = threading.Event()

    def on_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and tracing.is_set():
            entered.add(str(frame.f_globals.get("__file__", "")))

    threading.setprofile(on_call)
    sys.setprofile(on_call)
    import rclpy
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.parameter import Parameter
    from sensor_msgs.msg import Image
    from std_msgs.msg import String

    import specvla_ros
    from specvla_ros.msg import VlaAction
    from specvla_ros.ros.policy.node import PolicyNode

    checkpoint = Path(specvla_ros.__path__[0]) / "lab" / "bundled" / "nano"
    chosen = {"checkpoint": str(checkpoint), "device": "cpu", "instruction": "lift the red cube"}
    rclpy.init()
    node = PolicyNode(parameter_overrides=[Parameter(name, value=value) for name, value in chosen.items()])
    user = rclpy.create_node("user", enable_rosout=False)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    executor.add_node(user)
    actions: list[VlaAction] = []
    user.create_subscription(VlaAction, "/policy/action", actions.append, 1)
    images = user.create_publisher(Image, "image", 1)
    instructions = user.create_publisher(String, "instruction", 1)

    def spin(seconds: float, until: Callable[[], object]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            executor.spin_once(timeout_sec=0.05)

    def act() -> str:
        """Sends an image and returns the instruction of the resulting action."""
        message = Image(height=64, width=64, encoding="rgb8", step=192, data=bytes(64 * 192))
        seen, deadline = len(actions), time.monotonic() + 50
        while len(actions) == seen and time.monotonic() < deadline:  # the first may be too old once all is loaded
            message.header.stamp = node.get_clock().now().to_msg()
            images.publish(message)
            spin(5, until=lambda: len(actions) > seen)
        return str(actions[-1].instruction)

    assert node.trigger_configure().name == node.trigger_activate().name == "SUCCESS"
    spin(60, until=lambda: images.get_subscription_count() and user.count_publishers("/policy/action"))
    act()
    instructions.publish(String(data="lift the green cube"))
    spin(2, until=lambda: False)
    tracing.set()
    assert act() == "lift the green cube"
    tracing.clear()
    node.close()
    rclpy.try_shutdown()
    print(json.dumps(sorted(entered)))


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="checkout to count")
    parser.add_argument("--trace", action="store_true", help="also count the files between image message and action")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--walks", action="store_true", help="follow calls through the product (see WALKS)")
    parser.add_argument("--run-node", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_node:
        _run_node()
        return
    root = options.root.resolve()
    counts = count(root)
    if options.walks:
        _print_walks(walks(root), as_json=options.json)
        return
    if options.trace:
        counts["files_from_image_to_action"] = trace(root)
    print(json.dumps(counts, indent=2) if options.json else "\n".join(_lines(counts)))


def _print_walks(found: Mapping[str, Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'':26}{'files':>8}{'climbs':>8}{'callbacks':>11}{'returns':>9}")
    for name, walk in found.items():
        climbs, callbacks, returns = (len(walk[kind]) for kind in ("climbs", "callbacks", "returns"))
        print(f"{name:26}{walk['files']:>8}{climbs:>8}{callbacks:>11}{returns:>9}")


def _lines(counts: Mapping[str, Any]) -> Iterable[str]:
    for name, found in counts.items():
        members = found if isinstance(found, list) else []
        yield f"{name.replace('_', ' '):32}{len(members) if isinstance(found, list) else found:>8}"
        yield from (f"    {member if isinstance(member, str) else ', '.join(member)}" for member in members)


if __name__ == "__main__":
    main()
