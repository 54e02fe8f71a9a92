# SPDX-License-Identifier: Apache-2.0
"""The node `guard`, a process of its own between driver and robot: rclpy and NumPy only."""
