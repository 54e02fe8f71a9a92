# SPDX-License-Identifier: Apache-2.0
"""Any sequence of frames, ticks, epochs, faults and switches: no slot leaks, every frame ends once and rightly."""

from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.draft_heads import policy_with_random_head
from support.nightly import examples
from support.pipelines import PACES, failing_tick, frame, plain_tokens, poisoned

from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.pace import Pace
from specvla_ros.engine.settings import MODES, EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.speculation.settings import DraftSettings, adjusted

TREE = adjusted(DraftSettings(nodes=8, top_k=2, depth=3), temporal=True)
any_settings = st.builds(
    EngineSettings,
    mode=st.sampled_from(MODES),
    max_in_flight=st.integers(0, 4),
    prefill_chunks=st.integers(1, 3),
    in_order=st.booleans(),
    draft=st.just(TREE),
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=7, hidden_size=64, layers=1)


def test_whatever_happens_every_frame_ends_once_and_rightly(policy: OpenVLATarget) -> None:
    plain = plain_tokens(policy)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.pictures: dict[int, int] = {}  # by stamp, of every frame so far
            self.epoch, self.void_until = 1, 0
            self.ended: list[int] = []
            self.left: list[int] = []  # stamps of the actions
            self.pinned = ExitStack()

        @initialize(chosen=any_settings)
        def start(self, chosen: EngineSettings) -> None:
            self.engine = poisoned(policy, chosen)

        def note(self, outcomes: Sequence[Outcome]) -> None:
            for each in outcomes:
                stamp = each.observation.stamp_ns
                self.ended.append(stamp)
                if isinstance(each, Action):
                    assert each.tokens == plain(self.pictures[stamp])
                    assert stamp > self.void_until, "it belongs to an epoch that is over"
                    self.left.append(stamp)

        @rule(picture=st.integers(0, 1))  # the same again is drafted whole, and overtakes
        def send(self, picture: int) -> None:
            stamp = len(self.pictures) + 1
            self.pictures[stamp] = picture
            self.note(self.engine.submit(frame(stamp, picture, epoch=self.epoch)))

        @rule()
        def let_all_finish(self) -> None:
            while self.engine.busy:
                self.note(self.engine.tick())

        @rule(times=st.integers(1, 3))
        def tick(self, times: int) -> None:
            for _ in range(times):
                self.note(self.engine.tick())

        @rule(how=st.sampled_from(["flush", "reset"]))
        def begin_another_epoch(self, how: str) -> None:
            self.epoch, self.void_until = self.epoch + 1, len(self.pictures)
            self.note(getattr(self.engine, how)())
            assert not self.engine.busy

        @precondition(lambda self: self.engine.busy)
        @rule()
        def fail(self) -> None:
            drops = failing_tick(self.engine)
            assert all(isinstance(each, Drop) and each.reason is DropReason.ENGINE_FAULT for each in drops)
            self.note(drops)
            assert not self.engine.scheduler.requests

        @rule(chosen=any_settings)
        def switch(self, chosen: EngineSettings) -> None:
            waiting = self.engine.busy and not self.engine.scheduler.requests
            self.note(self.engine.switch(chosen))
            assert not self.engine.scheduler.requests and self.engine.busy >= waiting
            assert self.engine.settings.mode == chosen.mode

        @precondition(lambda self: self.engine.scheduler.chooser is not None)
        @rule(pace=PACES)
        def choose(self, pace: Pace) -> None:
            chooser = self.engine.scheduler.chooser
            assert chooser is not None
            self.pinned.enter_context(chooser.pinned(pace))

        @rule()
        def switch_to_what_cannot_be(self) -> None:
            before, in_flight = self.engine.settings, len(self.engine.scheduler.requests)
            with pytest.raises(UserError):
                self.engine.switch(EngineSettings("spec", draft=DraftSettings(head="/nowhere")))
            assert (self.engine.settings, len(self.engine.scheduler.requests)) == (before, in_flight)

        @invariant()
        def every_slot_is_free_or_held(self) -> None:
            engine = self.engine
            held = [request.slot for request in engine.scheduler.requests]
            assert len(set(held)) == len(held) == engine.cache.slots - engine.cache.free_slots
            assert engine.cache.slots == engine.settings.slots

        @invariant()
        def actions_left_in_order_and_nothing_ended_twice(self) -> None:
            assert self.left == sorted(set(self.left))
            assert len(set(self.ended)) == len(self.ended)

        def teardown(self) -> None:
            self.let_all_finish()
            self.pinned.close()
            assert sorted(self.ended) == sorted(self.pictures)

    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples(100), stateful_step_count=40, deadline=None, suppress_health_check=slow
        ),
    )
