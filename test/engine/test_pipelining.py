# SPDX-License-Identifier: Apache-2.0
"""Many requests in flight: each frame gets what it gets alone, in order, once, whatever comes when."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.draft_heads import policy_with_random_head
from support.draft_models import FOLDER, with_model, write_draft_model
from support.nightly import examples
from support.pipelines import PICTURES, failing_tick, frame, plain_tokens, poisoned
from support.reference_rules import accept_batch_by_loops

from specvla_ros.engine import verifier
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

SMALL_TREE = adjusted(DraftSettings(nodes=8, top_k=3, depth=3), temporal=True)
SELF = adjusted(DraftSettings(nodes=6, top_k=2, depth=2), self_tokens=3)
MODEL = adjusted(DraftSettings(nodes=6, top_k=2, depth=2), model=FOLDER, model_tokens=3)
LOOKED_UP = adjusted(MODEL, model_lookup_tokens=2)
SIMILAR = adjusted(SELF, self_keep="similarity")
DRAFTS = [SMALL_TREE, adjusted(SMALL_TREE, temporal=False), SELF, SIMILAR, MODEL, LOOKED_UP, DraftSettings(nodes=1)]
BINS = 6


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    made = policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=5, hidden_size=64, layers=2)
    write_draft_model(made, noise=0.1)
    return made


@pytest.fixture(scope="module")
def plain(policy: OpenVLATarget):
    return plain_tokens(policy)


modes = st.builds(
    EngineSettings,
    mode=st.sampled_from(["pipeline", "specpipe"]),
    max_in_flight=st.integers(0, 5),
    prefill_chunks=st.integers(1, 4),
    in_order=st.booleans(),
    draft=st.sampled_from(DRAFTS),
)
# Ticks are what most of the time passes with.
steps = st.lists(
    st.sampled_from(["frame", "frame", "again", "tick", "tick", "tick", "flush", "reset", "fault"]), max_size=40
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chosen=modes,
    steps=steps,
    pictures=st.lists(st.integers(0, PICTURES - 1), min_size=40, max_size=40),
)
def test_every_finished_frame_has_the_plain_decoders_tokens(
    policy: OpenVLATarget, plain, chosen: EngineSettings, steps: list[str], pictures: list[int]
) -> None:
    engine = poisoned(policy, with_model(policy, chosen))
    submitted: dict[int, int] = {}
    ended: list[Outcome] = []
    stamp, epoch, faults = 0, 1, 0
    for step, picture in zip(steps, pictures, strict=False):
        if step in ("frame", "again"):
            stamp += 1
            picture = pictures[0] if step == "again" else picture
            observation = frame(stamp, picture, epoch=epoch)
            submitted[id(observation)] = picture
            ended += engine.submit(observation)
        elif step == "tick":
            ended += engine.tick()
        elif step == "fault":
            faults += engine.busy
            ended += failing_tick(engine)
            assert not engine.scheduler.requests
        else:
            epoch += 1
            ended += engine.flush() if step == "flush" else engine.reset()
    while engine.busy:
        ended += engine.tick()
    assert sorted(id(each.observation) for each in ended) == sorted(submitted), "each frame ends exactly once"
    actions = [each for each in ended if isinstance(each, Action)]
    for action in actions:
        assert action.tokens == plain(submitted[id(action.observation)])
        assert sum(action.record.tokens_per_forward) == len(action.tokens)
        assert action.record.forwards == len(action.record.tick_s)
    stamps = [action.observation.stamp_ns for action in actions]
    assert stamps == sorted(set(stamps)), "actions leave in the order of their frames"
    cache = engine.cache
    assert cache.free_slots == cache.slots == chosen.slots
    if chosen.in_order:
        assert not any(each.reason is DropReason.OVERTAKEN for each in ended if isinstance(each, Drop))
    failed = [each for each in ended if isinstance(each, Drop) and each.reason is DropReason.ENGINE_FAULT]
    assert {each.detail for each in failed} == ({"RuntimeError: the device fell off the bus"} if faults else set())


def driven(engine: Engine, gaps: list[int], picture: int) -> list[Outcome]:
    """A frame, some ticks, the next frame."""
    ended: list[Outcome] = []
    for stamp, gap in enumerate(gaps, start=1):
        ended += engine.submit(frame(stamp, (picture + stamp) % PICTURES))
        for _ in range(gap):
            ended += engine.tick()
    while engine.busy:
        ended += engine.tick()
    return ended


def essence(outcome: Outcome) -> tuple[object, ...]:
    if isinstance(outcome, Drop):
        return outcome.observation.stamp_ns, outcome.reason
    record = outcome.record
    return outcome.observation.stamp_ns, outcome.tokens, record.bins_off, record.why, record.tokens_per_forward


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=modes, gaps=st.lists(st.integers(0, 4), min_size=6, max_size=6), picture=st.integers(0, PICTURES - 1))
def test_relaxed_tokens_stay_within_their_bins(
    policy: OpenVLATarget, chosen: EngineSettings, gaps: list[int], picture: int
) -> None:
    relaxed = replace(
        with_model(policy, chosen),
        mode="specpipe",
        acceptance=AcceptanceSettings("bin_distance", bins=(BINS,), gripper_bins=0),
    )
    ended = driven(poisoned(policy, relaxed), gaps, picture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "accept", accept_batch_by_loops)
        again = driven(poisoned(policy, relaxed), gaps, picture)
    assert [essence(each) for each in again] == [essence(each) for each in ended]
    for action in (each for each in ended if isinstance(each, Action)):
        off = action.record.bins_off
        assert max(off) <= BINS and off[-1] == 0
        alone = Engine(policy, EngineSettings("ar"))
        if max(off) == 0:
            plain = alone.act(action.observation)
            assert isinstance(plain, Action) and plain.tokens == action.tokens


@pytest.mark.parametrize(
    ("chosen", "forwards", "every"),
    [
        (EngineSettings("ar"), 7, 7),
        (EngineSettings("pipeline"), 7, 1),
        (EngineSettings("pipeline", prefill_chunks=2), 8, 2),
        (EngineSettings("pipeline", prefill_chunks=3), 9, 3),
        (EngineSettings("pipeline", max_in_flight=2), 7, 3.5),
    ],
)
def test_a_frame_always_waiting_gives_an_action_every_so_many_ticks(
    policy: OpenVLATarget, chosen: EngineSettings, forwards: int, every: float
) -> None:
    engine = Engine(policy, chosen)
    ended: list[Outcome] = []
    stamp, warm, ticks = 0, 20, 42
    for tick in range(warm + ticks):
        if engine.has_room:
            stamp += 1
            ended += engine.submit(frame(stamp, stamp % PICTURES))
        found = engine.tick()
        ended += found if tick >= warm else []
    actions = [each for each in ended if isinstance(each, Action)]
    assert {action.record.forwards for action in actions} == {forwards}
    assert len(actions) == pytest.approx(ticks / every, abs=1)
    if chosen.mode == "pipeline" and not chosen.max_in_flight:
        assert engine.scheduler.target_in_flight == -(-forwards // chosen.spreads[0])


def test_without_a_new_frame_a_tick_verifies_alone(policy: OpenVLATarget) -> None:
    engine = Engine(policy, EngineSettings("specpipe", draft=SMALL_TREE))
    engine.submit(frame(1, 1))
    engine.tick()
    assert (engine.last_work.images, engine.last_work.prompts, engine.last_work.trees) == (1, 1.0, 0)
    engine.tick()
    assert (engine.last_work.images, engine.last_work.prompts, engine.last_work.trees) == (0, 0.0, 1)
    assert 1 < engine.last_work.nodes <= 8


def test_a_chunk_counts_for_its_share_and_commits_nothing(policy: OpenVLATarget) -> None:
    engine = Engine(policy, EngineSettings("pipeline", prefill_chunks=3))
    engine.submit(frame(1, 1))
    shares = []
    for tick in range(3):
        assert engine.tick() == []
        shares.append(engine.last_work.prompts)
        assert engine.has_room == (tick == 2), "one prompt at a time"
    assert sum(shares) == pytest.approx(1.0) and max(shares) < 0.4
    (request,) = engine.scheduler.requests
    assert request.tokens_per_forward == [0, 0, 1]


def test_a_newer_frame_that_is_through_first_overtakes(policy: OpenVLATarget) -> None:
    """The same picture as the last action's is decoded in its own prefill, and is through before older frames."""
    engine = Engine(policy, EngineSettings("specpipe", draft=adjusted(DraftSettings(nodes=10), temporal=True)))
    assert isinstance(engine.act(frame(1, 1)), Action)
    older, newer = frame(2, 2), frame(3, 1)
    engine.submit(older)
    assert engine.tick() == []
    engine.submit(newer)
    drop, action = engine.tick()
    assert isinstance(drop, Drop) and drop.observation is older and drop.reason is DropReason.OVERTAKEN
    assert isinstance(action, Action) and action.observation is newer
    assert not engine.busy and engine.cache.free_slots == engine.cache.slots, "an overtaken request kept its slot"

    engine = Engine(policy, replace(engine.settings, in_order=True))
    assert isinstance(engine.act(frame(1, 1)), Action)
    older, newer = frame(2, 2), frame(3, 1)
    engine.submit(older)
    engine.tick()
    engine.submit(newer)
    left: list[Outcome] = []
    while engine.busy:
        left += engine.tick()
    assert [each.observation for each in left] == [older, newer]
    assert all(isinstance(each, Action) for each in left)


