"""Codecs: tokens to actions and back, one per file."""
