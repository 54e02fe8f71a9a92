# SPDX-License-Identifier: Apache-2.0
"""Several robots in one engine: strict is lossless for each, and what one does touches no other."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import load_openvla, write_checkpoint
from support.nightly import examples
from support.patience import PATIENCE_S

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.settings import MODES, EngineSettings
from specvla_ros.engine.thread import EngineThread
from specvla_ros.errors import UserError
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.settings import DraftSettings, adjusted

ROBOTS = ("left", "right", "third")
DRAFTS = adjusted(DraftSettings(nodes=8), temporal=True)
OWN_DOING = {DropReason.SUPERSEDED, DropReason.OVERTAKEN}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, seed=3)
    return load_openvla(directory, device="cpu")


@pytest.fixture(scope="module")
def plain(policy: OpenVLATarget) -> dict[int, tuple[int, ...]]:
    """The plain decoder's answers by picture."""
    engine = Engine(policy, EngineSettings("ar"))
    answers = {}
    for picture in range(8):
        action = engine.act(frame("", picture + 1, picture))
        assert isinstance(action, Action)
        answers[picture] = action.tokens
    assert len(set(answers.values())) > 3
    return answers


def frame(robot: str, stamp_ns: int, picture: int, epoch: int = 0) -> Observation:
    rng = np.random.default_rng(picture)
    image = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, f"put carrot {picture % 3}", stamp_ns, epoch=epoch, stream=robot)


def made(policy: OpenVLATarget, mode: str, streams: int = len(ROBOTS), **changes: object) -> Engine:
    return Engine(policy, EngineSettings(mode, streams=streams, draft=DRAFTS, **changes))  # type: ignore[arg-type]


def rest(engine: Engine) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while engine.busy:
        outcomes += engine.tick()
    return outcomes


@pytest.mark.parametrize("free", [4, 12, 16])
def test_the_trees_of_several_robots_share_the_rows_that_are_free(
    policy: OpenVLATarget, plain: dict[int, tuple[int, ...]], free: int
) -> None:
    """One tree alone has all its nodes, and the least tree is a root with a draft; strict stays lossless."""
    engine = made(policy, "auto")
    engine.drafter.free_rows = free
    outcomes: list[Outcome] = []
    rows: dict[int, int] = Counter()
    for stamp in range(1, 13):
        for robot in ROBOTS[: 1 + stamp % 3]:
            outcomes += engine.submit(frame(robot, stamp, stamp % 8))
        while engine.busy:
            outcomes += engine.tick()
            work = engine.last_work
            rows[work.trees] = max(rows[work.trees], work.nodes if not work.prompts else 0)
    actions = [each for each in outcomes if isinstance(each, Action)]
    assert len(actions) > 12
    assert all(each.tokens == plain[each.observation.stamp_ns % 8] for each in actions)
    assert rows[1] > 4
    assert 0 < rows[2] <= max(free, 4) and 0 < rows[3] <= max(free, 6)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["frame", "back"]), st.sampled_from(ROBOTS), st.integers(0, 7)),
        st.tuples(st.just("tick"), st.just(""), st.integers(1, 4)),
        st.tuples(st.sampled_from(["reset", "close", "instruction", "clock"]), st.sampled_from(ROBOTS), st.just(0)),
    ),
    min_size=8,
    max_size=60,
)


@settings(max_examples=examples(40))
@given(
    events=EVENTS,
    mode=st.sampled_from(MODES),
    chunks=st.sampled_from([1, 2]),
    in_order=st.booleans(),
)
def test_each_robots_answers_are_the_plain_decoders(
    policy: OpenVLATarget,
    plain: dict[int, tuple[int, ...]],
    events: list[tuple[str, str, int]],
    mode: str,
    chunks: int,
    in_order: bool,
) -> None:
    """Robots come and go, are told otherwise, and their clocks jump back."""
    engine = made(policy, mode, prefill_chunks=chunks, in_order=in_order)
    stamps: defaultdict[str, int] = defaultdict(int)
    epochs: Counter[str] = Counter()
    pictures: dict[int, int] = {}
    submitted: list[Observation] = []
    outcomes: list[Outcome] = []
    for event, robot, number in events:
        before = len(outcomes)
        if event == "tick":
            for _ in range(number):
                outcomes += engine.tick()
            continue
        if event in ("frame", "back"):
            stamps[robot] += 10
            epochs[robot] += event == "back"
            seen = frame(robot, stamps[robot], number, epochs[robot])
            pictures[id(seen)] = number
            submitted.append(seen)
            outcomes += engine.submit(seen)
            if event == "back":  # the engine gets to closing it when it is open again
                outcomes += engine.close(robot, before_epoch=epochs[robot])
                assert all(each.observation is not seen for each in outcomes) and robot in engine.mailbox.streams
        elif event == "instruction":
            epochs[robot] += 1
            outcomes += engine.flush(before_epoch=epochs[robot], stream=robot)
        elif event == "clock":
            stamps[robot] = 0
            outcomes += engine.reset(robot)
        else:
            outcomes += engine.reset(robot) if event == "reset" else engine.close(robot)
        assert all(each.observation.stream == robot for each in outcomes[before:])
    outcomes += rest(engine)
    assert sorted(map(id, (each.observation for each in outcomes))) == sorted(map(id, submitted)), "each frame once"
    for outcome in outcomes:
        seen = outcome.observation
        if isinstance(outcome, Drop):
            told = any(event not in ("frame", "tick") for event, robot, _ in events if robot == seen.stream)
            at = next(i for i, each in enumerate(submitted) if each is seen)
            newer = any(each.stream == seen.stream for each in submitted[at + 1 :])
            assert (outcome.reason in OWN_DOING and newer) or (outcome.reason is DropReason.EPOCH_CHANGED and told)
            continue
        assert outcome.tokens == plain[pictures[id(seen)]]
    for robot in ROBOTS:
        if not any(event == "clock" and name == robot for event, name, _ in events):
            actions = [each.observation for each in outcomes if isinstance(each, Action)]
            answered = [seen.stamp_ns for seen in actions if seen.stream == robot]
            assert answered == sorted(answered)
    assert len(engine.scheduler.requests) == 0


