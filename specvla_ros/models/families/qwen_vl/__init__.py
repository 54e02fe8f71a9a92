# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL and Qwen3-VL, and the policies built on them: NORA and VLA-0."""
