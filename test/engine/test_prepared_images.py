# SPDX-License-Identifier: Apache-2.0
"""Pictures are prepared beside the ticks, once, where a newer one can no longer save the work; nothing else changes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import load_openvla, with_sensors
from support.draft_heads import policy_with_random_head
from support.paths import ORACLES
from support.patience import PATIENCE_S
from support.random_checkpoint import write_random_checkpoint
from support.random_qwen_vl import FAST_IDS, SHAPES, add_nora, add_vla0, write_qwen_vl

from specvla_ros import Policy
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.prepared_images import PreparedImages, prepared_images
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.thread import SharedEngine
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import ONLY_CAMERA, Observation
from specvla_ros.models.target import Pixels, PreparesImages, Target
from specvla_ros.speculation.settings import DraftSettings

INSTRUCTION = "put carrot on plate"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=2, hidden_size=64, layers=2)


def frame(stamp_ns: int, stream: str = "") -> Observation:
    image = np.random.default_rng(stamp_ns).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, INSTRUCTION, stamp_ns, stream=stream)


def tokens(outcomes: Sequence[Outcome]) -> dict[int, tuple[int, ...]]:
    return {each.observation.stamp_ns: each.tokens for each in outcomes if isinstance(each, Action)}


def rest(engine: Engine) -> list[Outcome]:
    ended: list[Outcome] = []
    while engine.busy:
        ended += engine.tick()
    return ended


class Watched:
    """Whose pictures were prepared, on which thread, and whether within a tick."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any] = OpenVLATarget) -> None:
        self.stamps: list[int] = []
        self.threads: list[str] = []
        self.in_tick: list[int] = []
        self._ticking: set[int] = set()
        pixels, tick = kind.pixels, Engine.tick

        def watched_pixels(target: Any, observation: Observation) -> Pixels:
            self.stamps.append(observation.stamp_ns)
            self.threads.append(threading.current_thread().name)
            if threading.get_ident() in self._ticking:
                self.in_tick.append(observation.stamp_ns)
            made: Pixels = pixels(target, observation)
            return made

        def watched_tick(engine: Engine) -> list[Outcome]:
            self._ticking.add(threading.get_ident())
            try:
                return tick(engine)
            finally:
                self._ticking.discard(threading.get_ident())

        monkeypatch.setattr(kind, "pixels", watched_pixels)
        monkeypatch.setattr(Engine, "tick", watched_tick)


def _openvla(directory: Path) -> Target:
    write_random_checkpoint(directory, seed=5, hidden_size=64, layers=2)
    return load_openvla(directory, device="cpu")


def _cameras(directory: Path) -> Target:
    write_random_checkpoint(directory, seed=5, hidden_size=64, layers=2)
    return load_openvla(with_sensors(directory), device="cpu")


def _oracle(name: str, **options: Any) -> Callable[[Path], Target]:
    def load(_: Path) -> Target:
        if not (ORACLES / name / "checkpoint").exists():
            pytest.skip(f"{ORACLES / name} is not here")
        return load_target(ORACLES / name / "checkpoint", device="cpu", **options)

    return load


