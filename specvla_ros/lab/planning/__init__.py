# SPDX-License-Identifier: Apache-2.0
"""Planning: what a checkpoint costs on a device, computed before anything runs. Sits above engine and models."""
