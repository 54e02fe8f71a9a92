#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds this checkout with colcon like a user's workspace, and checks the installed files.

python scripts/colcon_build.py        # plain, with --symlink-install, and the interfaces alone

Each build has a separate workspace with a clone of the last commit and the changes since then. Needs ROS 2 and
colcon-ros (requirements/colcon.txt).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "plain": [],
    "symlink": ["--symlink-install"],
    "interfaces": ["--cmake-args", "-DSPECVLA_INTERFACES_ONLY=ON"],
}
MESSAGES = (
    "from specvla_ros.msg import VlaAction, DecodeStats, SimEpisode, Reasoning; "
    "from specvla_ros.action import RunTask; "
    "print(VlaAction.__module__)"
)
NODES = (
    "import specvla_kernels, specvla_ros.ros.guard.node, specvla_ros.ros.driver.node; "
    "from specvla_ros.lab.bags.message_types import MessageTypes; MessageTypes(); "
    "print(specvla_ros.__file__)"
)
SHARE = ("package.xml", "msg/VlaAction.msg", "action/RunTask.action")
PROGRAMS = ("policy", "driver", "guard", "task", "sim_robot", "bag_player", "live_view")


def checkout(source: Path) -> Path:
    """Copies tracked and untracked files, except ignored ones, into a workspace's source folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    return source


def build(workspace: Path, arguments: list[str]) -> Path:
    """Runs colcon and returns the package's install prefix.

    Raises:
        CalledProcessError: The build fails.
    """
    python = [f"-DPython3_EXECUTABLE={sys.executable}"]
    extra = arguments if "--cmake-args" in arguments else [*arguments, "--cmake-args"]
    command = ["colcon", "build", *extra, *python]
    subprocess.run(command, cwd=workspace, check=True)
    return workspace / "install" / "specvla_ros"


def check(prefix: Path, *, interfaces_only: bool, linked: bool) -> None:
    """Imports the installed package from the install tree alone.

    Raises:
        CalledProcessError, AssertionError: Something is missing, or present although it should not be.
    """
    share = prefix / "share" / "specvla_ros"
    for name in SHARE:
        assert (share / name).exists(), f"{share / name} is missing"
    (packages,) = prefix.glob("lib/python*/site-packages")
    paths = os.pathsep.join((str(packages), os.environ.get("PYTHONPATH", "")))
    libraries = os.pathsep.join((str(prefix / "lib"), os.environ.get("LD_LIBRARY_PATH", "")))
    environment = os.environ | {"PYTHONPATH": paths, "LD_LIBRARY_PATH": libraries}

    def imported(code: str) -> str:
        command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-c", code]
        return subprocess.run(
            command, env=environment, cwd=prefix, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    assert imported(MESSAGES).startswith("specvla_ros.msg")
    installed = packages / "specvla_ros" / "__init__.py"
    if interfaces_only:
        assert not (packages / "specvla_kernels").exists() and not (packages / "specvla_ros" / "engine").exists()
        assert not (prefix / "lib" / "specvla_ros").exists() and not (share / "launch").exists()
        return
    assert Path(imported(NODES).strip()) == installed
    assert installed.is_symlink() is linked, f"{installed} is {'a link' if installed.is_symlink() else 'a copy'}"
    assert (share / "launch" / "bringup.launch.py").exists() and (share / "config" / "orin.yaml").exists()
    for name in PROGRAMS:
        assert os.access(prefix / "lib" / "specvla_ros" / name, os.X_OK), f"{name} is not executable"


def main() -> None:
    """Builds and checks all variants; the exit code is 0 if all are correct."""
    for way, arguments in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="specvla-workspace-") as directory:
            workspace = Path(directory)
            checkout(workspace / "src" / "specvla_ros")
            prefix = build(workspace, arguments)
            check(prefix, interfaces_only=way == "interfaces", linked=way == "symlink")
            print(f"colcon build, {way}: built and imported", flush=True)


if __name__ == "__main__":
    main()
