# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/parameters.md: `python scripts/parameter_reference.py > docs/reference/parameters.md`."""

from collections.abc import Iterable

from specvla_ros.settings.parameter import Declared, walk

_HEAD = """# Parameters

Written by `python scripts/parameter_reference.py` from the settings that declare them; `ros2 param describe` says the
same.

Parameters are set in a ROS 2 parameter file (`params_file:=` of the launch files, `--params-file` of the commands), by
`-p name:=value` (`ros2 run … --ros-args`; those of loading, `decode.*`, `draft.*` and `acceptance.*` also at every
command that runs a policy) and in Python by keywords with underscores for dots (`draft_nodes=16`). Those marked *live*
may change while the
node runs. The policy reads the others when it is configured (`image_transport` and `image_reliability` when it is
activated): they change before, and are refused afterwards with the transitions that are needed.

The basic ones, which a robot sets, come first, and then all; `--help` of the commands shows the basic ones alone.
"""
_ROBOT = ("policy", "driver", "guard")


def reference() -> str:
    """The page, Markdown."""
    from specvla_ros.control.guard.settings import GuardParameters
    from specvla_ros.lab.ros.bag_player import BagPlayerParameters
    from specvla_ros.lab.ros.live_view import LiveViewParameters
    from specvla_ros.lab.ros.sim_robot.episodes import SimRobotParameters
    from specvla_ros.policy_parameters import PolicyParameters, SharedParameters
    from specvla_ros.ros.driver.parameters import DriverParameters
    from specvla_ros.ros.task import TaskParameters

    nodes = {
        "policy": PolicyParameters(),
        "<robot>/policy": SharedParameters(),
        "driver": DriverParameters(),
        "guard": GuardParameters(),
        "task": TaskParameters(),
        "sim_robot": SimRobotParameters(),
        "bag_player": BagPlayerParameters(),
        "live_view": LiveViewParameters(),
    }
    declared = {name: [*walk(settings)] for name, settings in nodes.items()}
    basic = {name: [each for each in declared[name] if each.parameter.basic] for name in _ROBOT}
    first = [_table(f"## Basic parameters of node `{name}`", found) for name, found in basic.items()]
    return "\n".join([_HEAD, *first, *(_table(f"## Node `{name}`", found) for name, found in declared.items())])


def _table(heading: str, declared: Iterable[Declared]) -> str:
    lines = [heading, "", "| parameter | default | values | unit | live | |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, declared), ""])


def _row(declared: Declared) -> str:
    parameter = declared.parameter
    cells = (
        f"`{declared.name}`",
        f"`{_yaml(declared.value)}`",
        ", ".join(f"`{each}`" for each in parameter.allowed) or parameter.range,
        parameter.unit,
        "live" if parameter.writable else "",
        parameter.description,
    )
    return f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |"


def _yaml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or '""'


if __name__ == "__main__":
    print(reference(), end="")
