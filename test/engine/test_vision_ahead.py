# SPDX-License-Identifier: Apache-2.0
"""An image that is processed beside the forward before its prompt: the same tokens, and its faults stay its own.

Without a GPU the towers run after that forward, in the same tick.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.captures import capture_with
from support.checkpoints import load_openvla
from support.draft_heads import policy_with_random_head, write_random_head
from support.pipelines import fed
from support.random_checkpoint import write_random_checkpoint

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.engine.pace import Kind, Pace
from specvla_ros.engine.request import Request
from specvla_ros.engine.runner import Forwards, Runner
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.vision import SideStream, StageClock
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import ForwardResult
from specvla_ros.speculation.settings import DraftSettings

AUTO = EngineSettings("auto", draft=DraftSettings(nodes=8, top_k=3, depth=3))
AHEAD = Pace(2, math.inf, ahead=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=9, hidden_size=64, layers=2)


def frame(stamp_ns: int) -> Observation:
    image = np.random.default_rng(stamp_ns).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", stamp_ns)


@contextmanager
def ahead(
    policy: OpenVLATarget, *, warm: bool = False, pace: Pace = AHEAD, settings: EngineSettings = AUTO
) -> Iterator[Engine]:
    engine = Engine(policy, settings)
    if warm:
        engine.warm_up()
    assert engine.scheduler.chooser is not None
    with engine.scheduler.chooser.pinned(pace):
        yield engine


def frames(number: int) -> list[Observation]:
    return [frame(stamp) for stamp in range(1, number + 1)]


def test_the_first_image_waits_for_no_other_and_later_ones_have_a_tick_before_their_prompt(
    policy: OpenVLATarget,
) -> None:
    with ahead(policy) as engine:
        engine.submit(frame(1))
        engine.tick()
        assert (engine.last_work.images, engine.last_work.prompts) == (1, 1)
        engine.submit(frame(2))
        assert engine.has_room
        engine.tick()
        assert (engine.last_work.images, engine.last_work.prompts, engine.last_work.trees) == (1, 0, 1)
        assert not engine.has_room, "one prompt at a time"
        engine.tick()
        assert (engine.last_work.images, engine.last_work.prompts) == (0, 1)


def test_the_time_of_every_tick_is_booked(policy: OpenVLATarget) -> None:
    with ahead(policy) as engine:
        actions = [each for each in fed(engine, frames(8)) if isinstance(each, Action)]
    for action in actions:
        record, timings = action.record, action.timings
        assert len(record.tokens_per_forward) == len(record.tick_s)
        spent_s = timings.vision_s + timings.prefill_s + timings.decode_s
        assert timings.vision_s > 0 and spent_s == pytest.approx(sum(record.tick_s))
    assert any(action.record.tokens_per_forward[0] == 0 for action in actions)


@pytest.mark.parametrize("failing", [2, 4])
def test_an_image_that_fails_ahead_is_dropped_alone(
    policy: OpenVLATarget, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engine(policy, EngineSettings("ar"))
    embed = OpenVLATarget.prompt_embeddings

    def fails(target: OpenVLATarget, observation: Observation, *others: object) -> torch.Tensor:
        if observation.stamp_ns == failing:
            raise RuntimeError("a tower fell")
        return embed(target, observation, *others)  # type: ignore[arg-type]

    expected = {stamp: plain.act(frame(stamp)) for stamp in range(1, 7)}
    monkeypatch.setattr(OpenVLATarget, "prompt_embeddings", fails)
    with ahead(policy) as engine:
        outcomes = fed(engine, frames(6))
        assert engine.cache.free_slots == engine.cache.slots
    drops = [each for each in outcomes if isinstance(each, Drop) and each.reason is DropReason.ENGINE_FAULT]
    assert [each.observation.stamp_ns for each in drops] == [failing] and "a tower fell" in drops[0].detail
    actions = [each for each in outcomes if isinstance(each, Action)]
    assert len(actions) >= 3
    for each in actions:
        right = expected[each.observation.stamp_ns]
        assert isinstance(right, Action) and each.tokens == right.tokens


def test_a_frame_flushed_while_its_image_is_processed_leaves_nothing_behind(policy: OpenVLATarget) -> None:
    with ahead(policy) as engine:
        engine.submit(frame(1))
        engine.tick()
        engine.submit(frame(2))
        engine.tick()
        assert {each.observation.stamp_ns for each in engine.flush()} == {1, 2}
        assert engine.cache.free_slots == engine.cache.slots
        right = Engine(policy, EngineSettings("ar")).act(frame(3))
        action = engine.act(frame(3))
        assert isinstance(action, Action) and isinstance(right, Action) and action.tokens == right.tokens


def test_a_frame_flushed_while_its_image_is_processed_fails_no_other(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is still on the side when the next tick has read back; a GPU raises if it is asked for the time."""
    beside: list[bool] = []
    embed_ahead = Runner.embed_ahead

    def embed(runner: Runner, request: Request) -> None:
        beside.append(True)
        embed_ahead(runner, request)
        beside.clear()

    class Mark:
        def __init__(self, enable_timing: bool) -> None:
            self.passed = False

        def record(self) -> None:
            self.passed = not beside

        def query(self) -> bool:
            return self.passed

        def elapsed_time(self, end: "Mark") -> float:
            if not (self.passed and end.passed):
                raise RuntimeError("CUDA error: device not ready")
            return 1.0

    monkeypatch.setattr(Runner, "embed_ahead", embed)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    with ahead(policy, settings=replace(AUTO, streams=2)) as engine:
        engine.runner._clock = StageClock(torch.device("cuda"))
        engine.submit(frame(1))
        engine.tick()
        engine.submit(replace(frame(2), stream="other"))
        engine.tick()
        assert [each.observation.stamp_ns for each in engine.flush(stream="other")] == [2]
        ended = [outcome for _ in range(20) for outcome in engine.tick()]
    assert [type(outcome) for outcome in ended] == [Action], ended


