# SPDX-License-Identifier: Apache-2.0
"""The laboratory: evaluation, simulation, training and planning. Code that runs on a robot does not import it."""
