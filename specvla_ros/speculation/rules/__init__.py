# SPDX-License-Identifier: Apache-2.0
"""Acceptance rules, one per file."""
