# SPDX-License-Identifier: Apache-2.0
"""Codecs: tokens to actions and back, one per file."""
