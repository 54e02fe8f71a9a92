# SPDX-License-Identifier: Apache-2.0
"""Nothing older than the limit leaves the engine, whatever happens to the clock, and every frame ends once."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draft_heads import policy_with_random_head
from support.nightly import examples

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason, Freshness, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.settings import DraftSettings

LIMIT_S = 1.0
SMALL_TREE = DraftSettings(nodes=8, top_k=3, depth=3)
HOW: list[dict[str, Any]] = [
    dict(mode="ar"),
    dict(mode="spec", draft=SMALL_TREE),
    dict(mode="pipeline", prefill_chunks=2),
    dict(mode="specpipe", draft=SMALL_TREE),
    dict(mode="specpipe", draft=SMALL_TREE, prefill_chunks=3, in_order=True),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=5, hidden_size=32, layers=1)


def frame(stamp_ns: int) -> Observation:
    image = np.random.default_rng(stamp_ns).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", stamp_ns)


# A frame of some age; a tick that takes some time; a clock that jumps, as simulated time or after SIGCONT.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("frame"), st.floats(0.0, 1.5)),
        st.tuples(st.just("tick"), st.floats(0.0, 0.4)),
        st.tuples(st.just("jump"), st.floats(-3.0, 6.0)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("how", HOW, ids=str)
@given(steps=steps)
@settings(max_examples=examples(25))
def test_no_action_is_older_than_the_limit_when_it_leaves(
    policy: OpenVLATarget, how: dict[str, Any], steps: list[tuple[str, float]]
) -> None:
    now = 100.0
    engine = Engine(policy, EngineSettings(max_image_age_s=LIMIT_S, **how), now_ns=lambda: round(now * 1e9))
    sent: list[Observation] = []
    ended: list[Outcome] = []

    def tick(seconds: float) -> None:
        nonlocal now
        now += seconds
        outcomes = engine.tick()
        for outcome in outcomes:
            age_s = now - outcome.observation.stamp_ns * 1e-9
            if isinstance(outcome, Action):
                assert age_s <= LIMIT_S + 1e-6
            elif outcome.reason is DropReason.TOO_OLD:
                assert age_s > LIMIT_S - 1e-6 and "the limit is 1 s" in outcome.detail
        ended.extend(outcomes)

    for kind, value in steps:
        if kind == "frame":
            sent.append(frame(round((now - value) * 1e9)))
            ended.extend(engine.submit(sent[-1]))
        elif kind == "jump":
            now += value
        else:
            tick(value)
    while engine.busy:
        tick(0.01)
    assert sorted(id(outcome.observation) for outcome in ended) == sorted(map(id, sent))


def test_a_stamp_that_another_clock_made_is_told_with_the_remedy() -> None:
    ahead = Freshness(LIMIT_S, max_future_s=1.0).problem(7 * 10**9, 2 * 10**9)
    remedy = "synchronise the machines, for example with chrony"
    assert ahead == (DropReason.BAD_STAMP, f"stamped 5.000 s ahead of the node's clock: {remedy}")


def test_a_process_that_was_stopped_has_no_action_for_what_was_in_flight(policy: OpenVLATarget) -> None:
    now = 10**9
    engine = Engine(policy, EngineSettings("ar", max_image_age_s=LIMIT_S), now_ns=lambda: now)
    engine.submit(frame(now))
    assert engine.tick() == []
    now += 5 * 10**9
    outcomes: list[Outcome] = []
    while engine.busy:
        outcomes += engine.tick()
    [drop] = outcomes
    assert isinstance(drop, Drop)
    assert (drop.reason, drop.detail) == (DropReason.TOO_OLD, "5.000 s old, the limit is 1 s")
    assert isinstance(engine.act(frame(now)), Action)
