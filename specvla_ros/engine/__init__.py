"""The engine: requests, segments, the KV ring and the tick. No ROS, no model names."""
