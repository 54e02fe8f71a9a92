"""The nodes: rclpy lives here and nowhere else."""
