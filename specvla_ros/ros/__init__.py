# SPDX-License-Identifier: Apache-2.0
"""The nodes: rclpy lives here and nowhere else."""
