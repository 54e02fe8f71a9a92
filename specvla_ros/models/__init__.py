# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: from the raw image to the action, without scheduling."""
