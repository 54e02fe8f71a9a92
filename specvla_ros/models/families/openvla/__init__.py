# SPDX-License-Identifier: Apache-2.0
"""OpenVLA: the family of Prismatic policies that answer with bins."""
