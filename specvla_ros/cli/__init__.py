# SPDX-License-Identifier: Apache-2.0
"""The entry of the `specvla` command, whose commands are in `specvla_ros.lab.cli`, and `specvla doctor`."""
