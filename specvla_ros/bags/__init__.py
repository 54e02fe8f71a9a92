# SPDX-License-Identifier: Apache-2.0
"""Recordings in and out, and messages to arrays. Needs no ROS."""
