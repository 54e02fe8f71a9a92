# SPDX-License-Identifier: Apache-2.0
"""Training a small policy, and what speculation needs beside it."""
