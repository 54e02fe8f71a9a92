# SPDX-License-Identifier: Apache-2.0
"""The papers' own numbers, as values of parameters by their full names.

Nothing is in two places: a rule's defaults are what serves a robot, these are what a paper says.
"""

from collections.abc import Mapping
from typing import Any


def _spec_vla(r: int) -> dict[str, Any]:
    """Spec-VLA, section 5.1 and table 4: r bins for every token, the gripper's too; 50 nodes, top-8.

    Its tree depth is 4 in the text and 5 in the table, as its code counts the root's children as depth 0. Which ids are
    drafted the text does not say; its code takes the likeliest of all.
    """
    tree = {"draft.top_k": 8, "draft.depth": 5, "draft.nodes": 50}
    children = {"draft.children": "top_k", "draft.whole_vocabulary": True}
    rule = {"acceptance.rule": "bin_distance", "acceptance.bins": (r,), "acceptance.gripper_bins": r}
    return {**rule, **tree, **children}


def _fly(k: int) -> dict[str, Any]:
    """FLy: W = 6, theta = 0.3, and a chain of K tokens of a draft model, which prompt lookup drafts for in turn.

    How many tokens a lookup drafts the text does not say; 10 are prompt lookup decoding's own.
    """
    numbers = {"acceptance.fly_theta": 0.3, "acceptance.fly_window": 6, "acceptance.fly_entropy": "paper"}
    return {"acceptance.rule": "fly", **numbers, **_chain(k), "draft.model_lookup_tokens": 10}


def _lvspec() -> dict[str, Any]:
    """LVSpec, section 4: lambda = 0.7, N = 10, K = 10, and a position shift without bound.

    Its two drafters, a smaller model (Std.-SD) and the target itself (Self-SD), see a tenth of the image's tokens, at
    even distances. Which of the two drafts, and where the smaller model lies, is said beside the preset; the one that
    `draft.model` loads sees the whole image.
    """
    numbers = {"acceptance.lvspec_loose_share": 0.7, "acceptance.lvspec_top_n": 10, "acceptance.lvspec_shift": 63}
    pruned = {"draft.self_image_share": 0.1, "draft.self_keep": "uniform"}
    return {"acceptance.rule": "lvspec", **numbers, **_chain(10), **pruned}


def _chain(k: int) -> dict[str, Any]:
    return {"draft.head": "none", "draft.nodes": 1 + k, "draft.model_tokens": k}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "spec-vla-paper": _spec_vla(9),
    "spec-vla-paper-long": _spec_vla(5),  # LIBERO-Long
    "fly-paper": _fly(15),  # a 70B target
    "fly-paper-405b": _fly(25),
    "lvspec-paper": _lvspec(),
}
