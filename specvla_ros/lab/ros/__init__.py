# SPDX-License-Identifier: Apache-2.0
"""The laboratory's nodes: a simulated robot, a bag player, a live view, the demo."""
