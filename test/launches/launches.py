# SPDX-License-Identifier: Apache-2.0
"""What a tick of the engine asks of a GPU, counted without one: launches, copies, read-backs, at OpenVLA-7B's shapes.

PYTHONPATH=test python -m launches.launches

The real engine runs on fake CUDA tensors (`support/fake_cuda.py`): what each captured graph holds is counted once, then
frames are decoded and the host's launches of each tick are counted, a replayed graph as one. Nothing is timed.

Beside each figure the file keeps what was counted first. Where the code launches otherwise than it says,
`test_launches.py` fails: a launch more is to be avoided, one less is to be written down.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import typer
from support.fake_cuda import COPY_IN, READ_BACK, REPLAY, WAIT, Launches, fake_cuda
from torch import nn

from benchmarks.harness import Out, finish, kept_before, result_head
from benchmarks.random_policy import PROMPT, SIZES, TOKENS, RandomPolicy, Size, frame, random_codec
from benchmarks.results_page import RESULTS
from specvla_ros.engine import cuda_graphs, runner, vision
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Drop, DropReason
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.engine.verifier import Commit, Prepared, Verifier, VerifyInput
from specvla_ros.models.config import DecoderShape
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder
from specvla_ros.models.families.openvla.config import OpenVLAConfig
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.families.openvla.prompt import PromptTokenizer
from specvla_ros.models.generation import NO_RULES, GreedyRules
from specvla_ros.models.quantization import ROTATED, quantize_layer
from specvla_ros.models.settings import PromptStyle
from specvla_ros.speculation.drafters.eagle import drafter as eagle
from specvla_ros.speculation.drafters.eagle import head as eagle_head
from specvla_ros.speculation.drafters.eagle.captured import StaticDraft, StaticKeep
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.settings import AcceptanceSettings

CONFIG = Path(__file__).resolve().parents[2] / "config"
_ACCEPTED = 3  # tokens that a verification with a tree commits
_TICKS = 16
_STEADY = 6  # the first tick that is counted
_FROM_THE_END = 164  # of the vocabulary, an action token
_DTYPE = torch.bfloat16
_ONE_FORWARD = "one forward"  # the name of a head that drafts all levels at once
_BINS = AcceptanceSettings("bin_distance", bins=(9,), gripper_bins=0)
# Sections of a tick, by the method whose work they are.
_SECTIONS = {
    "embed": (Engine, "_embed"),
    "forward and verify": (Engine, "_forward"),
    "draft": (Engine, "_draft"),
}


def settings_of(
    mode: str, *, chunks: int = 1, nodes: int = 16, rule: str = "bin_distance", **drafts: Any
) -> EngineSettings:
    """Decoding with a draft head. `drafts`: further parameters of drafting, by name."""
    acceptance = _BINS if rule == _BINS.rule else AcceptanceSettings(rule)
    given = {"head": "random", "nodes": nodes, "depth": 5} | drafts
    settings = engine_settings_from(values={f"draft.{name}": value for name, value in given.items()})
    return replace(settings, mode=mode, prefill_chunks=chunks, max_text_tokens=128, acceptance=acceptance)


def profile(name: str, head: str = "random") -> EngineSettings:
    """Decoding of a shipped profile, relaxed; `head`: draft head."""
    settings = engine_settings_from(params_file=CONFIG / f"{name}.yaml", values={"draft.head": head})
    return replace(settings, max_text_tokens=128, max_image_age_s=0.0, acceptance=_BINS)


@dataclass(frozen=True)
class Case:
    """A policy and its decoding."""

    settings: EngineSettings
    size: str = "7b"  # its shapes, of `SIZES`
    quantization: str = "none"
    generation: GreedyRules = NO_RULES


UNFUSED = ("lvspec", "composite")  # rules for text that no kernel decides; in no shipped profile
# Draft head by decoder. None drafts for a decoder with image features in its first layers.
HEADS = {"minivla": "random", "pi0-fast": "random", "qwen2.5-vl-3b": "random", "qwen3-vl-4b": ""}
CASES: dict[str, Case] = {
    "ar": Case(settings_of("ar")),
    "spec": Case(settings_of("spec")),
    "spec, window mass": Case(settings_of("spec", children="window_mass")),
    "spec, drafts from one forward": Case(settings_of("spec", head=_ONE_FORWARD)),
    "pipeline": Case(settings_of("pipeline")),
    "specpipe": Case(settings_of("specpipe")),
    "specpipe, two chunks": Case(settings_of("specpipe", chunks=2)),
    "spec, temporal": Case(settings_of("spec", temporal=True)),
    "specpipe, temporal": Case(settings_of("specpipe", temporal=True)),
    "spec, temporal and prompt lookup": Case(settings_of("spec", temporal=True, prompt_lookup_tokens=10)),
    "spec, rule fly": Case(settings_of("spec", rule="fly")),
    **{f"spec, rule {rule}": Case(settings_of("spec", rule=rule)) for rule in UNFUSED},
    "spec, repetition penalty": Case(settings_of("spec"), generation=GreedyRules(1.05)),
    "specpipe, temporal, rule fly": Case(settings_of("specpipe", temporal=True, rule="fly")),
    "specpipe, temporal, repetition penalty": Case(
        settings_of("specpipe", temporal=True), generation=GreedyRules(1.05)
    ),
    "orin.yaml": Case(profile("orin"), quantization="w8a8"),
    "desktop.yaml": Case(profile("desktop")),
    "desktop.yaml, fp8": Case(profile("desktop"), quantization="fp8"),
    f"orin.yaml, {ROTATED}": Case(profile("orin"), quantization=ROTATED),
    **{
        f"{name}: specpipe, temporal": Case(settings_of("specpipe", head=head, temporal=True), name)
        for name, head in HEADS.items()
    },
    **{
        f"{name}: {device}.yaml": Case(profile(device, head), name, quantization)
        for name, head in HEADS.items()
        for device, quantization in (("orin", "w8a8"), ("desktop", "none"))
    },
}


def fake_policy(
    size: Size, tokens: int = TOKENS, *, quantization: str = "none", generation: GreedyRules = NO_RULES
) -> RandomPolicy:
    """A policy on fake memory."""
    with torch.device("meta"):
        model = OpenVLA(OpenVLAConfig(size.towers, size.llama, 64, 256, {}, vicuna=False))
    _on_device(model)
    if quantization != "none":
        for layer in model.decoder.layers:
            assert isinstance(layer, DecoderLayer)
            quantize_layer(layer, quantization)
    if quantization == ROTATED:
        model.decoder.turn = torch.empty(2 * (size.llama.hidden_size,), dtype=_DTYPE, device="cuda")
    pixels = torch.empty(3 * len(size.towers), 224, 224)
    # Features for the first layers come from a vision tower of their own, which is not counted.
    prompt = torch.empty(PROMPT, size.llama.input_size, dtype=_DTYPE, device="cuda") if size.llama.deepstack else None
    return RandomPolicy(
        generation=generation,
        directory=Path("random"),
        model=model.eval().requires_grad_(False),
        image_processor=lambda _: pixels,  # type: ignore[arg-type]
        prompt=PromptTokenizer(None, style=PromptStyle.OPENVLA, trailing_id=None, vocab_size=size.llama.vocab_size),
        codec=random_codec(model.config.token_vocab_size, tokens),
        prompt_rows=PROMPT,
        embeddings=prompt,
    )


def fake_decoder(shape: DecoderShape) -> PackedDecoder:
    """A decoder on fake memory."""
    with torch.device("meta"):
        decoder = PackedDecoder(shape)
    _on_device(decoder)
    return decoder.eval().requires_grad_(False)


def _on_device(module: nn.Module) -> None:
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(_empty(parameter), requires_grad=False))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, _empty(buffer))


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(like.shape), dtype=_DTYPE, device="cuda")


def _head(directory: Path, decoder: Any) -> EagleHead:
    with torch.device("meta"):
        config = replace(decoder.config, num_hidden_layers=1)
        head = EagleHead(config, parallel_depth=5 if directory.name == _ONE_FORWARD else 1)
    _on_device(head)
    return head.requires_grad_(False)


@contextmanager
def device(shape: DecoderShape = SIZES["7b"].llama) -> Iterator[Launches]:
    """The fake device, with graphs that are recorded in place of captured, and no comparisons of numbers."""
    answers = _Answers(shape.vocab_size - _FROM_THE_END)
    with ExitStack() as stack:
        launches = stack.enter_context(fake_cuda(answers))

        def capture_on(_: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
            return lambda run: _record(run, launches)

        nothing = lambda *_, **__: None  # noqa: E731
        patches: tuple[tuple[Any, str, Any], ...] = (
            (torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40)),
            (runner, "capture_on", capture_on),
            (runner, "check_forward", nothing),
            (runner, "check_rows", nothing),
            (vision, "check_rows", nothing),
            (runner, "randomize", nothing),
            (cuda_graphs.ForwardSizes, "measured_on", lambda sizes, _: sizes),
            (eagle, "randomize", nothing),
            (eagle, "check_rows", nothing),
            (eagle.EagleDrafter, "_check", nothing),
            (eagle_head, "load_draft_head", _head),
            (Verifier, "verify", answers.heard(Verifier.verify)),
        )
        for owner, name, instead in patches:
            stack.enter_context(patch.object(owner, name, instead))
        for section, (owner, name) in _SECTIONS.items():
            stack.enter_context(patch.object(owner, name, _in_section(getattr(owner, name), section, launches)))
        yield launches


def _in_section(method: Callable[..., Any], section: str, launches: Launches) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with launches.within(section):
            return method(*args, **kwargs)

    return run


def _record(run: Callable[[], Any], launches: Launches) -> Callable[[], Any]:
    name = _name_of(run.__self__)  # type: ignore[attr-defined]
    with launches.within("warm-up"):
        run()
    with launches.within(f"graph {name}"):
        result = run()
    launches.graphs[name] = launches.sections.pop(f"graph {name}")

    def replay() -> Any:
        launches.add(REPLAY)
        return result

    return replay


def _name_of(captured: Any) -> str:
    if isinstance(captured, cuda_graphs.StaticForward):
        return f"forward of {captured._rows} rows"
    if isinstance(captured, StaticKeep):
        return f"draft keys of {len(captured.rows[0])} rows"
    if isinstance(captured, StaticDraft):
        grower = captured._grower
        how = "by window mass" if grower._window is not None else "by top k"
        how = "from one forward" if grower.parallel_depth > 1 else how
        return f"draft {how}, trees {len(captured._tokens)}, levels {captured._depth}"
    return "vision"


class _Answers:
    """What the tick's read-back gives: each request accepts drafts as far as there are some."""

    def __init__(self, action: int) -> None:
        self._action = action
        self._groups: list[tuple[int, list[int]]] = []  # of each rule: nodes of a path at most, and drafts accepted

    def heard(self, verify: Callable[..., Any]) -> Callable[..., Any]:
        """`Verifier.verify`, listened to."""

        def run(
            verifier: Verifier, result: Any, hidden: Any, parts: Sequence[VerifyInput], prepared: Prepared
        ) -> list[Commit]:
            self._groups = [
                (group.max_depth + 1, [min(_ACCEPTED - 1, parts[index].tree.depth) for index in group.parts])
                for group in prepared.groups
            ]
            commits: list[Commit] = verify(verifier, result, hidden, parts, prepared)
            return commits

        return run

    def __call__(self, shape: tuple[int, ...]) -> list[Any]:
        """As `accept_tree` lays paths out, one after the other."""
        numbers: list[int] = []
        for steps, accepted in self._groups:
            for drafts in accepted:
                count, left = drafts + 1, [0] * (steps - drafts - 1)
                numbers += [*range(count), *left, *[self._action] * count, *left, *[0] * (2 * steps), count]
        assert shape == (len(numbers),)
        return numbers


