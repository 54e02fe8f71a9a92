#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exit code 0 if this machine can render without a screen: with Mesa's OSMesa or a GPU's EGL.

EGL alone is not sufficient: without a GPU it also needs a DRI driver.
"""

import ctypes.util
import os
import sys

gpu = any(os.path.exists(device) for device in ("/dev/nvidia0", "/dev/dri"))
sys.exit(0 if ctypes.util.find_library("OSMesa") or (gpu and ctypes.util.find_library("EGL")) else 1)
