# SPDX-License-Identifier: Apache-2.0
"""The limits of each mode, from the engine's scheduler driven with the costs of its forwards."""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache, partial
from itertools import accumulate, product
from operator import eq
from statistics import fmean
from typing import Any

import numpy as np
import torch

from specvla_ros.engine.batch import Batch, ScheduledRequest
from specvla_ros.engine.chooser import Chooser
from specvla_ros.engine.cuda_graphs import even_rows
from specvla_ros.engine.kv_cache import SlotPool
from specvla_ros.engine.mailbox import Mailbox
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.pace import Kind, mean_age
from specvla_ros.engine.scheduler import Scheduler
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.verifier import Commit
from specvla_ros.errors import UserError
from specvla_ros.lab.planning.cost import Forward, ModelCost, WeightFormat, draft_parts, forward_parts, roofline_seconds
from specvla_ros.lab.planning.device import LIMIT, Device, Efficiency
from specvla_ros.models.codecs.bins import ActionTokenizer, BinsCodec
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PromptLayout
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings
from specvla_ros.speculation.tree import Tree

# Spec-VLA (arXiv 2507.22424), table 2, relaxed acceptance: percent of trials by accept length 0 to 5 on each LIBERO
# suite, and the tolerance in bins behind them.
SPEC_VLA_RELAXED = {
    "goal": (23.01, 18.98, 39.99, 15.41, 2.53, 0.08),
    "object": (28.23, 37.62, 17.29, 10.11, 6.22, 0.53),
    "spatial": (37.07, 33.52, 19.15, 8.23, 1.99, 0.03),
    "long": (42.39, 28.57, 16.65, 8.84, 3.35, 0.20),
}
_SPEC_VLA_BINS = {"goal": 9, "object": 9, "spatial": 9, "long": 5}


@dataclass(frozen=True)
class AcceptanceLengths:
    """A distribution of accept lengths."""

    name: str
    probabilities: tuple[float, ...]  # probabilities of 0, 1, … accepted tokens
    acceptance: AcceptanceSettings = field(default_factory=AcceptanceSettings)  # settings behind the lengths

    def __post_init__(self) -> None:
        if min(self.probabilities) < 0 or abs(sum(self.probabilities) - 1) > 1e-9:
            raise UserError(f"acceptance lengths '{self.name}' must be probabilities that sum to 1")

    @property
    def mean(self) -> float:
        return sum(length * share for length, share in enumerate(self.probabilities))

    def accepted(self, uniform: float) -> int:
        """The accept length at a quantile from 0 to 1."""
        for length, share in enumerate(self.probabilities):
            uniform -= share
            if uniform < 0:
                return length
        return len(self.probabilities) - 1

    def verifications(self, tokens: int) -> float:
        """Expected verifications for `tokens` tokens; each commits the accepted tokens and one of the target's."""
        expected = [0.0]
        for missing in range(1, tokens + 1):
            rest = (share * expected[max(0, missing - length - 1)] for length, share in enumerate(self.probabilities))
            expected.append(1.0 + sum(rest))
        return expected[tokens]


def spec_vla_relaxed(suite: str) -> AcceptanceLengths:
    """Spec-VLA's published accept lengths for a suite, as shares of their sum (the rounded rows sum to 100.00)."""
    if suite not in SPEC_VLA_RELAXED:
        raise UserError(f"no accept lengths for '{suite}'; known: {', '.join(SPEC_VLA_RELAXED)}")
    printed = SPEC_VLA_RELAXED[suite]
    acceptance = AcceptanceSettings("bin_distance", bins=(_SPEC_VLA_BINS[suite],))
    probabilities = tuple(percent / sum(printed) for percent in printed)
    return AcceptanceLengths(f"Spec-VLA relaxed, LIBERO-{suite.title()}", probabilities, acceptance)


_FRAMES, _USUAL_TOKENS = 2000, 7  # longer answers get fewer frames, for about as many ticks
_FEWEST = 100
_WARM_UP_TICKS = 50  # minimum until the pipeline is full; it is when the first answer is out
_LONGEST_ANSWERS = 4  # minimum of counted ticks, in answers of one token per tick: long ones fill a pipeline in bursts
_LEARNING = 60  # answers until mode auto has settled
_AUTO_FRAMES = 200  # for mode auto, which runs again for each device
_SEED = 1
_VOCABULARY = 32000  # Llama 2's; any size works


