# SPDX-License-Identifier: Apache-2.0
"""Simulated robots: a MuJoCo table with its tasks and experts, rollouts, and the LIBERO suites."""

import contextlib
import ctypes.util
import os
from collections.abc import MutableMapping

from specvla_ros.errors import UserError

with contextlib.suppress(ImportError):
    # Torch imports Triton later anyway. Its LLVM must load before Mesa's, which MuJoCo loads, or the process crashes.
    import triton  # noqa: F401


def choose_gl(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Sets MUJOCO_GL, which MuJoCo reads on import, unless it is already set; returns None if no backend was found.

    EGL is preferred with a GPU, OSMesa without one: EGL's software fallback also needs a DRI driver.
    """
    if environ.get("MUJOCO_GL"):
        return environ["MUJOCO_GL"].lower()
    gpu = any(os.path.exists(device) for device in ("/dev/nvidia0", "/dev/dri"))
    for library in ("EGL", "OSMesa") if gpu else ("OSMesa", "EGL"):
        if ctypes.util.find_library(library):
            environ["MUJOCO_GL"] = library.lower()
            return library.lower()
    return None


def require_gl() -> str:
    """Returns the OpenGL backend's name, or raises UserError if none can render offscreen."""
    backend = choose_gl()
    if backend is None:
        raise UserError(
            "no OpenGL for offscreen rendering: neither libOSMesa nor libEGL was found. Install Mesa's software "
            "renderer (apt-get install libosmesa6) or the GPU's driver"
        )
    if backend not in ("egl", "osmesa") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UserError(f"MUJOCO_GL={backend} needs a display, but none is available: unset it, or set egl or osmesa")
    return backend


# Must run before MuJoCo is imported: it chooses its OpenGL backend once, on import.
choose_gl()
