# SPDX-License-Identifier: Apache-2.0
"""What stands between a driver and a robot: deny by default, and a stop within a stated time. Needs NumPy alone."""
