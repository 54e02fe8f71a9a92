# SPDX-License-Identifier: Apache-2.0
"""Likely mistakes in a robot's parameter file that driver and guard do not refuse, in words."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specvla_ros.settings.parameter import walk
from specvla_ros.settings.profiles import read_parameter_file

if TYPE_CHECKING:
    from specvla_ros.control.limits import Joints

_NODES = ("policy", "driver", "guard", "task", "sim_robot", "bag_player", "live_view")
_OF_A_ROBOT = ("driver", "guard", "task")
_SOURCE = "frankaemika.github.io/docs/control_parameters.html"
# By unit: a Panda's limit by its data sheet, the highest among its joints or of its tool.
_OF_A_PANDA = {"m/s": 1.7, "rad/s": 2.61, "m/s²": 13.0, "rad/s²": 20.0}
_TIMES = 5  # other arms are faster, but not by this factor
_MAX_TURN = 2 * np.pi
_SAME_RAD = 1e-3  # rounding of a range
_SAME_SPEED = 1.001  # times a speed: its rounding


def namespaces(file: Path) -> list[str]:
    """The namespaces of the file's sections, such as left of /left/driver or /left/**; else only ""."""
    keys = [str(key).strip("/").rpartition("/") for key in read_parameter_file(file)]
    found = {namespace for namespace, _, node in keys if node in ("**", *_OF_A_ROBOT) and "*" not in namespace}
    return sorted(found - {""}) or [""]


def stray_sections(file: Path) -> Iterator[tuple[str, bool]]:
    """Values that no node reads, in words, and whether they are surely mistakes: another program may read others."""
    for key, section in read_parameter_file(file).items():
        node = str(key).strip("/").rpartition("/")[2]
        if node not in ("**", *_NODES):
            close = difflib.get_close_matches(node, _NODES, n=1)
            text = f"section {key} belongs to no node of this package, so none reads its values"
            yield text + (f"; did you mean /{close[0]}?" if close else ""), bool(close)
        elif isinstance(section, dict) and "ros__parameters" in section:
            for name in section:
                if name != "ros__parameters":
                    text = f"{key} has '{name}' beside ros__parameters, where no node reads it"
                    yield f"{text}: indent it under ros__parameters", True


def too_large(settings: Any) -> Iterator[str]:
    """Notes on values that look like degrees or millimetres."""
    for each in walk(settings):
        value = np.abs(np.atleast_1d(each.value)).max() if each.parameter.unit and each.value else 0.0
        if each.name.startswith("gripper.") and each.parameter.unit == "m or rad" and value > _MAX_TURN:
            yield (
                f"{each.name} is {each.value:g}: a gripper's position is in metres or radians; is this in millimetres "
                "or degrees?"
            )
        unit = each.parameter.unit.partition(" or ")[0]
        if unit in _OF_A_PANDA and value > _TIMES * _OF_A_PANDA[unit]:
            yield (
                f"{each.name} is {value:g} {each.parameter.unit}, but a Panda has at most {_OF_A_PANDA[unit]:g} "
                f"({_SOURCE}); is it in degrees or millimetres?"
            )


def wider_than_model(joints: "Joints") -> Iterator[str]:
    """Given ranges that exceed those of `joints.model`."""
    import mujoco

    from specvla_ros.control.robot_model import load_robot_model

    if not joints.has_positions:
        return
    joints.require_positions("joints.model")
    model = load_robot_model(Path(joints.model).expanduser()).model
    for name, low, high in zip(joints.in_model, joints.position_min, joints.position_max, strict=True):
        joint = model.joint(name)
        given = f"joints.position_min and position_max are {low:g} to {high:g} for {name}"
        first, last = joint.range
        if joint.limited[0] and (low < first - _SAME_RAD or high > last + _SAME_RAD):
            unit = "radians" if joint.type[0] == mujoco.mjtJoint.mjJNT_HINGE else "metres"
            yield (
                f"{given}, but joints.model allows {first:.4g} to {last:.4g}: the arm may hit its ends. Give them in "
                f"{unit}, within the model's range; or leave both out, and the model's apply"
            )
        elif joint.type[0] == mujoco.mjtJoint.mjJNT_HINGE and max(-low, high) > _MAX_TURN + _SAME_RAD:
            yield f"{given}, more than a turn to one side: give them in radians"


def faster_than_model(joints: "Joints", speeds: np.ndarray) -> Iterator[str]:
    """Speeds, float64 [joints], that exceed those of a URDF's <limit velocity>."""
    import mujoco

    from specvla_ros.control.robot_model import load_robot_model

    robot = load_robot_model(Path(joints.model).expanduser())
    for name, speed in zip(joints.in_model, speeds.tolist(), strict=True):
        known = robot.max_speed.get(name, 0.0)
        if 0 < known * _SAME_SPEED < speed:
            unit = "rad/s" if robot.model.joint(name).type[0] == mujoco.mjtJoint.mjJNT_HINGE else "m/s"
            yield (
                f"joints.max_speed is {speed:g} {unit} for {name}, but joints.model has {known:g}: the arm may refuse "
                "or stop at commands that fast; lower it, or leave it out, and the model's apply"
            )
