# SPDX-License-Identifier: Apache-2.0
"""The laboratory: evaluation, simulation, training and planning. Nothing that runs on a robot imports it."""
