# SPDX-License-Identifier: Apache-2.0
"""The ROS nodes and their start. Outside `specvla_ros.lab`, only this package imports rclpy."""

import signal
from importlib import import_module


def start(module: str) -> None:
    """Imports a module and runs its `main`. Ctrl-C during the imports, which take seconds, leaves no traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = import_module(module).main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
