# SPDX-License-Identifier: Apache-2.0
"""Drafters: draft heads, draft models, earlier answers, lookup and the target itself."""
