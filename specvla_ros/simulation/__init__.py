"""Robots to act on: a MuJoCo table, its tasks and experts, rollouts, and the LIBERO suites."""

from specvla_ros.simulation.gl import choose_gl

# Here, since MuJoCo chooses its OpenGL once, when it is first imported.
choose_gl()
