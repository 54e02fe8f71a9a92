# SPDX-License-Identifier: Apache-2.0
"""The driver node: turns actions into bounded motion commands of a robot's interface."""
