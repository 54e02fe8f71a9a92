# SPDX-License-Identifier: Apache-2.0
"""Operators of the engine. Each file holds one operator: its Triton kernel and its PyTorch reference."""
