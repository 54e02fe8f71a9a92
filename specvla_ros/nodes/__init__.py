"""The ROS 2 nodes; rclpy is imported here and nowhere else."""
