# SPDX-License-Identifier: Apache-2.0
"""The policy node."""
