# SPDX-License-Identifier: Apache-2.0
"""Draft trees, what drafts them, and which drafted tokens are committed."""
