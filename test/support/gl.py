# SPDX-License-Identifier: Apache-2.0
"""Tests that draw need an OpenGL library, which pip does not bring."""

import pytest

from specvla_ros.lab.simulation import choose_gl

needs_gl = pytest.mark.skipif(choose_gl() is None, reason="no OSMesa or EGL: apt-get install libosmesa6")
