# SPDX-License-Identifier: Apache-2.0
"""What a robot's interface takes, one kind per file."""
