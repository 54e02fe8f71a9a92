# SPDX-License-Identifier: Apache-2.0
"""`specvla demo`: its operator node, its processes and its record."""