@dataclass(frozen=True)
class Mode:
    """One decoding configuration."""

    name: str
    decode_mode: str  # value of `decode.mode`
    nodes: int = 1  # tree size; 1: plain decoding
    depth: int = DraftSettings.depth  # drafted tokens on a tree's longest path, each a forward of the draft head
    chunks: int = 1  # forwards over which a prompt is spread
    max_in_flight: int = 64  # maximum requests of a robot; new frames wait until there are fewer
    robots: int = 1  # robots whose frames share the forwards
    at_prompt: bool = False  # True if the prompt's own forward verifies a tree, drafted from the previous answer
    ahead: bool = False  # True if auto may process an image beside the forward before its prompt

    @property
    def pipelined(self) -> bool:
        """True if a frame is admitted as soon as the previous frame's prompt is complete."""
        return self.decode_mode in ("pipeline", "specpipe")

    @property
    def drafts(self) -> bool:
        return self.nodes > 1

    @property
    def chooses(self) -> bool:
        """True if its schedule depends on the ticks' costs."""
        return self.decode_mode == "auto"


@dataclass(frozen=True)
class Tick:
    """One tick of the engine."""

    forward: Forward
    drafting: int = 0  # requests whose drafting is counted: all that verified, including finished ones


@dataclass(frozen=True)
class LoopResult:
    """Averages over many frames, with a frame of each robot always waiting."""

    action_rate_hz: float  # actions per second and robot
    latency_s: float  # mean, from a frame's admission to its action
    image_age_s: float  # mean over time of the age since admission of the image that a robot acts on
    ticks_per_action: float  # mean over frames that became an action
    dropped: float  # share of admitted frames overtaken by a newer one
    in_flight: int  # maximum number of requests


def run_loop(
    mode: Mode, prompt_rows: int, action_tokens: int, lengths: AcceptanceLengths, seconds: Callable[[Tick], float]
) -> LoopResult:
    """Computes the rate and latency of actions. Acceptance is drawn with a fixed seed, so results are reproducible."""
    if mode.chooses:
        run = drive(mode, prompt_rows, action_tokens, lengths, seconds, frames=_AUTO_FRAMES)
    else:
        run = _driven_alike(mode, prompt_rows, action_tokens, lengths)
    ends = list(accumulate(map(seconds, run.ticks), initial=0.0))
    actions, found = run.actions, len(run.actions)
    return LoopResult(
        action_rate_hz=found / (ends[-1] - ends[run.warm_ticks]) / mode.robots,
        latency_s=sum(ends[last + 1] - ends[first] for _, first, last in actions) / found,
        image_age_s=fmean(
            mean_age([(ends[last + 1], ends[last + 1] - ends[first]) for mine, first, last in actions if mine == robot])
            for robot in {robot for robot, *_ in actions}
        ),
        ticks_per_action=sum(last + 1 - first for _, first, last in actions) / found,
        dropped=run.dropped / (run.dropped + found),
        in_flight=run.in_flight,
    )


@dataclass(frozen=True)
class DrivenLoop:
    """Record of a run of the scheduler, without times."""

    ticks: list[Tick]
    warm_ticks: int  # number of first ticks whose actions are not counted
    actions: list[tuple[str, int, int]]  # robot, and the ticks of its frame's admission and last token
    dropped: int  # requests that a newer one overtook, or that finished in the same tick as a newer one
    in_flight: int  # maximum number of requests


@lru_cache(maxsize=128)
def _driven_alike(mode: Mode, prompt_rows: int, action_tokens: int, lengths: AcceptanceLengths) -> DrivenLoop:
    """The loop of a mode whose schedule is the same on every device."""
    return drive(mode, prompt_rows, action_tokens, lengths)


