# SPDX-License-Identifier: Apache-2.0
"""Where a process that ends with its parent was found before; see `specvla_ros.jobs`."""

from specvla_ros.jobs import end_with_parent

__all__ = ["end_with_parent"]
