"""Evaluation: recorded robots in, figures out. Sits above the engine; nothing below imports it."""