@dataclass(frozen=True)
class Tick:
    """What the host asked for in one tick.

    Args:
        begins: whether a prompt began.
        in_flight: requests after it.
        nodes: that were verified.
        launches: of the host, a replayed graph as one; copies and read-backs are not among them.
        copies: to the device.
        read_backs: from it.
        waits: for it, where nothing was read.
        behind: launches after the read-back, and `copies_behind`, copies after it.
        by_section: launches by the part of the tick that asked for them.
    """

    begins: bool
    in_flight: int
    nodes: int
    launches: int
    copies: int
    read_backs: int
    waits: int
    behind: int
    copies_behind: int
    by_section: dict[str, int]


def count(name: str) -> dict[str, Any]:
    """The launches of a case: of each graph, and of the host in each kind of tick in the steady state."""
    case = CASES[name]
    with device(SIZES[case.size].llama) as launches:
        policy = fake_policy(SIZES[case.size], quantization=case.quantization, generation=case.generation)
        engine = Engine(policy, case.settings)
        engine.runner.graphs.warm_up()
        status = engine.runner.graphs.status
        if "off" in status:
            raise RuntimeError(f"{name}: {status}")
        ticks = [tick for _, tick in zip(range(_TICKS), _ticks(engine, launches), strict=False)][_STEADY:]
    graphs = [
        {"graph": name, "launches": sum(counts.values()), "by_name": dict(counts.most_common())}
        for name, counts in launches.graphs.items()
    ]
    kinds = [tick for index, tick in enumerate(ticks) if tick not in ticks[:index]]
    return {"graphs": graphs, "ticks": [asdict(tick) | {"times": ticks.count(tick)} for tick in kinds]}


