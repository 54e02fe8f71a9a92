"""Operators of the engine. Each file holds one operator: its reference and, later, its Triton kernel."""
