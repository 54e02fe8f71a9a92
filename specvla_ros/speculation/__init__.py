# SPDX-License-Identifier: Apache-2.0
"""Draft trees, the drafters that grow them, and the rules that decide which drafted tokens are committed."""
