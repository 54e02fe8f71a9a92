# SPDX-License-Identifier: Apache-2.0
"""Robots to act on: a MuJoCo table, its tasks and experts, rollouts, and the LIBERO suites."""

import contextlib
import ctypes.util
import os
from collections.abc import MutableMapping

from specvla_ros.errors import UserError

with contextlib.suppress(ImportError):
    # Torch imports it later anyway. Its LLVM must be loaded before Mesa's, which MuJoCo loads, or the process ends.
    import triton  # noqa: F401


def choose_gl(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Sets MUJOCO_GL, which MuJoCo reads when it is first imported, unless it is set; None: no backend was found.

    EGL comes first where there is a GPU. Without one OSMesa does: EGL's software fallback needs a DRI driver beside it.
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
    """The backend's name."""
    backend = choose_gl()
    if backend is None:
        raise UserError(
            "no OpenGL that draws without a screen: neither libOSMesa nor libEGL was found. Install Mesa's software "
            "renderer (apt-get install libosmesa6) or the GPU's driver"
        )
    if backend not in ("egl", "osmesa") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UserError(f"MUJOCO_GL={backend} draws on a screen, and there is none: unset it, or set egl or osmesa")
    return backend


# Here, since MuJoCo chooses its OpenGL once, when it is first imported.
choose_gl()
