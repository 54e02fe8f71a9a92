# SPDX-License-Identifier: Apache-2.0
"""Parameters: declared once, read everywhere."""
