# SPDX-License-Identifier: Apache-2.0
"""MiniVLA, in the native layout of Prismatic's training code."""
