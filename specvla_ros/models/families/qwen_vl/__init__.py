# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL, and the policies that were made of it: NORA and VLA-0."""
