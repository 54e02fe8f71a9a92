"""Robots to act on: a MuJoCo table, its tasks and experts, rollouts, and the LIBERO suites."""

import contextlib

from specvla_ros.simulation.gl import choose_gl

with contextlib.suppress(ImportError):  # without torch there is no Triton either
    # Where it brings Triton, its LLVM must come before that of Mesa, which MuJoCo loads, or the process ends.
    import specvla_kernels.jit  # noqa: F401

# Here, since MuJoCo chooses its OpenGL once, when it is first imported.
choose_gl()
