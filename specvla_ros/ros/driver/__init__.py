# SPDX-License-Identifier: Apache-2.0
"""The driver as a node: from actions to bounded motion commands of a robot's interface."""
