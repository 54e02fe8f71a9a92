# SPDX-License-Identifier: Apache-2.0
"""What drafts tokens: draft heads, earlier answers, lookup, the target itself."""