FAMILIES: dict[str, Callable[[Path], Target]] = {
    "openvla": _openvla,
    "openvla, three cameras": _cameras,
    "openvla-oft": _oracle("oft_tiny_a"),
    "minivla": _oracle("minivla_tiny_a"),
    "pi0-fast": _oracle("pi0fast_tiny_a"),
    "nora": lambda path: load_target(add_nora(write_qwen_vl(path, SHAPES[0], seed=0, actions=FAST_IDS)), device="cpu"),
    "vla-0": lambda path: load_target(add_vla0(write_qwen_vl(path, SHAPES[1], seed=8, penalty=5.0)), device="cpu"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("height", "width"), [(480, 640), (224, 224), (37, 90)])
@torch.inference_mode()
def test_a_prompt_of_prepared_pictures_is_that_of_its_images_to_the_bit(
    family: str, height: int, width: int, tmp_path: Path
) -> None:
    target = FAMILIES[family](tmp_path)
    rng = np.random.default_rng(height)
    images = {name: rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for name in target.cameras}
    seen = Observation(images, INSTRUCTION, 1, state=rng.uniform(-0.5, 0.5, target.state_dims))
    ids = target.prompt_layout(seen).ids
    pictures = prepared_images(target, seen)
    assert isinstance(target, PreparesImages) and pictures is not None
    expected = target.prompt_embeddings(seen, ids)
    # The images are not looked at again: others stand in their place.
    others = replace(seen, images={name: image[::-1] for name, image in images.items()})
    assert torch.equal(target.prompt_embeddings(others, ids, None, pictures.pixels()), expected)
    assert not torch.equal(target.prompt_embeddings(others, ids), expected)


MODES = [
    EngineSettings("ar"),
    EngineSettings("spec", draft=DraftSettings(nodes=12)),
    EngineSettings("pipeline", in_order=True),
    EngineSettings("specpipe", draft=DraftSettings(nodes=12), prefill_chunks=2, in_order=True),
]


@pytest.mark.parametrize("settings", MODES, ids=lambda settings: settings.mode)
def test_a_frame_that_may_begin_is_prepared_where_it_is_submitted_and_in_no_tick(
    policy: OpenVLATarget, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [frame(stamp) for stamp in range(1, 9)]
    expected = tokens([Engine(policy, EngineSettings("ar")).act(each) for each in frames])
    watched = Watched(monkeypatch)
    engine, ended, left = Engine(policy, settings), list[Outcome](), list(frames)
    while left or engine.busy:
        if left and engine.has_room:
            ended += engine.submit(left.pop(0))
        ended += engine.tick()
    assert tokens(ended) == expected
    assert watched.stamps == [each.stamp_ns for each in frames]
    assert watched.in_tick == [] and {*watched.threads} == {"MainThread"}


def test_of_frames_that_cannot_begin_the_newest_alone_is_prepared_during_the_last_tick(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(policy, EngineSettings("ar"))
    for stamp in range(1, 10):  # it learns that an answer takes seven forwards
        engine.act(frame(stamp))
    expected = tokens([Engine(policy, EngineSettings("ar")).act(frame(24))])
    watched = Watched(monkeypatch)
    engine.submit(frame(20))
    engine.tick()
    ended: list[Outcome] = []
    for stamp in range(21, 25):
        ended += engine.submit(frame(stamp))
        ended += engine.tick()
    assert [(drop.observation.stamp_ns, drop.reason) for drop in ended if isinstance(drop, Drop)] == [
        (stamp, DropReason.SUPERSEDED) for stamp in (21, 22, 23)
    ]
    assert watched.stamps == [20]
    ended += rest(engine)
    assert tokens(ended)[24] == expected[24]
    assert watched.stamps == [20, 24] and watched.in_tick == [] and watched.threads[1].startswith("pictures")


def test_a_frame_that_is_refused_or_waits_behind_another_robot_is_not_prepared(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(policy, EngineSettings("ar", streams=2))
    watched = Watched(monkeypatch)
    engine.submit(frame(5, "left"))
    (late,) = engine.submit(frame(4, "left"))
    (third,) = engine.submit(frame(6, "right")) + engine.submit(frame(7, "third"))
    assert (late.reason, third.reason) == (DropReason.OUT_OF_ORDER, DropReason.TOO_MANY_STREAMS)
    assert watched.stamps == [5]
    assert {*tokens(rest(engine))} == {5, 6} and watched.stamps == [5, 6] and watched.in_tick == []


def test_an_error_in_preparing_costs_its_frame_alone_and_is_said_as_before(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = OpenVLATarget.pixels

    def broken(target: OpenVLATarget, observation: Observation) -> Pixels:
        if observation.stamp_ns % 3 == 0:
            raise ValueError("this picture lies")
        return pixels(target, observation)

    monkeypatch.setattr(OpenVLATarget, "pixels", broken)
    engine, ended = Engine(policy, EngineSettings("pipeline", in_order=True)), list[Outcome]()
    for stamp in range(1, 8):
        ended += engine.submit(frame(stamp))
        ended += engine.tick()
    ended += rest(engine)
    drops = {each.observation.stamp_ns: (each.reason, each.detail) for each in ended if isinstance(each, Drop)}
    assert drops == dict.fromkeys((3, 6), (DropReason.ENGINE_FAULT, "ValueError: this picture lies"))
    assert {*tokens(ended)} == {1, 2, 4, 5, 7}


def test_images_of_other_cameras_are_refused_as_before(policy: OpenVLATarget) -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    drop = Engine(policy, EngineSettings("ar")).act(Observation({"left": image, "right": image}, INSTRUCTION, 1))
    assert isinstance(drop, Drop) and drop.reason is DropReason.BAD_INSTRUCTION and "cameras" in drop.detail


def test_whoever_comes_second_waits_for_the_first_and_computes_nothing() -> None:
    begun, go_on, calls = threading.Event(), threading.Event(), list[str]()

    def compute() -> Pixels:
        calls.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return (torch.ones(2),)

    pictures, found = PreparedImages(compute), list[Pixels]()
    first = threading.Thread(target=pictures.prepare, name="camera")
    second = threading.Thread(target=lambda: found.append(pictures.pixels()))
    assert not pictures.started
    first.start()
    assert begun.wait(PATIENCE_S) and pictures.started
    second.start()
    go_on.set()
    for thread in (first, second):
        thread.join(PATIENCE_S)
    assert calls == ["camera"] and torch.equal(found[0][0], torch.ones(2)) and pictures.started


def test_policy_and_stream_and_server_prepare_on_their_callers_thread(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = frame(1).cameras[ONLY_CAMERA]
    watched = Watched(monkeypatch)
    face = Policy(policy, EngineSettings("pipeline"))
    watched.stamps.clear()
    expected = face.act(image, INSTRUCTION).tokens
    with face.stream() as stream:
        stream.put(image, INSTRUCTION)
        stream.finish()
        assert [action.tokens for action in stream] == [expected]
    thread = SharedEngine(Engine(policy, EngineSettings("pipeline")))
    try:
        seen = frame(1)
        decoded = thread.decode(seen, thread.prepared(seen)).result(PATIENCE_S)
    finally:
        thread.stop()
    assert tokens([decoded.outcome]) == {1: expected}
    assert len(watched.stamps) == 3 and {*watched.threads} == {"MainThread"} and watched.in_tick == []


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """Allocations of pinned memory, which there is none of without a GPU."""
    asked: list[torch.dtype] = []
    empty = torch.empty

    def allocate(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(options["dtype"])
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    yield asked


def test_for_a_gpu_they_are_pinned_in_the_decoders_precision(
    policy: OpenVLATarget, pinned: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = type("Decoder", (), {"device": torch.device("cuda"), "dtype": torch.bfloat16})()
    monkeypatch.setattr(OpenVLATarget, "decoder", decoder)
    pictures = prepared_images(policy, frame(1))
    assert pictures is not None
    (made,) = pictures.pixels()
    assert pinned == [torch.bfloat16] and torch.equal(made, policy.pixels(frame(1))[0].bfloat16())
