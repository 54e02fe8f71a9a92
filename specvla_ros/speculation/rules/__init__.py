"""Acceptance rules, one per file."""
