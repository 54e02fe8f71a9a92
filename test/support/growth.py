# SPDX-License-Identifier: Apache-2.0
"""Trees grown from children that the test chooses."""

from torch import Tensor

from specvla_kernels.expand_tree import Candidates
from specvla_ros.speculation.drafters.eagle.tree_growth import TreeGrowth


def expand(growth: TreeGrowth, tokens: Tensor, scores: Tensor) -> None:
    """Considers children, both [trees, beam, k]; scores are log-probabilities given the parent, NaN is impossible."""
    growth.consider(Candidates(growth._max_depths, chosen=(tokens, scores)), scores.dtype)
