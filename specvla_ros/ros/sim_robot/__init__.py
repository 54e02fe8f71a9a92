"""A simulated robot as a node."""
