# SPDX-License-Identifier: Apache-2.0
"""Control: from an action's displacement to where a robot is to go. Needs no ROS and no simulator."""
