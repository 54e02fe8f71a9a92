# SPDX-License-Identifier: Apache-2.0
"""ROS messages to arrays and back, and the messages of several topics by their stamps."""
