# SPDX-License-Identifier: Apache-2.0
"""The engine: requests, segments, the KV cache and the tick. No ROS, no model names."""