def test_an_action_that_waits_for_an_older_one_is_void_with_its_epoch(policy: OpenVLATarget) -> None:
    engine = Engine(policy, EngineSettings("specpipe", draft=SMALL_TREE, in_order=True))
    assert isinstance(engine.act(frame(1, 1)), Action)
    older, newer = frame(2, 2), frame(3, 1)
    engine.submit(older)
    engine.tick()
    engine.submit(newer)
    assert engine.tick() == []
    assert len(engine.scheduler.requests) == 1, "the newer one is through, and waits"
    drops = engine.flush()
    assert {id(each.observation) for each in drops} == {id(older), id(newer)}
    last = frame(4, 1, epoch=2)
    ended: list[Outcome] = [*engine.submit(last)]
    while engine.busy:
        ended += engine.tick()
    assert [each.observation for each in ended] == [last]


def test_a_flush_can_keep_what_an_epoch_has_begun_with(policy: OpenVLATarget) -> None:
    engine = Engine(policy, EngineSettings("specpipe", draft=SMALL_TREE, in_order=True))
    assert isinstance(engine.act(frame(1, 1)), Action)
    slow, done, first, second = frame(2, 2), frame(3, 1), frame(4, 3, epoch=2), frame(5, 4, epoch=2)
    engine.submit(slow)
    engine.tick()
    engine.submit(done)
    assert engine.tick() == []
    assert len(engine.scheduler.requests) == 1, "the newer one is through, and waits for the older one"
    engine.submit(first)
    engine.tick()
    engine.submit(second)
    drops = engine.flush(before_epoch=2)
    assert {id(each.observation) for each in drops} == {id(slow), id(done)}
    assert engine.busy and engine.flush(before_epoch=2) == []
    ended = []
    while engine.busy:
        ended += engine.tick()
    assert [each.observation for each in ended] == [first, second]
    assert all(isinstance(each, Action) for each in ended)


