"""Acceptance rules: which drafted tokens a verification commits."""
