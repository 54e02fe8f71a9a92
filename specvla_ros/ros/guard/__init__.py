# SPDX-License-Identifier: Apache-2.0
"""The node `guard`, a separate process between driver and robot. Needs only rclpy and NumPy (a model: MuJoCo too)."""
