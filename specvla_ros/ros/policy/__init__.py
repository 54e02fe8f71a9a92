"""The policy node."""
