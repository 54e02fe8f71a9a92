# SPDX-License-Identifier: Apache-2.0
"""LVSpec's proposition 2.1, theorem 2.2 and the check of them in its appendix G, under the paper's own assumption.

That assumption (appendix A.1): each drafted token is the target's own choice with probability alpha, whatever the
others are; here the relevance to the image is also independent of that. The accept walk is the product's own.
"""

from math import comb

import numpy as np
import pytest
import torch
from support.nightly import nightly_but
from support.verifications import make_tree, one_hot, verify_tree

from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.speculation.accept import accept
from specvla_ros.speculation.rules.lvspec import LVSpec

K = 10
RHO = 0.3  # share of tokens that stay strict: lambda = 0.7
CHAINS = 1500
_TEXT = ActionIds(first=1000, stop=1001, bins=1)


def accepted_lengths(alpha: float, loose_share: float) -> np.ndarray:
    """Of random chains; a wrong draft is a token that the target never chooses, so that no shift could take it."""
    rng = np.random.default_rng(round(1000 * alpha))
    rule = LVSpec(loose_share, top_n=3, shift=0)
    lengths = []
    for _ in range(CHAINS):
        choices = rng.integers(1, 20, K + 1)
        drafts = np.where(rng.random(K) < alpha, choices[:K], 20 + rng.integers(0, 10, K))
        tree = make_tree([0, *drafts.tolist()], list(range(-1, K)))
        hidden, visual = (torch.from_numpy(rng.normal(size=(n, 4))).float() for n in (K + 1, 5))
        case = verify_tree(tree, one_hot(choices.tolist(), 30), actions=_TEXT, hidden=hidden, visual=visual)
        lengths.append(accept(rule, case.verification()).tolist()[0][-1] - 1)  # without the target's own token
    return np.array(lengths)


def geometric(alpha: float, k: int = K) -> float:
    """Equation 14: the sum of alpha to 1, 2, … k."""
    return float(sum(alpha**i for i in range(1, k + 1)))


def diluted(alpha: float, rho: float = RHO) -> float:
    """Equation 18: the effective alignment rate."""
    return 1 - rho * (1 - alpha)


def exactly_loose(alpha: float) -> float:
    """The expectation with exactly the K - floor(lambda K) most relevant tokens strict, in place of each with rho."""
    strict = round(RHO * K)

    def of_prefix(k: int) -> float:
        ways = [comb(strict, x) * comb(K - strict, k - x) for x in range(min(strict, k) + 1)]
        return sum(n * alpha**x for x, n in enumerate(ways)) / comb(K, k)

    return sum(of_prefix(k) for k in range(1, K + 1))


@pytest.mark.nightly
@pytest.mark.parametrize("alpha", nightly_but(lambda alpha: alpha == 0.8, [0.4, 0.8]))
def test_strict_verification_is_bounded_by_the_inverse_of_the_failure_rate(alpha: float) -> None:
    lengths = accepted_lengths(alpha, loose_share=0.0)
    error = 4 * lengths.std() / np.sqrt(CHAINS)
    assert lengths.mean() == pytest.approx(geometric(alpha), abs=error)
    assert geometric(alpha) < alpha / (1 - alpha) < 1 / (1 - alpha)


@pytest.mark.parametrize("alpha", nightly_but(lambda alpha: alpha == 0.8, [0.4, 0.8]))
def test_loose_verification_dilutes_the_failure_rate(alpha: float) -> None:
    lengths = accepted_lengths(alpha, loose_share=1 - RHO)
    error = 4 * lengths.std() / np.sqrt(CHAINS)
    assert lengths.mean() == pytest.approx(exactly_loose(alpha), abs=error)
    # The paper lets each token be strict with probability rho; exactly rho K of them are, which costs a little.
    assert exactly_loose(alpha) < geometric(diluted(alpha)) < 1 / (RHO * (1 - alpha))
    assert geometric(diluted(alpha)) - exactly_loose(alpha) < 0.15 * exactly_loose(alpha)


def test_the_scaling_law_is_a_limit_that_ten_tokens_do_not_reach() -> None:
    for alpha in (0.5, 0.9, 0.99):
        without_end = geometric(diluted(alpha), k=100_000) / geometric(alpha, k=100_000)
        assert without_end >= 1 / RHO - 1e-9, "equation 5 leaves out what makes it larger"
        assert geometric(diluted(alpha)) / geometric(alpha) <= without_end
    assert geometric(diluted(0.999), k=100_000) / geometric(0.999, k=100_000) == pytest.approx(1 / RHO, rel=0.01)
    assert geometric(diluted(0.79)) / geometric(0.79) < 0.65 / RHO


def test_appendix_g_by_the_papers_own_equations() -> None:
    """It takes 1 - tau / K for the failure rate; by equation 14 a tau of 3.41 in 10 is another one."""
    read_off = (1 - 3.41 / K) * RHO, 1 - 7.76 / K
    assert read_off == pytest.approx((0.198, 0.224), abs=5e-4)
    alphas = np.linspace(0, 1, 100_001)[:-1]
    alpha = float(alphas[np.searchsorted([geometric(a) for a in alphas], 3.41)])
    assert alpha == pytest.approx(0.790, abs=1e-3)
    assert geometric(diluted(alpha)) == pytest.approx(7.12, abs=0.05)  # measured: 7.76, with position shifts