def test_a_frame_that_waits_for_a_slot_is_void_with_its_epoch(policy: OpenVLATarget) -> None:
    engine = Engine(policy, EngineSettings("ar"))
    old = frame(1, 1)
    engine.submit(old)
    assert [each.observation for each in engine.flush(before_epoch=2)] == [old]
    assert not engine.busy


def test_rules_that_look_at_the_image_see_all_of_it_though_it_came_in_chunks(policy: OpenVLATarget) -> None:
    lvspec = adjusted(AcceptanceSettings("lvspec"), lvspec_loose_share=0.4)
    whole, chunked = (
        Engine(policy, EngineSettings("specpipe", prefill_chunks=chunks, draft=SMALL_TREE, acceptance=lvspec))
        for chunks in (1, 3)
    )
    for stamp in range(1, 5):
        one, other = whole.act(frame(stamp, stamp)), chunked.act(frame(stamp, stamp))
        assert isinstance(one, Action) and isinstance(other, Action) and one.tokens == other.tokens


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(max_in_flight=65), "max_in_flight must be 0 to 64"),
        (dict(max_in_flight=-1), "max_in_flight"),
        (dict(prefill_chunks=0), "prefill_chunks must be 1 to 16"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict, said: str) -> None:
    from specvla_ros.errors import UserError

    with pytest.raises(UserError, match=said):
        EngineSettings("pipeline", **arguments)
