# SPDX-License-Identifier: Apache-2.0
"""The node `task`: a task as a ROS action."""
