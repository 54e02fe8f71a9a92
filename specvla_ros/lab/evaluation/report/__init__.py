# SPDX-License-Identifier: Apache-2.0
"""Reports as HTML pages, in one style."""
