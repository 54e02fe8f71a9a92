# SPDX-License-Identifier: Apache-2.0
"""What all tests of nodes share."""

from support.ros_fixtures import checkpoint, imported_objects_frozen, no_participant_left

__all__ = ["checkpoint", "imported_objects_frozen", "no_participant_left"]
