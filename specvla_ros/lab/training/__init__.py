# SPDX-License-Identifier: Apache-2.0
"""Training of small policies and draft heads."""