def drive(
    mode: Mode,
    prompt_rows: int,
    action_tokens: int,
    lengths: AcceptanceLengths,
    seconds: Callable[[Tick], float] | None = None,
    *,
    stale: AcceptanceLengths | None = None,
    frames: int = 0,
    first_tokens: int = 0,
) -> DrivenLoop:
    """Drives the engine's scheduler with a runner that only counts.

    Args:
        seconds: duration of a tick; only mode auto needs it.
        stale: accept lengths of requests that were started while others were in flight; None: `lengths`.
        frames: number of counted frames; 0: enough for stable figures.
        first_tokens: tokens of an answer's first action, from which on the robot acts on it; 0: on the whole answer.
    """
    settings = EngineSettings(
        mode=mode.decode_mode, max_in_flight=mode.max_in_flight, prefill_chunks=mode.chunks, streams=mode.robots
    )
    mailbox, root = Mailbox(None), Tree.from_root(torch.zeros((), dtype=torch.int64))
    mailbox.limit = mode.robots
    robots = [str(i) for i in range(mode.robots)]
    layout = PromptLayout(ids=(), rows=prompt_rows, visual_rows=())
    zeros = np.zeros(action_tokens)
    codec = BinsCodec(ActionTokenizer(_VOCABULARY), ActionStatistics("", zeros, zeros, zeros > 0))
    chooser = _chooser(mode, settings, prompt_rows, seconds) if seconds is not None else None
    scheduler = Scheduler(settings, mailbox, SlotPool(settings.slots), codec, root, chooser)
    draws = random.Random(_SEED)

    def lengths_of(share: ScheduledRequest) -> AcceptanceLengths:
        return stale if stale is not None and share.request.others else lengths

    def verifies(share: ScheduledRequest) -> bool:
        return mode.at_prompt or not share.prompt_rows

    commits = [_commit(tokens, codec) for tokens in range(len(lengths.probabilities) + 1)]
    picture = np.zeros((1, 1, 3), np.uint8)
    ticks: list[Tick] = []
    actions: list[tuple[str, int, int]] = []
    admitted: dict[tuple[str, int], int] = {}  # tick by robot and stamp
    out: set[tuple[str, int]] = set()  # answers in flight whose first action is out
    dropped = in_flight = counted = answers = warm_ticks = 0
    full = False  # an answer is out, whole
    wanted = frames or max(_FEWEST, _FRAMES * _USUAL_TOKENS // action_tokens)
    fewest_ticks = 0 if frames else _LONGEST_ANSWERS * action_tokens
    while counted < wanted or len(ticks) - warm_ticks < fewest_ticks:
        number = len(ticks)
        for robot in robots:
            if mailbox.next(partial(eq, robot)) is None:
                mailbox.submit(Observation(picture, "", stamp_ns=number + 1, stream=robot))
        batch = scheduler.schedule()
        if batch.admitted is not None:
            scheduler.begin(batch, layout, even_rows(prompt_rows, scheduler.spread))
        starting = [_frame(share.request.observation) for share in batch.shares if share.begins]
        admitted |= dict.fromkeys(starting, number)
        in_flight = max(in_flight, len(batch.shares))
        forward = _forward(batch, mode, (action_tokens - 1) // 2)
        drafts = [mode.drafts and share.request.drafts for share in batch.verified]
        chosen = [
            commits[1 + (lengths_of(share).accepted(draws.random()) if drafted and verifies(share) else 0)]
            for share, drafted in zip(batch.verified, drafts, strict=True)
        ]
        ticks.append(Tick(forward, sum(drafts)))
        work = batch.work
        scheduler.commit(batch, chosen)
        if chooser is not None and seconds is not None:
            scheduler.learn(batch, work, seconds(ticks[-1]))
            chooser.evaluate_next_candidate()
        outcomes = scheduler.release()
        oldest = {each.observation.stream: each for each in reversed(scheduler.requests)}.values()
        answers += len(outcomes)
        full = full or any(isinstance(outcome, Action) for outcome in outcomes)
        if not warm_ticks and number >= _WARM_UP_TICKS and (full if chooser is None else answers >= _LEARNING):
            warm_ticks = number
        if warm_ticks:
            counted += len(starting)
            answered = [_frame(outcome.observation) for outcome in outcomes if isinstance(outcome, Action)]
            followed = {robot: (robot, stamp) for robot, stamp in answered}  # one per robot and tick
            first = {_frame(each.observation) for each in oldest if len(each.tokens) >= first_tokens > 0}
            acted = [frame for frame in (*followed.values(), *first) if frame not in out]
            out = first
            actions += [(frame[0], admitted[frame], number) for frame in acted]
            dropped += len(outcomes) - len(followed)
    return DrivenLoop(ticks, warm_ticks, actions, dropped, in_flight)


def _chooser(mode: Mode, settings: EngineSettings, rows: int, seconds: Callable[[Tick], float]) -> Chooser:
    """Mode auto's chooser, given the time of every kind of tick."""
    chooser = Chooser(settings.slots_per_stream, settings.spreads, drafts=mode.drafts, ahead=mode.ahead)
    for begins, spread, trees, drafts in product(
        (True, False), (0, *settings.spreads), range(settings.slots + 1), (True, False)
    ):
        chunk = even_rows(rows, spread) if spread else 0
        if not chunk and not trees:
            continue
        ends = not begins or spread == 1
        at_prompt = mode.nodes - 1 if mode.at_prompt and drafts and chunk and ends else 0
        forward = Forward(
            prompt_rows=chunk,
            prompt_before=0 if begins or not chunk else rows - chunk,
            image=begins,
            prompt_ends=ends,
            trees=trees,
            nodes=trees * (mode.nodes if drafts else 1) + at_prompt,
            prefix_rows=trees * rows,
        )
        verified = trees + int(ends and chunk > 0)
        chooser.times.add(Kind(begins, spread, trees, drafts), seconds(Tick(forward, verified if drafts else 0)))
    chooser.settle()
    return chooser


def _frame(observation: Observation) -> tuple[str, int]:
    return observation.stream, observation.stamp_ns


def _commit(tokens: int, codec: BinsCodec) -> Commit:
    """The commit of a verification that accepts `tokens` - 1 tokens; the token ids do not matter."""
    ids, zeros = (codec.action_ids.first,) * tokens, (0,) * tokens
    none = torch.empty(0, dtype=torch.int64)
    return Commit(tuple(range(tokens)), ids, bins_off=zeros, why=zeros, tokens_on_device=none)


def _forward(batch: Batch, mode: Mode, committed: int) -> Forward:
    prefill = next((share for share in batch.shares if share.prompt_rows), None)
    drafts = [mode.drafts and share.request.drafts for share in batch.shares if not share.prefills]
    trees = len(drafts)
    at_prompt = mode.nodes - 1 if mode.at_prompt and prefill and prefill.ends_prompt and prefill.request.drafts else 0
    return Forward(
        prompt_rows=prefill.prompt_rows if prefill else 0,
        prompt_before=prefill.request.prefix_len if prefill else 0,
        image=any(share.begins for share in batch.shares),
        prompt_ends=prefill is None or prefill.ends_prompt,
        trees=trees,
        # The tree has static size, as in a captured graph, however few tokens are missing.
        nodes=sum(mode.nodes if drafted else 1 for drafted in drafts) + at_prompt,
        # Rows of the prompt and of all committed tokens except the last, whose row this forward writes. The mean number
        # is used, so that few forwards differ: with 7 tokens it is off by at most 3 rows of 290.
        prefix_rows=sum(share.request.layout.rows + committed for share in batch.shares if not share.prefills),
    )


NODES = 16  # one tile of a matrix product's rows; the best size for latency is flat between 8 and 32

# At most 3 chunks: shorter ones lose more in the matrix products than they gain (Sarathi reports this for 64 rows).
MODES = (
    Mode("ar", "ar"),
    Mode("spec", "spec", nodes=NODES),
    Mode("pipeline", "pipeline"),
    Mode("pipeline, 2 chunks", "pipeline", chunks=2),
    Mode("pipeline, 3 chunks", "pipeline", chunks=3),
    Mode("specpipe", "specpipe", nodes=NODES),
    Mode("specpipe, 2 chunks", "specpipe", nodes=NODES, chunks=2),
    Mode("specpipe, 3 chunks", "specpipe", nodes=NODES, chunks=3),
)
AUTO = Mode("auto", "auto", nodes=NODES, max_in_flight=0)  # 0: the default number of slots


@dataclass(frozen=True)
class ModeLimit(LoopResult):
    """One row of the table: the loop at the limit."""

    mode: Mode
    derated_rate_hz: float  # action_rate_hz at the expected efficiency
    derated_latency_s: float  # latency_s at the expected efficiency
    derated_image_age_s: float  # image_age_s at the expected efficiency
    kv_bytes: float  # memory of the slots for the requests in flight
    weight_bytes: float  # memory of all weights, including a draft head's

    @property
    def oldest_image_s(self) -> float:
        """Age of an action's image when the next action replaces it, derated: latency plus one period."""
        return self.derated_latency_s + 1.0 / self.derated_rate_hz

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"oldest_image_s": self.oldest_image_s}

    def fits(self, device: Device) -> bool:
        return self.kv_bytes + self.weight_bytes <= device.memory_gb * 1e9


def loop_on(
    mode: Mode,
    model: ModelCost,
    device: Device,
    weights: WeightFormat,
    lengths: AcceptanceLengths,
    efficiency: Efficiency,
) -> LoopResult:
    """Runs the tick loop with a device's times."""

    @cache
    def seconds(tick: Tick) -> float:
        # Without the draft head's forward over the prompt: it may run concurrently with the next frame.
        parts = forward_parts(tick.forward, model, weights, device.value_bytes)
        if tick.drafting:
            rows, prefix = tick.drafting * mode.nodes, tick.drafting * model.prompt_rows
            head = model, weights, device.value_bytes
            parts += draft_parts(*head, steps=mode.depth, rows=rows, prefix_rows=prefix)
        return roofline_seconds(parts, device, efficiency)

    return run_loop(mode, model.prompt_rows, model.action_tokens, lengths, seconds)


def mode_limit(
    mode: Mode, model: ModelCost, device: Device, weights: WeightFormat, lengths: AcceptanceLengths
) -> ModeLimit:
    """Runs the tick loop at the limit and derated."""
    best, expected = (
        loop_on(mode, model, device, weights, lengths, efficiency) for efficiency in (LIMIT, device.efficiency)
    )
    slot_rows = model.prompt_rows + model.action_tokens + (mode.nodes if mode.drafts else 0)
    return ModeLimit(
        mode=mode,
        derated_rate_hz=expected.action_rate_hz,
        derated_latency_s=expected.latency_s,
        derated_image_age_s=expected.image_age_s,
        kv_bytes=float(best.in_flight * slot_rows * model.kv_values * device.value_bytes),
        weight_bytes=model.memory_bytes(weights, device.value_bytes, draft=mode.drafts),
        **vars(best),
    )
