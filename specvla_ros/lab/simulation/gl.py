# SPDX-License-Identifier: Apache-2.0
"""Which OpenGL draws offscreen on this machine."""

import ctypes.util
import os
from collections.abc import MutableMapping

from specvla_ros.errors import UserError

_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}


def choose_gl(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Sets MUJOCO_GL, which MuJoCo reads when it is first imported, unless it is set; None: no backend was found.

    EGL comes first where there is a GPU. Without one OSMesa does: EGL's software fallback needs a DRI driver beside it.
    """
    if environ.get("MUJOCO_GL"):
        return environ["MUJOCO_GL"].lower()
    gpu = any(os.path.exists(device) for device in ("/dev/nvidia0", "/dev/dri"))
    for backend in ("egl", "osmesa") if gpu else ("osmesa", "egl"):
        if ctypes.util.find_library(_LIBRARIES[backend]):
            environ["MUJOCO_GL"] = backend
            return backend
    return None


def require_gl() -> str:
    """The backend's name."""
    backend = choose_gl()
    if backend is None:
        raise UserError(
            "no OpenGL that draws without a screen: neither libOSMesa nor libEGL was found. Install Mesa's software "
            "renderer (apt-get install libosmesa6) or the GPU's driver"
        )
    return backend