@pytest.mark.parametrize("mode", MODES)
def test_one_forward_carries_several_robots(policy: OpenVLATarget, mode: str) -> None:
    engine = made(policy, mode)
    for robot in ROBOTS:
        assert not engine.submit(frame(robot, 1, 0))
    together = 0
    outcomes: list[Outcome] = []
    while engine.busy:
        outcomes += engine.tick()
        together = max(together, len(engine.scheduler.requests))
    assert {each.observation.stream for each in outcomes if isinstance(each, Action)} == set(ROBOTS)
    assert together == len(ROBOTS)


@pytest.mark.parametrize("mode", ["ar", "auto"])
def test_the_robot_that_waits_longest_for_its_budget_is_begun_first(policy: OpenVLATarget, mode: str) -> None:
    engine = made(policy, mode)
    engine.open("left", budget_s=10.0)
    engine.open("right", budget_s=0.1)
    begun: list[str] = []
    for stamp in range(1, 4):
        for robot in ("left", "right"):  # a newer frame keeps its robot's turn
            engine.submit(frame(robot, stamp, 0))
    while engine.busy:
        engine.tick()
        names = [request.observation.stream for request in engine.scheduler.requests]
        begun += [name for name in names if name not in begun]
    assert begun == ["right", "left"]
    engine.open("left", budget_s=10.0, priority=1)
    for robot in ("right", "left"):
        engine.submit(frame(robot, 9, 0))
    outcomes = engine.tick()
    begun = [each.observation.stream for each in (*outcomes, *engine.scheduler.requests)]
    assert begun == ["left"]


def test_a_fast_camera_takes_no_turns_from_a_slow_one(policy: OpenVLATarget) -> None:
    engine = made(policy, "spec", streams=2)
    answered: Counter[str] = Counter()
    for stamp in range(1, 120):
        engine.submit(frame("left", stamp, stamp % 8))
        if not any(request.observation.stream == "right" for request in engine.scheduler.requests):
            engine.submit(frame("right", stamp, stamp % 8))
        answered.update(each.observation.stream for each in engine.tick() if isinstance(each, Action))
    assert abs(answered["left"] - answered["right"]) <= 2, answered


def test_more_robots_than_there_are_slots_for_are_told_so(policy: OpenVLATarget) -> None:
    engine = made(policy, "ar", streams=2)
    engine.warm_up()  # takes nobody's place
    engine.open("left")
    assert not engine.submit(frame("right", 1, 0))
    (drop,) = engine.submit(frame("third", 1, 0))
    assert (
        drop.reason is DropReason.TOO_MANY_STREAMS
        and "decode.streams is 2, already used by 'left', 'right'" in drop.detail
    )
    with pytest.raises(UserError, match=r"decode\.streams is 2, and that many robots are open"):
        engine.open("third")
    engine.close("left")
    assert not engine.submit(frame("third", 1, 0))
    assert {each.observation.stream for each in rest(engine)} == {"right", "third"}


def test_an_outcome_that_one_robot_cannot_take_is_reported_and_the_others_get_theirs(policy: OpenVLATarget) -> None:
    """Such as an action whose message cannot be published."""
    taken: list[tuple[str, int]] = []
    faults: list[str] = []

    def take(outcome: Outcome) -> None:
        if outcome.observation.stream == "left":
            raise ValueError("left has no publisher")
        taken.append((outcome.observation.stream, outcome.observation.stamp_ns))

    ends = [Drop(frame(robot, stamp, 0), DropReason.EPOCH_CHANGED) for stamp in (1, 2) for robot in ROBOTS]
    thread = EngineThread(lambda: made(policy, "ar"), on_outcome=take, on_fault=faults.append)
    try:
        thread.call(lambda _: ends)
    finally:
        assert thread.end(timeout_s=PATIENCE_S)
    assert taken == [(robot, stamp) for stamp in (1, 2) for robot in ROBOTS[1:]]
    assert [trace.strip().splitlines()[-1] for trace in faults] == ["ValueError: left has no publisher"] * 2


def test_what_cannot_be_computed_for_one_robot_costs_no_other(
    policy: OpenVLATarget, plain: dict[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(policy, "spec")
    original = type(policy).prompt_embeddings

    def broken(target: OpenVLATarget, observation: Observation, *others: object) -> object:
        if observation.stream == "right":
            raise RuntimeError("this picture lies")
        return original(target, observation, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(type(policy), "prompt_embeddings", broken)
    for number, robot in enumerate(ROBOTS):
        engine.submit(frame(robot, 1, number))
    found = {each.observation.stream: each for each in rest(engine)}
    assert isinstance(found["right"], Drop) and found["right"].reason is DropReason.ENGINE_FAULT
    for number, robot in enumerate(ROBOTS):
        outcome = found[robot]
        if robot != "right":
            assert isinstance(outcome, Action) and outcome.tokens == plain[number]
