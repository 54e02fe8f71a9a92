# SPDX-License-Identifier: Apache-2.0
"""Planning: the cost of a checkpoint on a device, computed before anything runs. Depends on engine and models."""
