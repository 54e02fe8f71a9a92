# SPDX-License-Identifier: Apache-2.0
"""Evaluation of policies on recordings and in simulation. Built on the engine, which does not import it."""
