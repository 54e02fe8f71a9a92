# SPDX-License-Identifier: Apache-2.0
"""Robots to act on: a MuJoCo table, its tasks and experts, rollouts, and the LIBERO suites."""

import contextlib

from specvla_ros.lab.simulation.gl import choose_gl

with contextlib.suppress(ImportError):
    # Torch imports it sooner or later where it is installed. It brings an LLVM, which must come before that of Mesa,
    # which MuJoCo loads, or the process ends.
    import triton  # noqa: F401

# Here, since MuJoCo chooses its OpenGL once, when it is first imported.
choose_gl()