def _ticks(engine: Engine, launches: Launches) -> Iterator[Tick]:
    stamp_ns = 0
    while True:
        if engine.has_room:
            stamp_ns += 1
            engine.submit(frame(stamp_ns))
        launches.clear()
        outcomes = engine.tick()
        faults = [each for each in outcomes if isinstance(each, Drop) and each.reason is DropReason.ENGINE_FAULT]
        if faults:
            raise RuntimeError(faults[0].detail)
        no_launch = (COPY_IN, READ_BACK, WAIT)
        by_section = {
            section: sum(n for name, n in counts.items() if name not in no_launch)
            for section, counts in launches.sections.items()
        }
        yield Tick(
            begins=engine.last_work.images > 0,
            in_flight=len(engine.scheduler.requests),
            nodes=engine.last_work.nodes,
            launches=sum(by_section.values()),
            copies=launches.total(COPY_IN),
            read_backs=launches.total(READ_BACK),
            waits=launches.total(WAIT),
            behind=launches.behind,
            copies_behind=launches.copies_behind,
            by_section=by_section,
        )


def main(context: typer.Context, out: Out = RESULTS / "launches.json") -> None:
    """Counts every mode's launches at OpenVLA-7B's shapes."""
    logging.basicConfig(level=logging.ERROR)
    cases = {name: count(name) for name in CASES}
    head = result_head(context)
    revision = {"git_revision": head["git_revision"]}
    before = kept_before(out, "cases") or revision | {"cases": {}}
    first = {name: revision | found for name, found in cases.items() if name not in before["cases"]}
    finish(head | {"cases": cases, "before": before | {"cases": before["cases"] | first}}, out)


if __name__ == "__main__":
    typer.run(main)
