# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, one script per question: run `python -m benchmarks.speed.ar` in the repository's root."""
