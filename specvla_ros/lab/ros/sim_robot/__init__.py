# SPDX-License-Identifier: Apache-2.0
"""A simulated robot as a node."""
