"""Offscreen pictures of the simulated table."""

import sys

import mujoco
import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.simulation.gl import require_gl
from specvla_ros.simulation.world import CAMERA, World


class Camera:
    """The table's camera. Belongs to the thread that made it: an OpenGL context cannot be shared.

    Args:
        world: that it looks at.
        width: of the picture, pixels.
        height: of the picture, pixels.

    Raises:
        UserError: the machine cannot draw offscreen.
    """

    def __init__(self, world: World, width: int, height: int) -> None:
        backend = require_gl()
        self._world = world
        try:
            self._renderer = mujoco.Renderer(world.model, height, width)
        except Exception as error:  # each backend raises its own kind
            raise UserError(
                f"MuJoCo cannot draw with MUJOCO_GL={backend} ({error}); set MUJOCO_GL to osmesa (CPU) or egl (GPU), "
                "and install libosmesa6 or the GPU's driver"
            ) from None
        self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self._closed = False

    def render(self) -> np.ndarray:
        """The present picture, uint8 [height, width, 3], RGB."""
        self._renderer.update_scene(self._world.data, CAMERA)
        return self._renderer.render().copy()

    def close(self) -> None:
        """Frees the OpenGL context."""
        if self._closed:
            return
        self._closed = True
        # A render makes this camera's context the current one. Freed under another one, what is deleted are the
        # textures of that other camera, whose pictures are garbage from then on.
        self._renderer.render()
        self._renderer.close()

    def __del__(self) -> None:
        # At the end of the process the OpenGL library may be gone before its contexts, and so may this module.
        if hasattr(self, "_closed") and sys is not None and not sys.is_finalizing():
            self.close()
