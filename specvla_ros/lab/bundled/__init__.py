# SPDX-License-Identifier: Apache-2.0
"""Policies that come with the package; see the model cards."""
