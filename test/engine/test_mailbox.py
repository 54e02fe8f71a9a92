# SPDX-License-Identifier: Apache-2.0
"""Which of the robots' frames is begun next, what is dropped for it, and pictures that are computed once."""

import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specvla_ros.engine import mailbox
from specvla_ros.engine.mailbox import Mailbox, Waiting
from specvla_ros.engine.outcome import Drop, DropReason
from specvla_ros.engine.prepared_images import PreparedImages, prepared_images
from specvla_ros.models.observation import Observation

SECOND = 10**9
IMAGE = np.zeros((2, 2, 3), np.uint8)


class Clock:
    """Of the frames' arrival, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(mailbox, "time", made := Clock())
    return made


def frame(stream: str, stamp_ns: int, epoch: int = 0) -> Observation:
    return Observation(IMAGE, "lift", stamp_ns, epoch=epoch, stream=stream)


def box(*names: str, limit: int = 3, **now: Any) -> Mailbox:
    made = Mailbox(now.get("now_ns"))
    made.limit = limit
    assert all(made.open(name, budget_s=0.0, priority=0) for name in names)
    return made


def taken(of: Mailbox, **how: Any) -> Any:
    found = of.take(0.0, **how)
    return (found.observation.stream, found.observation.stamp_ns) if isinstance(found, Waiting) else found


def test_the_earliest_deadline_is_begun_first_and_a_newer_frame_keeps_its_turn(clock: Clock) -> None:
    of = box("slow", "fast", "third")
    of.open("slow", budget_s=0.5, priority=0)
    of.open("fast", budget_s=0.2, priority=0)
    assert not of.waiting and of.next() is None and taken(of) is None
    assert of.submit(frame("slow", 1)) == []
    clock.now_s = 0.2
    pictures = PreparedImages(lambda: ())
    assert of.submit(frame("fast", 2), pictures) == [] and of.waiting
    clock.now_s = 0.45
    of.submit(frame("third", 3))
    [superseded] = of.submit(frame("fast", 4), pictures)
    assert (superseded.reason, superseded.observation.stamp_ns) == (DropReason.SUPERSEDED, 2)
    waiting = of.next()
    assert waiting is not None and waiting.images is pictures and waiting.observation.stamp_ns == 4
    assert [taken(of) for _ in range(4)] == [("fast", 4), ("third", 3), ("slow", 1), None]
    clock.now_s = 1.0
    of.submit(frame("fast", 5))
    clock.now_s = 1.1
    of.submit(frame("third", 6))
    assert taken(of) == ("third", 6), "a new turn after the old one was taken"


@pytest.mark.parametrize(
    ("budget_s", "then_ns", "order"),
    [
        (0.0, 300_000_000, ("opened", "other")),
        (0.5, 300_000_000, ("other", "opened")),
        (1.0, SECOND - 1, ("other", "opened")),
        (1.0, SECOND, ("opened", "other")),
    ],
)
def test_a_robot_that_told_nothing_has_no_budget_and_no_priority(
    clock: Clock, budget_s: float, then_ns: int, order: tuple[str, str]
) -> None:
    of = box()
    of.open("opened", budget_s=budget_s, priority=0)
    of.submit(frame("opened", 1))
    clock.now_s = then_ns / 1e9
    of.submit(frame("other", 1))
    assert tuple(taken(of)[0] for _ in order) == order


def test_a_higher_priority_goes_before_every_deadline(clock: Clock) -> None:
    of = box("first", "second")
    of.open("second", budget_s=9.0, priority=1)
    of.submit(frame("first", 1))
    clock.now_s = 1.0
    of.submit(frame("second", 1))
    assert taken(of, room=lambda name: name == "first") == ("first", 1)
    of.submit(frame("first", 2))
    first = of.next(lambda name: name == "first")
    assert first is not None and first.observation.stream == "first"
    assert [taken(of), taken(of)] == [("second", 1), ("first", 2)]


def test_frames_out_of_order_and_of_unknown_robots_are_dropped() -> None:
    of = box("left", limit=2)
    assert of.last_stamp_ns == 0 and of.submit(frame("left", 2 * SECOND)) == []
    same = "has the stamp of the last accepted frame: the camera driver does not update header.stamp"
    for stamp_ns, words in ((2 * SECOND, same), (SECOND // 2, "1.500 s older than the last accepted frame")):
        [drop] = of.submit(frame("left", stamp_ns))
        assert (drop.reason, drop.detail) == (DropReason.OUT_OF_ORDER, words)
    assert of.submit(frame("right", 5 * SECOND)) == [] and of.streams == ("left", "right")
    assert of.last_stamp_ns == 5 * SECOND
    [drop] = of.submit(frame("third", 1))
    assert (drop.reason, drop.detail) == (
        DropReason.TOO_MANY_STREAMS,
        "decode.streams is 2, already used by 'left', 'right'",
    )
    assert not of.open("third", budget_s=0.0, priority=0) and Mailbox(None).limit == 1
    of.take_any_stamp("left")
    assert of.submit(frame("left", 1))[0].reason is DropReason.SUPERSEDED and of.submit(frame("right", 1))
    of.take_any_stamp()
    assert of.last_stamp_ns == Mailbox(None).last_stamp_ns == 0
    assert of.submit(frame("right", 1))[0].reason is DropReason.SUPERSEDED


def test_what_is_too_old_when_it_is_taken_is_dropped() -> None:
    now_ns = 10 * SECOND
    of = box("left", now_ns=lambda: now_ns)

    def take(stamp_ns: int, max_age_s: float) -> Any:
        of.take_any_stamp()
        of.submit(frame("left", stamp_ns))
        return of.take(max_age_s)

    drop = take(8 * SECOND, 1.0)
    assert isinstance(drop, Drop) and drop.reason is DropReason.STALE
    assert drop.detail.startswith("2.000 s old, the limit is 1 s; images are delayed, or the clocks differ: ")
    assert isinstance(take(8 * SECOND, 3.0), Waiting) and isinstance(take(SECOND, 0.0), Waiting)
    with pytest.raises(KeyError), of.without_clock():
        assert isinstance(take(SECOND, 1.0), Waiting)
        raise KeyError
    assert isinstance(take(SECOND, 1.0), Drop)


def test_a_stream_that_is_closed_gives_its_place_away_unless_a_later_epoch_waits() -> None:
    of = box("left", "right", limit=2)
    of.submit(frame("left", 1, epoch=1))
    of.submit(frame("right", 1, epoch=2))
    assert of.drop(DropReason.PAUSED, before_epoch=1) == [] and of.drop(DropReason.PAUSED, only="third") == []
    assert of.close("right", DropReason.PAUSED, before_epoch=2) == [] and of.streams == ("left", "right")
    [drop] = of.close("right", DropReason.PAUSED)
    assert (drop.reason, drop.observation.stream) == (DropReason.PAUSED, "right") and of.streams == ("left",)
    assert of.close("right", DropReason.PAUSED) == [] and of.waiting
    of.submit(frame("right", 1, epoch=1))
    dropped = of.drop(DropReason.EPOCH_CHANGED, before_epoch=2)
    assert [(each.observation.stream, each.reason) for each in dropped] == [
        ("left", DropReason.EPOCH_CHANGED),
        ("right", DropReason.EPOCH_CHANGED),
    ]
    assert not of.waiting and of.streams == ("left", "right")
    assert of.drop(DropReason.PAUSED, before_epoch=math.inf) == []


def test_pictures_are_computed_once_and_by_one_thread() -> None:
    begun, go_on, count = threading.Event(), threading.Event(), []

    def compute() -> tuple[torch.Tensor, ...]:
        count.append(1)
        begun.set()
        assert go_on.wait(20)
        return (torch.ones(2),)

    pictures = PreparedImages(compute)
    assert not pictures.started
    other = threading.Thread(target=pictures.prepare)
    other.start()
    assert begun.wait(20) and pictures.started
    go_on.set()
    assert pictures.pixels()[0].tolist() == [1, 1] and pictures.pixels() and pictures.started
    other.join()
    assert len(count) == 1


def test_an_error_is_kept_for_who_asks_for_the_pixels() -> None:
    count = []

    def compute() -> Any:
        count.append(1)
        raise ValueError("a broken picture")

    pictures = PreparedImages(compute)
    pictures.prepare()
    assert pictures.started
    for _ in range(2):
        with pytest.raises(ValueError, match="a broken picture"):
            pictures.pixels()
    assert len(count) == 1


def test_pixels_have_the_decoders_dtype_and_some_policies_have_none() -> None:
    decoder = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float64)
    target: Any = SimpleNamespace(
        decoder=decoder, pixels=lambda _: [torch.ones(2), torch.zeros(1)], prompt_embeddings=lambda *_: None
    )
    made = prepared_images(target, frame("left", 1))
    assert made is not None
    assert [(each.dtype, each.tolist()) for each in made.pixels()] == [(torch.float64, [1, 1]), (torch.float64, [0])]
    assert prepared_images(SimpleNamespace(decoder=decoder), frame("left", 1)) is None  # type: ignore[arg-type]
