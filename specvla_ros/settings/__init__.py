# SPDX-License-Identifier: Apache-2.0
"""Parameters, declared once and used by every node, command and file."""
