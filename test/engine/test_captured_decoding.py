# SPDX-License-Identifier: Apache-2.0
"""An engine whose forwards are captured gives what it gives without; one whose captures fail goes on without them.

There is no GPU here: a capture records the operations and does them again on the same memory.
"""

import gc
import logging
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import Run, capture_with, ends_as, refuses, stands_still
from support.checkpoints import load_openvla
from support.draft_heads import policy_with_random_head, write_random_head
from support.nightly import nightly_but
from support.random_checkpoint import write_random_checkpoint
from support.static_forwards import flash_attention, pooled, recorded, use_table

from benchmarks.random_policy import random_decoder
from specvla_kernels import attention_plan
from specvla_kernels.graph_capture import Capture, Captures, paddings
from specvla_ros.engine import runner as forwards
from specvla_ros.engine import runner as graphs
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.cuda_graphs import ForwardSizes, StaticForward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.runner import Forwards, Graphs
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.vision import StaticVision
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.drafters.eagle.captured import StaticDraft, StaticKeep
from specvla_ros.speculation.drafters.eagle.drafter import EagleDrafter
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

SMALL_TREE = adjusted(DraftSettings(nodes=8, top_k=3, depth=3), temporal=True)
SPECPIPE = EngineSettings("specpipe", max_in_flight=3, prefill_chunks=2, draft=SMALL_TREE)
PLAIN = EngineSettings("ar")
PRUNED = replace(
    SPECPIPE, draft=adjusted(DraftSettings(nodes=6), self_tokens=3, self_keep="similarity", self_image_share=0.3)
)
LOOKING = replace(SPECPIPE, acceptance=AcceptanceSettings("lvspec"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=5, hidden_size=64, layers=2)


def frame(stamp_ns: int) -> Observation:
    image = np.random.default_rng(stamp_ns % 3).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", stamp_ns)


def driven(engine: Engine, first_ns: int = 1) -> list[tuple[int, object, object]]:
    """A frame every other tick; what came of them."""
    ended: list[Outcome] = []
    for stamp_ns in range(first_ns, first_ns + 8):
        ended += engine.submit(frame(stamp_ns))
        ended += engine.tick() + engine.tick()
    while engine.busy:
        ended += engine.tick()
    return [essence(each) for each in ended]


def essence(outcome: Outcome) -> tuple[int, object, object]:
    if isinstance(outcome, Drop):
        return outcome.observation.stamp_ns, outcome.reason, outcome.detail
    return outcome.observation.stamp_ns, outcome.tokens, outcome.record.tokens_per_forward


@pytest.fixture(scope="module")
def eagerly_decoded(policy: OpenVLATarget) -> list[tuple[int, object, object]]:
    """What comes of the frames where nothing is captured."""
    return driven(Engine(policy, SPECPIPE))


def all_captured(engine: Engine) -> str:
    """The status of a warm engine once every size of forward and of draft, and the vision towers, are captured.

    A GPU captures the sizes of forwards that it timed, which are not those of the rule.
    """
    chosen = engine.settings
    drafts = chosen.slots * chosen.draft.depth + keeps(engine) if chosen.drafts else 0
    return f"{len(engine.runner.forwards.sizes.buckets()) + drafts + 1} captured"


def keeps(engine: Engine) -> int:
    """Sizes at which the draft head keeps what a prompt leaves."""
    return len(set(paddings(1, head_of(engine).committed_rows)))


def head_of(engine: Engine) -> EagleDrafter:
    (head,) = (each for each in engine.drafter.by_name.values() if isinstance(each, EagleDrafter))
    return head


def only_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a forward, or a draft, that runs as it comes is a fault."""

    def fail(*_: object) -> None:
        raise AssertionError("not captured")

    monkeypatch.setattr(forwards, "packed_forward", fail)
    monkeypatch.setattr(EagleDrafter, "_grow", fail)


@pytest.mark.parametrize(
    "chosen",
    nightly_but(lambda each: each is not LOOKING, [PLAIN, SPECPIPE, LOOKING, PRUNED]),
    ids=["ar", "specpipe", "lvspec", "self"],
)
def test_captured_forwards_give_the_same_tokens(
    policy: OpenVLATarget, chosen: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = Engine(policy, chosen)
    eager.warm_up()  # what a first answer teaches the scheduler decides when later frames begin
    expected = driven(eager)
    assert any(len(each) == 3 and isinstance(each[1], tuple) for each in expected)
    capture_with(monkeypatch, pooled())
    engine = Engine(policy, chosen)
    engine.warm_up()
    assert engine.describe()["cuda_graphs"] == all_captured(engine)
    only_captured(monkeypatch)
    for store in (engine.cache.keys, engine.cache.values):
        store.fill_(torch.nan)
    assert driven(engine) == expected


def test_a_warm_up_shows_each_step_and_is_timed(policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_with(monkeypatch)
    engine, steps = Engine(policy, SPECPIPE), list[str]()
    engine.warm_up(lambda what, fraction: steps.append(what))
    captured = [step for step in steps if "CUDA graphs captured" in step]
    assert f"{len(captured)} captured" == engine.describe()["cuda_graphs"]
    assert captured[0].startswith("warming up: 0 CUDA graphs captured, now ")
    number = re.fullmatch(r"warming up: (\d+) CUDA graphs captured, now .+", captured[-1])
    assert number and int(number[1]) == len(captured) - 1
    assert [steps[0], steps[1], steps[-1]] == [
        "warming up: comparing kernels with their references",
        "warming up: decoding a black test image",
        "warming up: timing ticks",
    ]
    assert 0.0 < engine.warm_up_s < 600.0


def test_a_switch_captures_again(policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_with(monkeypatch)
    cold = Engine(policy, PLAIN)
    cold.switch(SPECPIPE)
    assert "cuda_graphs" not in cold.describe(), "nothing is captured that was not warmed up"
    engine = Engine(policy, PLAIN)
    engine.warm_up()
    plain = {}
    for n in range(3, 6):
        action = engine.act(frame(n))
        assert isinstance(action, Action)
        plain[n] = action.tokens
    few = int(str(engine.describe()["cuda_graphs"]).split()[0])
    engine.switch(SPECPIPE)
    assert int(str(engine.describe()["cuda_graphs"]).split()[0]) > few
    only_captured(monkeypatch)
    ended = [each for each in driven(engine, first_ns=99) if isinstance(each[1], tuple)]
    assert len(ended) > 3
    assert all(tokens == plain[3 + stamp_ns % 3] for stamp_ns, tokens, _ in ended)


def test_a_switch_captures_after_the_earlier_graphs_are_gone(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is filled once cannot hold the graphs and KV caches of both settings."""
    capture_with(monkeypatch)
    engine = Engine(policy, SPECPIPE)
    engine.warm_up()
    gc.collect()  # a recorded capture, unlike a graph, holds what it belongs to
    engine.submit(frame(3))
    engine.tick()
    earlier = [weakref.ref(each) for each in (engine.cache, engine.runner.forwards, engine.drafter)]
    alive: list[int] = []
    warm_up = Graphs.warm_up

    def counted(graphs: Graphs, *args: Any) -> None:
        gc.collect()
        alive.append(sum(each() is not None for each in earlier))
        warm_up(graphs, *args)

    monkeypatch.setattr(Graphs, "warm_up", counted)
    drops = engine.switch(PLAIN)
    assert [drop.reason for drop in drops] == [DropReason.MODE_CHANGED]
    assert alive == [0]


def out_of_memory_at_the_third() -> Capture:
    left = iter(range(2))

    def capture(run: Run) -> Run:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return recorded(run)

    return capture


def probable(change: Callable[[torch.Tensor], torch.Tensor]) -> Capture:
    return ends_as(lambda trees: trees._replace(log_probs=change(trees.log_probs)))


def hidden(change: Callable[[torch.Tensor], torch.Tensor]) -> Capture:
    return ends_as(lambda made: (change(made[0]), made[1]))


FORWARD, VISION = r"a captured forward of \d+ rows is", "the captured vision is"
DRAFT = r"a captured draft of \d trees with \d levels"
KEPT = r"captured draft keys of \d+ rows is"


@pytest.mark.parametrize(
    ("of", "capture", "said"),
    nightly_but(
        lambda case: "nan" in case[2] or (case[1] is refuses and case[0] in (StaticForward, StaticKeep)),
        [
            (StaticForward, refuses, "RuntimeError: an operation that a capture does not permit\\)"),
            (StaticForward, out_of_memory_at_the_third(), "OutOfMemoryError: CUDA out of memory\\)"),
            (StaticForward, stands_still, f"{FORWARD} off by 1.* of a row's length"),
            (StaticForward, hidden(lambda rows: rows * 1.001), f"{FORWARD} off by 0.001 of a row's length"),
            (StaticForward, hidden(lambda rows: rows * torch.nan), f"{FORWARD} off by nan of a row's length"),
            (StaticVision, refuses, "RuntimeError: an operation that a capture does not permit\\)"),
            (StaticVision, stands_still, f"{VISION} off by nan of a row's length"),
            (StaticVision, ends_as(lambda rows: rows * 1.001), f"{VISION} off by 0.001 of a row's length"),
            (StaticVision, ends_as(lambda rows: rows.roll(1, 0)), f"{VISION} off by "),
            (StaticKeep, refuses, "RuntimeError: an operation that a capture does not permit\\)"),
            (StaticKeep, stands_still, f"{KEPT} off by"),
            (StaticDraft, refuses, "RuntimeError: an operation that a capture does not permit\\)"),
            (StaticDraft, stands_still, f"{DRAFT} has other roots"),
            (StaticDraft, probable(lambda each: each * 1.1), f"{DRAFT} is off by 0.1 of"),
            (StaticDraft, probable(lambda each: each * torch.nan), f"{DRAFT} is off by nan of"),
            (StaticDraft, probable(lambda each: each.roll(1, 0)), f"{DRAFT} is off by "),
        ],
        of_several=True,
    ),
)
def test_what_cannot_be_captured_runs_as_it_comes(
    policy: OpenVLATarget,
    eagerly_decoded: list[tuple[int, object, object]],
    of: type,
    capture: Capture,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others stay captured, and what is not is said with the reason."""
    capture_with(monkeypatch, capture, of=of)
    engine = Engine(policy, SPECPIPE)
    with caplog.at_level(logging.WARNING):
        engine.warm_up()
    status = str(engine.describe()["cuda_graphs"])
    assert re.search(rf"^\d+ captured; eager: .*\(RuntimeError: {said}|\({said}", status), status
    assert len(caplog.records) == 1 and status in caplog.text
    runner = engine.runner
    head = head_of(engine)
    counts = {
        StaticForward: len(runner.forwards._captured),
        StaticVision: int(runner.vision._captured is not None),
        StaticDraft: len(head._captured),
        StaticKeep: len(head._kept),
    }
    assert int(status.split()[0]) == sum(counts.values())
    assert all(n > 0 for kind, n in counts.items() if kind is not of), "one fault costs no other part"
    whole = {
        StaticForward: len(runner.forwards.sizes.buckets()),
        StaticVision: 1,
        StaticDraft: SPECPIPE.slots * 3,
        StaticKeep: keeps(engine),
    }
    assert counts[of] < whole[of] and all(counts[kind] == n for kind, n in whole.items() if kind is not of)
    assert driven(engine) == eagerly_decoded


@pytest.mark.parametrize(("flips", "eager"), [(0, False), (1, False), (3, False), (1 << 20, True)])
def test_a_near_tie_that_rounding_decides_otherwise_is_no_fault(
    flips: int, eager: bool, policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of other shapes holds other nodes then; a fault differs from every draw of rows."""
    grow, drawn = EagleDrafter._grow, list[int]()

    def grown(drafter: EagleDrafter, *arguments: Any) -> Any:
        trees = grow(drafter, *arguments)
        drawn.append(len(drawn))
        return trees._replace(log_probs=trees.log_probs * 1.3) if len(drawn) <= flips else trees

    monkeypatch.setattr(EagleDrafter, "_grow", grown)
    capture_with(monkeypatch)
    engine = Engine(policy, SPECPIPE)
    engine.warm_up()
    status = str(engine.describe()["cuda_graphs"])
    assert ("is off by 0.23 of a row's length" in status) == eager
    assert eager or status == all_captured(engine)


def test_one_size_that_comes_out_wrong_runs_as_it_comes(policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch) -> None:
    second = iter([False, True])

    def wrong_at_the_second(run: Run) -> Run:
        again, wrong = recorded(run), next(second, False)
        return lambda: (again()[0] * torch.nan, again()[1]) if wrong else again()

    capture_with(monkeypatch, wrong_at_the_second, of=StaticForward)
    engine = Engine(policy, PLAIN)
    engine.warm_up()
    *_, wrong, _ = (bucket.rows for bucket in engine.runner.forwards.sizes.buckets())  # the largest comes first
    status = str(engine.describe()["cuda_graphs"])
    reason = f"RuntimeError: a captured forward of {wrong - 1} rows is off by nan of a row's length"
    total = len(engine.runner.forwards.sizes.buckets())
    assert status == f"{total} captured; eager: forwards of {wrong} rows ({reason})"


def test_without_kernels_nothing_is_captured_and_the_reason_is_said(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: torch.Tensor) -> Capture:
        raise RuntimeError("operators run on references: Triton is not installed")

    monkeypatch.setattr(graphs, "capture_on", refuse)
    engine = Engine(policy, PLAIN)
    engine.warm_up()
    assert engine.describe()["cuda_graphs"] == "off: operators run on references: Triton is not installed"
    assert "Triton is not installed" in caplog.text
    assert isinstance(engine.act(frame(1)), Action)


@torch.inference_mode()
def test_a_size_that_was_not_expected_runs_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = 0

    def counted(run: Run) -> Run:
        def again() -> torch.Tensor:
            nonlocal runs
            runs += 1
            return run()

        return again

    use_table(monkeypatch)
    decoder = random_decoder(DecoderShape(32, 40, 2, 4, 2, 16, vocab_size=50), dtype=torch.float64)
    cache, other = (new_cache(decoder, slots=2, slot_rows=64) for _ in range(2))
    run = Forwards(decoder, cache, ForwardSizes(slots=2, nodes=4, prompts=(8,)))
    run.capture(Captures(counted))
    before = runs
    for n, captured in ((8, 1), (30, 0), (5, 1)):
        segments = [Segment(0, 0, torch.arange(n), wanted=2)]
        expected = packed_forward(decoder, segments, other)
        torch.testing.assert_close(run(segments).logits, expected.logits)
        assert runs - before == captured
        before = runs


def test_on_a_cpu_nothing_is_captured_and_nothing_is_said(policy: OpenVLATarget) -> None:
    engine = Engine(policy, PLAIN)
    engine.warm_up()
    assert "cuda_graphs" not in engine.describe()
    assert isinstance(engine.act(frame(1)), Action)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@pytest.mark.parametrize("chosen", [PLAIN, SPECPIPE], ids=["ar", "specpipe"])
def test_on_a_gpu_every_size_is_captured(
    tmp_path_factory: pytest.TempPathFactory, chosen: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, seed=5, hidden_size=64, layers=2)
    policy = load_openvla(directory, device="cuda", dtype="float32")
    write_random_head(directory / "draft", policy.decoder)
    expected = driven(Engine(policy, chosen))
    engine = Engine(policy, chosen)
    assert engine.describe()["cuda_graphs"] == "off: not warmed up"
    engine.warm_up()
    assert engine.describe()["cuda_graphs"] == all_captured(engine)
    only_captured(monkeypatch)
    assert [each for each in driven(engine) if isinstance(each[1], tuple)] == [
        each for each in expected if isinstance(each[1], tuple)
    ]


@pytest.mark.parametrize(
    ("attend", "times", "said", "used"),
    nightly_but(
        lambda case: "faster" in case[2] or "RuntimeError" in case[2],
        [
            (flash_attention, (1.0, 2.0), "faster in ", True),
            (flash_attention, (2.0, 1.0), "slower in ", False),
            (lambda *_, **__: 1 / 0, (1.0, 2.0), "fails: ZeroDivisionError: division by zero in ", False),
            (lambda q, *_, **__: torch.zeros_like(q), (1.0, 2.0), "fails: RuntimeError: a captured forward of ", False),
        ],
        of_several=True,
    ),
    ids=["faster", "slower", "refuses", "wrong"],
)
def test_flash_attn_is_taken_where_it_is_equal_and_faster(
    policy: OpenVLATarget,
    attend: Callable[..., torch.Tensor],
    times: tuple[float, float],
    said: str,
    used: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not there without a GPU: by what its documentation says of it, and a clock that is told."""
    expected = driven(Engine(policy, SPECPIPE))
    capture_with(monkeypatch)
    clock = cycle(times)  # flash-attn's comes first
    monkeypatch.setattr(attention_plan, "varlen_kernel", lambda: attend)
    monkeypatch.setattr(forwards, "flash_takes", lambda *_: True)
    monkeypatch.setattr(forwards, "seconds", lambda *_: next(clock))
    engine = Engine(policy, SPECPIPE)
    engine.warm_up()
    assert engine.describe()["cuda_graphs"] == all_captured(engine), "what does not run costs nothing"
    assert said in engine.describe()["attention"]
    captured = engine.runner.forwards._captured
    prompts = [bucket for bucket in captured if bucket.longest > SPECPIPE.tree_nodes]
    assert prompts and {captured[each]._plan.chain is not None for each in prompts} == {used}
    assert not any(captured[each]._plan.chain for each in captured if each not in prompts), "trees are ours"
    only_captured(monkeypatch)
    assert driven(engine) == expected


def test_without_flash_attn_nothing_is_said_of_it(policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    attention_plan.varlen_kernel.cache_clear()
    assert not attention_plan.flash_takes(torch.bfloat16, 128)
    capture_with(monkeypatch)
    engine = Engine(policy, PLAIN)
    engine.warm_up()
    assert "attention" not in engine.describe()
    monkeypatch.setattr(attention_plan, "varlen_kernel", lambda: flash_attention)
    assert attention_plan.flash_takes(torch.bfloat16, 128)
    assert not attention_plan.flash_takes(torch.float32, 128) and not attention_plan.flash_takes(torch.bfloat16, 260)
