# SPDX-License-Identifier: Apache-2.0
"""Control: converts actions to bounded robot motion. Needs neither ROS nor a simulator."""
