# SPDX-License-Identifier: Apache-2.0
"""The lab's nodes: a simulated robot, a bag player, a live view and the demo."""