def test_images_wait_for_no_forward_and_their_prompt_waits_for_them(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the streams of a GPU that is not there; all else runs here."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("side", order))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(order))
    monkeypatch.setattr(torch.cuda, "stream", Stream.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream.current[-1])
    embed, run = OpenVLATarget.prompt_embeddings, Forwards.__call__

    def embeddings(*arguments: object) -> torch.Tensor:
        order.append(f"images on {Stream.current[-1].name}")
        return embed(*arguments)  # type: ignore[arg-type]

    def forward(*arguments: object) -> ForwardResult:
        order.append(f"forward on {Stream.current[-1].name}")
        return run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Stream, "current", [Stream("main", order)])
    monkeypatch.setattr(OpenVLATarget, "prompt_embeddings", embeddings)
    monkeypatch.setattr(Forwards, "__call__", forward)
    with ahead(policy) as engine:
        engine.runner.side = SideStream(torch.device("cuda"))
        ticks = []
        for stamp in (1, 2, 0):
            if stamp:
                engine.submit(frame(stamp))
            order.clear()
            engine.tick()
            ticks.append([*order])
    assert ticks == [
        ["main waits for side", "images on main", "forward on main"],
        ["mark on main", "forward on main", "side waits for the mark", "images on side"],
        ["main waits for side", "forward on main"],
    ]


class Stream:
    """Writes down what it waits for."""

    current: ClassVar[list["Stream"]] = []

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self._order = name, order

    def wait_event(self, _: "Event") -> None:
        self._order.append(f"{self.name} waits for the mark")

    def wait_stream(self, other: "Stream") -> None:
        self._order.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def entered(self) -> Iterator[None]:
        Stream.current.append(self)
        yield
        Stream.current.pop()


class Event:
    """The mark that the images wait for."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def record(self, stream: Stream) -> None:
        self._order.append(f"mark on {stream.name}")


def test_a_cpu_has_nothing_to_process_images_beside(policy: OpenVLATarget) -> None:
    engine = Engine(policy, AUTO)
    engine.warm_up()
    chooser = engine.scheduler.chooser
    assert chooser is not None and not chooser.ahead
    assert not any(pace.ahead for pace in [*chooser.candidates(), *chooser.every_kind()])


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has engines believe that vision runs beside forwards here."""

    def concurrent(side: SideStream, _: torch.device) -> None:
        side.concurrent = True

    monkeypatch.setattr(SideStream, "__init__", concurrent)
    monkeypatch.setattr(SideStream, "begin", lambda _: None)
    monkeypatch.setattr(SideStream, "join", lambda _: None)
    monkeypatch.setattr(SideStream, "beside", contextmanager(lambda _: iter([None])))


def test_a_device_that_can_is_measured_with_images_ahead(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    capture_with(monkeypatch)
    engine = Engine(policy, AUTO)
    engine.warm_up()
    chooser = engine.scheduler.chooser
    assert chooser is not None and chooser.ahead
    for kind in (Kind(True, 0, 1, True), Kind(False, 1, 1, True), Kind(False, 2, 1, False)):
        assert chooser.times.seconds(kind) is not None, kind


@pytest.mark.parametrize("wrong", [lambda rows: rows + 1, lambda rows: rows.roll(1, 0)], ids=["other", "moved"])
def test_where_images_beside_a_forward_come_out_wrong_none_is_processed_so(
    policy: OpenVLATarget,
    wrong: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    as_on_a_gpu(monkeypatch)
    embed = OpenVLATarget.prompt_embeddings
    beside = False

    @contextmanager
    def runs_beside(_: SideStream) -> Iterator[None]:
        nonlocal beside
        beside = True
        yield
        beside = False

    def embeddings(*arguments: object) -> torch.Tensor:
        rows = embed(*arguments)  # type: ignore[arg-type]
        return wrong(rows) if beside else rows

    monkeypatch.setattr(SideStream, "beside", runs_beside)
    monkeypatch.setattr(OpenVLATarget, "prompt_embeddings", embeddings)
    engine = Engine(policy, AUTO)
    engine.warm_up()
    chooser = engine.scheduler.chooser
    assert chooser is not None and not chooser.ahead
    assert "no image is processed beside a forward: a prompt computed beside a forward is off by" in caplog.text
    assert isinstance(engine.act(frame(1)), Action)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs two streams of a GPU")
@pytest.mark.parametrize("pace", [AHEAD, Pace(3, 1.0, 2, ahead=True)], ids=str)
def test_on_a_gpu_images_ahead_change_no_token(tmp_path: Path, pace: Pace) -> None:
    write_random_checkpoint(tmp_path, seed=5, hidden_size=64, layers=2)
    policy = load_openvla(tmp_path, device="cuda", dtype="float32")
    write_random_head(tmp_path / "draft", policy.decoder)
    plain = Engine(policy, EngineSettings("ar"))
    expected = {stamp: plain.act(frame(stamp)) for stamp in range(1, 61)}
    with ahead(policy, warm=True, pace=pace) as engine:
        chooser = engine.scheduler.chooser
        assert chooser is not None and chooser.ahead, "vision beside a forward came out wrong"
        actions = [each for each in fed(engine, frames(60)) if isinstance(each, Action)]
    assert len(actions) > 40
    for each in actions:
        right = expected[each.observation.stamp_ns]
        assert isinstance(right, Action) and each.tokens == right.tokens
