# SPDX-License-Identifier: Apache-2.0
"""Evaluation: recorded robots in, figures out. Sits above the engine; nothing below imports it."""
