# SPDX-License-Identifier: Apache-2.0
"""Checks the installation: what is installed, what is missing, and how to fix it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module, metadata


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    state: str  # `ok`, `missing` (required, and does not work) or `note` (optional)
    found: str
    fix: str = ""  # what to do


# Required by policy, driver, guard and task; and optional packages with the reason to install them.
_LIBRARIES = ("numpy", "pillow", "safetensors", "tokenizers", "mcap", "lz4", "zstandard", "pyyaml", "ruckig")
_INSTALL = "pip install -r requirements/runtime.txt; on a robot with an apt ROS 2 -r requirements/robot.txt"
_WITHOUT = {
    "mujoco": "only a joints.model and the simulator need it: pip install -r requirements/robot-joints.txt",
    "mink": "only the driver's joint outputs need it: pip install -r requirements/robot-joints.txt",
    "typer": "all specvla commands but doctor need it: pip install -r requirements/lab.txt",
    "rich": "all specvla commands but doctor need it: pip install -r requirements/lab.txt",
    "rosbags": "only replay and training from bags need it: pip install -r requirements/lab.txt",
    "plotly": "only reports need it: pip install -r requirements/lab.txt",
    "av": "only LeRobot datasets, video topics and the simulator's films need it: pip install -r requirements/lab.txt",
    "pyarrow": "only LeRobot datasets need it: pip install -r requirements/lab.txt",
    "transformers": "only NORA, VLA-0 and pi0-FAST need it: pip install -r requirements/robot-transformers.txt",
    "simplejpeg": "only OpenVLA-OFT needs it: pip install -r requirements/robot-oft.txt",
    "accelerate": "only training needs it: pip install -r requirements/train.txt",
    "torchao": "only int4 on a GPU needs it: pip install torchao (0.18 goes with torch 2.13)",
}
_INTERFACES = ("VlaAction", "DecodeStats", "GuardState", "Reasoning", "SimEpisode", "RunTask")
_COLOURS = {"ok": 32, "missing": 31, "note": 33}  # terminal colour codes


def report(*, as_json: bool) -> int:
    """Prints the findings; needs no library. Returns exit code 1 if something required is missing."""
    checks = examine()
    if as_json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        for check in checks:
            print(f"{_coloured(check.state)}{check.name:15} {check.found}")
            if check.fix:
                print(f"{'':8}{'':15} -> {check.fix}")
    return int(any(check.state == "missing" for check in checks))


def _coloured(state: str) -> str:
    return f"\x1b[{_COLOURS[state]}m{state:8}\x1b[0m" if sys.stdout.isatty() else f"{state:8}"


def examine() -> list[Check]:
    """Examines this machine. Never raises: a broken installation is a finding."""
    return [
        _python(),
        *_torch(),
        *_kernels(),
        _compiler(),
        *(_package(name, _INSTALL) for name in _LIBRARIES),
        _image_converter(),
        *(_package(name, fix, absent="note") for name, fix in _WITHOUT.items()),
        _attempt("OpenGL", _opengl, "only the simulator needs it: apt-get install libosmesa6", state="note"),
        *_ros(),
        _receive_buffer(),
    ]


def _attempt(name: str, look: Callable[[], str | Check], fix: str, *, state: str = "missing") -> Check:
    """Runs a check whose imports may be absent or broken."""
    try:
        found = look()
        return found if isinstance(found, Check) else Check(name, "ok", found)
    except ImportError as error:
        return Check(name, state, str(error), fix)
    except Exception as error:  # a half-installed library can raise anything
        return Check(name, state, f"{type(error).__name__}: {error}", fix)


def _python() -> Check:
    version = sys.version.split()[0]
    good = (3, 10) <= sys.version_info[:2] <= (3, 13)
    fix = "apt install python3.12 python3.12-venv, then make PYTHON=python3.12 …; 3.10 to 3.13 are supported"
    return Check("python", "ok" if good else "missing", version, "" if good else fix)


def _package(name: str, fix: str, *, absent: str = "missing") -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, absent, "not installed", fix)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "version unknown"


def _image_converter() -> Check:
    """Finds the converter from raw images of all encodings to RGB: ROS' cv_bridge, or the rosbags-image wheel."""

    def converter(module: str, named: str) -> str:
        import_module(module)
        return f"by {named}, OpenCV {import_module('cv2').__version__}"

    fix = "apt install ros-<distro>-cv-bridge, or pip install rosbags-image opencv-python-headless"
    found = _attempt("raw images", lambda: converter("cv_bridge", "cv_bridge"), fix)
    if found.state == "ok":
        return found
    return _attempt("raw images", lambda: converter("rosbags.image", f"rosbags-image {_version('rosbags-image')}"), fix)


def _torch() -> list[Check]:
    install = "pip install torch==2.13.0; on a Jetson use NVIDIA's wheel for your JetPack"

    def gpu() -> str | Check:
        import torch

        if not torch.cuda.is_available():
            return Check(
                "GPU",
                "note",
                "none",
                "policies run on the CPU in float32, where drafting rarely pays off. If there is a GPU: nvidia-smi "
                f"must list it, and torch must be a CUDA build: {install}",
            )
        properties = torch.cuda.get_device_properties(0)
        memory = properties.total_memory / 2**30
        capability = f"sm_{properties.major}{properties.minor}"
        return f"{properties.name}, {memory:.0f} GiB, {capability}, CUDA {torch.version.cuda}"

    found = _attempt("torch", lambda: str(import_module("torch").__version__), install)
    return [found, _attempt("GPU", gpu, install, state="note")] if found.state == "ok" else [found]


