"""Recordings in and out, and messages to arrays. Needs no ROS."""
