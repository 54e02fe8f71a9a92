# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is: from the raw image to the action. No scheduling."""
