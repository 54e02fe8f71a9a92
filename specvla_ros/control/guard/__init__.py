# SPDX-License-Identifier: Apache-2.0
"""The guard between driver and robot: denies by default and stops within a stated time. Needs only NumPy."""
