# SPDX-License-Identifier: Apache-2.0
"""pi0-FAST, as LeRobot saves it."""
