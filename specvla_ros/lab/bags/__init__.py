# SPDX-License-Identifier: Apache-2.0
"""Reading and writing recordings without ROS: rosbag2 folders, MCAP and SQLite files."""
