# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, one script per question: `python -m benchmarks.speed.ar` in the root of the repository."""
