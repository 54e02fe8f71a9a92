# SPDX-License-Identifier: Apache-2.0
"""The rules and drafters of this package, by name; other packages add theirs through entry points."""

from specvla_ros.settings.registry import Registry

RULES = Registry(
    "specvla_ros.rules",
    [f"specvla_ros.speculation.rules.{name}" for name in ("strict", "bin_distance", "fly", "lvspec", "composite")],
)
# Drafters take their nodes of a tree in their order; one that takes all that is left comes last.
DRAFTERS = Registry(
    "specvla_ros.drafters",
    [
        f"specvla_ros.speculation.drafters.{name}"
        for name in ("chunk_shift", "temporal", "prompt_lookup", "self_draft", "draft_model", "head")
    ],
)
