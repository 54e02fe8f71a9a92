# SPDX-License-Identifier: Apache-2.0
"""Policies bundled with the package; see their model cards."""
