# SPDX-License-Identifier: Apache-2.0
"""The simulated robot's node."""
