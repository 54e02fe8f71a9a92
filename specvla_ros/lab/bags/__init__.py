# SPDX-License-Identifier: Apache-2.0
"""Recordings in and out: rosbag2 folders, MCAP and SQLite files, without ROS."""
