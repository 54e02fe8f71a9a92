# SPDX-License-Identifier: Apache-2.0
"""A policy server for existing clients: the websockets of openpi and vla-eval, and OpenVLA's /act."""
