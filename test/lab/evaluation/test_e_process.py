# SPDX-License-Identifier: Apache-2.0
"""E-processes: against a plain reading of the product, and wrong no more often than they promise."""

from collections.abc import Callable

import numpy as np
import pytest
from support.nightly import nightly_but

from specvla_ros.lab.evaluation.paired import confidence_interval, log_e_values, lower_bound
from specvla_ros.lab.evaluation.qualify import Judgement, Pair, Verdict
from specvla_ros.lab.plans import Criterion

ALPHA = 0.05
PAIRS = (-1.0, 0.0, 1.0)  # the second alone fails, both alike, the second alone succeeds


def plain_e_value(values: list[float], mean: float, low: float) -> float:
    """The mean over gamblers of what each has, a stake and a value at a time."""
    fortunes = []
    for gambler in range(64):
        fraction, fortune = (gambler + 0.5) / 64, 1.0
        for value in values:
            stake = fraction * fortune
            fortune = fortune - stake + stake * (value - low) / (mean - low)
        fortunes.append(fortune)
    return sum(fortunes) / len(fortunes)


@pytest.mark.parametrize(("mean", "low"), [(-0.1, -1.0), (0.5, 0.0), (0.0, -1.0)])
def test_the_value_is_what_the_gamblers_have(mean: float, low: float) -> None:
    values = np.random.default_rng(1).choice([low, 0.5 * low + 0.5, 1.0], 40)
    found = np.exp(log_e_values(values, mean, low))
    assert found == pytest.approx([plain_e_value(list(values[: n + 1]), mean, low) for n in range(40)])


@pytest.mark.parametrize(
    "chances", [(0.1, 0.9, 0.0), (0.15, 0.8, 0.05), (0.5, 0.1, 0.4)], ids=["never better", "some", "noisy"]
)
def test_where_the_null_hypothesis_just_holds_looking_at_all_times_is_wrong_seldom(
    chances: tuple[float, float, float],
) -> None:
    """Each has a mean of -0.1: the boundary, where a test is wrong most often."""
    draws = np.random.default_rng(2).choice(PAIRS, (2000, 300), p=chances)
    worth = log_e_values(draws, mean=-0.1, low=-1.0)
    ever = (worth.max(axis=1) >= -np.log(ALPHA)).mean()
    assert ever <= ALPHA
    assert np.exp(worth[:, -1]).mean() < 1.5, "what a gambler has is fair: 1 in the mean, but for rare large fortunes"


def test_what_is_better_is_found_and_the_wait_is_short() -> None:
    same = np.zeros(300)
    needed = int(np.argmax(log_e_values(same, mean=-0.1, low=-1.0) >= -np.log(ALPHA))) + 1
    assert 29 <= needed <= 60, "29 pairs without a difference are the fewest with which one may say so"
    draws = np.random.default_rng(3).choice(PAIRS, (500, 300), p=(0.03, 0.94, 0.03))
    found = log_e_values(draws, mean=-0.1, low=-1.0).max(axis=1) >= -np.log(ALPHA)
    assert found.mean() > 0.95


@pytest.mark.parametrize(
    "chances", nightly_but(lambda chances: chances[0] == 0.3, [(0.1, 0.8, 0.1), (0.3, 0.65, 0.05), (0.0, 1.0, 0.0)])
)
def test_the_interval_holds_the_mean_at_all_times(chances: tuple[float, float, float]) -> None:
    mean = chances[2] - chances[0]
    draws = np.random.default_rng(4).choice(PAIRS, (100, 120), p=chances)
    missed = 0
    for values in draws:
        intervals = [confidence_interval(values[:n], -1.0, 1.0, ALPHA) for n in (5, 20, 60, 120)]
        missed += not all(low <= mean <= high for low, high in intervals)
    assert missed / len(draws) <= ALPHA
    assert intervals[-1][1] - intervals[-1][0] < intervals[0][1] - intervals[0][0]


def after(starts: int, *, candidate: bool) -> Judgement:
    """What is judged after so many starts, all of which the reference does."""
    return Judgement("x", tuple(Pair("lift", n, True, candidate) for n in range(starts)), Criterion())


@pytest.mark.parametrize(
    ("candidate", "verdict", "shown", "share"),
    [(False, Verdict.REFUSED, max, 0.5), (True, Verdict.QUALIFIED, min, 1.0)],
    ids=["refused with half of alpha", "qualified with all of it"],
)
def test_a_verdict_is_given_at_its_share_of_alpha_and_not_before(
    candidate: bool, verdict: Verdict, shown: Callable[..., float], share: float
) -> None:
    judgements = [after(n, candidate=candidate) for n in range(1, 60)]
    names = ("not worse", "works") if candidate else ("worse", "does not work")
    worth = [np.exp(shown(each.evidence[name].max() for name in names)) for each in judgements]
    enough = [float(value) >= 1 / (share * ALPHA) for value in worth]
    assert [each.verdict is verdict for each in judgements] == enough and any(enough) and not enough[0]
    if not candidate:
        assert any(1 / ALPHA <= value < 2 / ALPHA for value in worth), "no start at which the whole alpha would do"


def test_without_values_nothing_is_known() -> None:
    assert confidence_interval([], -1.0, 1.0, ALPHA) == (-1.0, 1.0)
    assert lower_bound([], 0.0, 1.0, ALPHA) == 0.0


def test_decisions_are_those_of_the_published_test_where_it_is_clear() -> None:
    """sequentialized_barnard_tests (CC-BY-NC-4.0, so not ours): Turner and Grünwald's test, which knows no pairs."""
    theirs = pytest.importorskip("sequentialized_barnard_tests.savi", reason="its licence is for no commercial use")
    base = pytest.importorskip("sequentialized_barnard_tests.base")
    for second, better in ((0.4, False), (0.97, True)):
        generator = np.random.default_rng(5)
        first = generator.random(200) < 0.7
        pairs = np.stack((first, generator.random(200) < second))
        wanted = base.Hypothesis.P0LessThanP1 if better else base.Hypothesis.P0MoreThanP1
        test = theirs.SaviTest(wanted, ALPHA)
        published = [test.step(int(a), int(b)).decision is base.Decision.AcceptAlternative for a, b in pairs.T]
        difference = pairs[1].astype(float) - pairs[0]
        ours = log_e_values(difference if better else -difference, 0.0, -1.0) >= -np.log(ALPHA)
        assert any(published) and ours.any()
        assert 0.3 < np.argmax(ours) / np.argmax(published) < 3
