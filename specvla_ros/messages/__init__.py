# SPDX-License-Identifier: Apache-2.0
"""Converts ROS messages to arrays and back, and matches messages of several topics by stamp."""