def _kernels() -> list[Check]:
    """Checks the requirements of the Triton kernels, which run on GPUs; without them PyTorch references run."""
    try:
        import torch

        on_gpu = torch.cuda.is_available()
    except Exception:  # reported by the check of torch
        return []
    lost = "without it policies decode on PyTorch references, several times slower"
    slow = f"; {lost if on_gpu else 'only needed on a GPU'}"

    def noted(name: str, fault: str, found: str, fix: str) -> Check:
        return Check(name, "note" if fault else "ok", found, fix if fault else "")

    def triton() -> Check:
        from specvla_kernels.device import triton_fault

        version = import_module("triton").__version__
        old = triton_fault(version)
        return noted("triton", old, version, f"{old}{slow}")

    def build() -> Check:
        from specvla_kernels.device import build_fault

        fault = build_fault()
        found = "incomplete" if fault else "a C compiler and Python.h"
        return noted("triton's compiler", fault, found, f"{fault}{slow}")

    def trial() -> Check:
        from specvla_kernels.device import why_no_kernels

        why = why_no_kernels(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
        return noted("kernels", why, "PyTorch references" if why else "by Triton", why)

    looks = {"triton": triton, "triton's compiler": build} | ({"kernels": trial} if on_gpu else {})
    return [
        _attempt(name, look, f"pip install triton==3.7.1, the version of torch 2.13{slow}", state="note")
        for name, look in looks.items()
    ]


def _compiler() -> Check:
    """Looks for the compiler of a decoder's layers, for decoding on a CPU."""
    wanted = " ".join(os.environ.get("CXX", "").split()) or "g++"
    if found := shutil.which(wanted.split()[0]):
        return Check("C++ compiler", "ok", found)
    slow = "on a CPU, small policies decode up to twice as slow without it: apt install g++, or set CXX"
    return Check("C++ compiler", "note", f"no {wanted}", slow)


def _opengl() -> str:
    from specvla_ros.lab.simulation import require_gl

    return f"offscreen with MUJOCO_GL={require_gl()}"


def _ros() -> list[Check]:
    def rclpy() -> str:
        module = import_module("rclpy")
        distro = os.environ.get("ROS_DISTRO", "wheels")
        return f"{_version('rclpy')} ({distro}) at {os.path.dirname(str(module.__file__))}"

    def rmw() -> str:
        return str(import_module("rclpy.utilities").get_rmw_implementation_identifier())

    def messages() -> str:
        built = {**vars(import_module("specvla_ros.msg")), **vars(import_module("specvla_ros.action"))}
        if lacking := [name for name in _INTERFACES if name not in built]:
            raise ImportError(f"built from another version: {', '.join(lacking)} is missing")
        return ", ".join(_INTERFACES)

    sourced = (
        "needed by the nodes and the demo, not in the pip wheel: source /opt/ros/<distro>/setup.bash, or run make "
        "build on a machine without ROS 2"
    )
    if fault := _rmw_fault():
        return [fault]
    found = _attempt("rclpy", rclpy, sourced)
    if found.state != "ok":
        return [found]
    install = "apt install ros-<distro>-rmw-fastrtps-cpp, then source /opt/ros/<distro>/setup.bash"
    build = "colcon build and source install/setup.bash, or make build; not in the pip wheel"
    path, transports = shutil.which("ros2"), os.environ.get("FASTDDS_BUILTIN_TRANSPORTS", "")
    no_tools = Check(
        "ros2 tools",
        "note",
        "no ros2 on the PATH",
        "make ros2 beside the wheels of make build; else apt install ros-<distro>-ros-base",
    )
    lost = (
        "if raw images over 0.5 MB get lost: export FASTDDS_BUILTIN_TRANSPORTS=LARGE_DATA before starting each process"
    )
    return [
        found,
        _attempt("RMW", rmw, install),
        _attempt("messages", messages, build),
        Check("ros2 tools", "ok", path) if path else no_tools,
        Check("DDS transports", *(("ok", transports) if transports else ("note", "FastDDS' default", lost))),
    ]


def _rmw_fault() -> Check | None:
    """Imports rclpy in a process of its own: with a wrong RMW_IMPLEMENTATION rcl ends the process that does."""
    wanted = os.environ.get("RMW_IMPLEMENTATION", "")
    if not wanted:
        return None
    code = "try: import rclpy\nexcept Exception: pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, errors="replace")
    if not done.returncode:
        return None
    last = (done.stderr.strip().splitlines() or [f"rcl ends with code {done.returncode}"])[-1]
    said = last.split(", at ")[0].rpartition("]: ")[2]  # without the log's time and the position in a C file
    fix = f"unset RMW_IMPLEMENTATION, or apt install ros-<distro>-{wanted.replace('_', '-')}"
    return Check("RMW", "missing", f"RMW_IMPLEMENTATION is {wanted}: {said}", fix)


def _receive_buffer() -> Check:
    path = "/proc/sys/net/core/rmem_max"
    fix = "for raw images from another machine: sudo sysctl -w net.core.rmem_max=8388608"
    try:
        with open(path, encoding="ascii") as file:
            size = int(file.read())
    except (OSError, ValueError):
        return Check("UDP buffer", "note", f"{path} cannot be read", fix)
    if size >= 2**21:
        return Check("UDP buffer", "ok", f"{size} bytes")
    return Check("UDP buffer", "note", f"{size} bytes", fix)
