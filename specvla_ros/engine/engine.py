# SPDX-License-Identifier: Apache-2.0
"""The engine: observations in, actions out, one tick at a time."""

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from specvla_kernels.device import device_fault, on_device, operators_on
from specvla_ros.engine.batch import Batch, TickWork
from specvla_ros.engine.kv_cache import allocate_cache
from specvla_ros.engine.mailbox import Mailbox, Pictures, pictures_of
from specvla_ros.engine.outcome import Action, ChunkEnsemble, Drop, DropReason, Outcome
from specvla_ros.engine.pace import Chooser
from specvla_ros.engine.runner import Runner
from specvla_ros.engine.scheduler import Scheduler
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.verifier import Commit, Verifier
from specvla_ros.errors import UserError
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PromptLayout, Target
from specvla_ros.speculation.drafters.registry import DraftContext, DraftPrompt, make_drafters
from specvla_ros.speculation.rules.registry import bins_of, make_rule
from specvla_ros.speculation.settings import AcceptanceSettings
from specvla_ros.speculation.tree import Tree

_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger(__name__)
_TICKS_OF_A_PACE = 16  # in which each kind of its ticks comes more than once


def _on_its_device(method: Callable[Concatenate["Engine", _P], _R]) -> Callable[Concatenate["Engine", _P], _R]:
    """Runs a method with the target's GPU as the current device of whichever thread calls it."""

    @wraps(method)
    def run(engine: "Engine", *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with on_device(engine.target.decoder.device):
            return method(engine, *args, **kwargs)

    return run


class Engine:
    """Decodes the newest observations. One thread may use it; `submit` may be called from any.

    Raises UserError where the settings do not fit the target or the device's memory, here and in `switch`.

    Args:
        target: the policy that decides every token.
        now_ns: the clock of the observations' stamps; needed for the staleness limit.

    Attributes:
        settings: how it decodes; with mode `ar` or `pipeline` where nothing can draft and that is allowed.
        scheduler: the requests in flight.
        mailbox: the newest observation of each robot.
        last_work: the work of the last tick.
        takes_partial: whether `tick` also returns the first actions of answers that it goes on decoding; false unless
            whoever drives it says so.
        tick_time: from a tick's work and seconds to the seconds that mode auto counts: these, or an emulation's.
    """

    def __init__(self, target: Target, settings: EngineSettings, now_ns: Callable[[], int] | None = None) -> None:
        if settings.max_image_age_s and now_ns is None:
            raise UserError("max_image_age_s needs the clock of the stamps; set it to 0 to decode recorded images")
        self.target = target
        self.mailbox = Mailbox(now_ns)
        self.last_work = TickWork()
        self.takes_partial = False
        self.tick_time: Callable[[TickWork, float], float] = lambda _, measured_s: measured_s
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        self._lost = ""  # why the device computes no more
        self._set_up(settings)

    @property
    def busy(self) -> bool:
        """Whether an observation waits or is in flight."""
        return self.mailbox.waiting or bool(self.scheduler.requests)

    @property
    def has_room(self) -> bool:
        """Whether the next tick would admit an observation of the only robot."""
        return self.scheduler.room_for("")

    def open(self, stream: str, *, budget_s: float = 0.0, priority: int = 0) -> None:
        """Registers a robot, or updates one already registered. Optional: its first observation registers a robot.

        Args:
            budget_s: in which its frames should be answered, from their arrival on: of several that wait, that with
                the earliest deadline is begun.
            priority: streams of a higher one come first, whatever the budgets.
        """
        if not self.mailbox.open(stream, budget_s=budget_s, priority=priority):
            raise UserError(
                f"decode.streams is {self.settings.streams}, and as many robots are there: close one, or raise it"
            )

    def close(self, stream: str, *, before_epoch: float = math.inf) -> list[Drop]:
        """Lets a robot go: drops its frames, and gives its place to another.

        `before_epoch`: epoch whose frames stay, since the robot came back meanwhile, and the place with one that waits.
        """
        self.drafter.forget(stream)
        self._ensemble.forget(stream)
        flushed = self.scheduler.flush(DropReason.EPOCH_CHANGED, before_epoch, stream)
        return flushed + self.mailbox.close(stream, DropReason.EPOCH_CHANGED, before_epoch)

    def submit(self, observation: Observation, pictures: Pictures | None = None) -> list[Drop]:
        """Submits the newest observation of its stream; one that still waited is dropped for it.

        Where the next tick may begin it, its images are resized and normalised here, on the caller's thread.
        `pictures`: its own, of `pictures_of`; None: they are made here.
        """
        drops = self.mailbox.submit(observation, pictures or pictures_of(self.target, observation))
        self._prepare_next()
        return drops

    def act(self, observation: Observation) -> Outcome:
        outcomes: list[Outcome] = list(self.submit(observation))
        while True:
            for outcome in outcomes:
                if outcome.observation is observation and not (isinstance(outcome, Action) and outcome.partial):
                    return outcome
            outcomes = self.tick()

    @_on_its_device
    @torch.inference_mode()
    def tick(self) -> list[Outcome]:
        """One packed forward and what surrounds it.

        A fault drops the requests in flight and is reported as their reason; the engine goes on. Once the device is
        lost, every frame is dropped as it comes, and the device is not used again.
        """
        self.last_work = TickWork()
        if self._lost:
            return self._drop_all(self._lost)
        try:
            batch = self.scheduler.schedule()  # newest frames; chunks
            self._lay_out(batch)
            self._prepare_ahead()
            self._embed(batch)
            if batch.shares:
                commits = self._forward(batch)
                self.scheduler.commit(batch, commits)
                self._draft(batch, commits)
                self.scheduler.book_time(batch)
                self.scheduler.learn(batch, self.last_work, self.tick_time(self.last_work, batch.elapsed_s))
            answers = self._ensemble.averaged(self.scheduler.release())  # in the order of the stamps, each frame once
            return answers + self._partial_actions()
        except Exception as error:  # whatever it is, the robot's node must outlive it
            _log.exception("a tick failed")
            self._lost = device_fault(self.target.decoder.device)
            if self._lost:
                _log.error("every frame is dropped from now on: %s", self._lost)
            return self._drop_all(self._lost or f"{type(error).__name__}: {error}")

    def _partial_actions(self) -> list[Action]:
        wanted = self.takes_partial and self.settings.partial_actions and self.settings.ensemble < 2
        return self.scheduler.partial() if wanted else []

    def _drop_all(self, detail: str) -> list[Outcome]:
        drops = [replace(drop, detail=detail) for drop in self.flush(DropReason.ENGINE_FAULT)]
        return self.scheduler.release() + drops

    def flush(
        self,
        reason: DropReason = DropReason.EPOCH_CHANGED,
        *,
        before_epoch: float = math.inf,
        stream: str | None = None,
    ) -> list[Drop]:
        """Drops what waits and what is in flight, at once.

        `before_epoch`: epoch whose frames stay. `stream`: of this robot alone; None: of all.
        """
        return self.scheduler.flush(reason, before_epoch, stream) + self.mailbox.drop(reason, before_epoch, stream)

    def reset(self, stream: str | None = None) -> list[Drop]:
        """Flushes, and takes any stamp next: for a clock that jumped, or another recording; None: of all robots."""
        self.mailbox.take_any_stamp(stream)
        self.drafter.forget(stream)
        self._ensemble.forget(stream)
        return self.flush(stream=stream)

    def set_acceptance(self, settings: AcceptanceSettings) -> None:
        """Takes another acceptance rule from the next frame on; those in flight finish with theirs.

        Raises UserError where it does not fit the policy; the old one stays.
        """
        rule, bins = make_rule(settings, self.target), bins_of(settings, self.target)
        self.verifier.rule = rule
        self.drafter.set_tolerance(bins)
        self._change_settings(replace(self.settings, acceptance=settings))

    def set_max_image_age(self, seconds: float) -> None:
        self._change_settings(replace(self.settings, max_image_age_s=seconds))

    @_on_its_device
    def switch(self, settings: EngineSettings) -> list[Drop]:
        """Decodes with other settings from the next tick on; what is in flight is dropped, what waits is kept.

        If it raises, the engine goes on as before.
        """
        before, graphs = self.scheduler, self.runner.graphs
        self._set_up(settings)
        if graphs.warm:
            self.runner.graphs.warm_up()
        return before.flush(DropReason.MODE_CHANGED)

    @_on_its_device
    def warm_up(self) -> None:
        """Decodes one black image and captures CUDA graphs, so that the first real image needs no preparation.

        Raises UserError, with the reason, where the policy does not get through it.
        """
        with self.mailbox.without_clock():
            outcome = self.act(self.target.blank_observation())
        self.close("")
        if isinstance(outcome, Drop) and outcome.reason is not DropReason.NOT_AN_ACTION:
            raise UserError(
                f"the policy failed on a black test image: {outcome.reason.value}: {outcome.detail}{_remedy(outcome)}"
            )
        self.runner.graphs.warm_up()
        self.measure_ticks()

    def measure_ticks(self) -> None:
        """In mode auto: measures every kind of tick that a pace may need, on black images, and forgets their answers.

        What is in flight or waits is dropped.
        """
        chooser = self.scheduler.chooser
        if chooser is None:
            return
        blank = self.target.blank_observation()
        self.reset("")
        with self.mailbox.without_clock():
            for pace in chooser.every_kind():
                with chooser.pinned(pace):
                    for number in range(1, _TICKS_OF_A_PACE + 1):
                        if self.has_room:
                            self.submit(replace(blank, stamp_ns=number))
                        self.tick()
                self.reset("")
        chooser.settle()
        self.close("")

    def check_instruction(self, instruction: str) -> None:
        """Raises UserError for an instruction that is empty, or whose prompt is longer than a slot holds."""
        self._prompt_layout(replace(self.target.blank_observation(), instruction=instruction, prompt_ids=None))

    def describe(self) -> dict[str, Any]:
        """What is loaded and how it decodes, for diagnostics and results."""
        described: dict[str, Any] = {
            "decode.mode": self.settings.mode,
            "slots": self.settings.slots,
            "drafts": ", ".join(self.drafter.sources),
        }
        optional = {
            "decode.preset": self.settings.followed_preset,
            "decode.fallback": self._fallback,
            "decode.pace": str(self.scheduler.chooser or ""),
            "tokens": "" if self.target.head else self.settings.tokens_in(self.target.decoder.dtype),
            "kernels": operators_on(self.target.decoder.device, self.target.decoder.dtype),
            "cuda_graphs": self.runner.graphs.status,
            "attention": self.runner.forwards.attention,
            "fault": self._lost,
        }
        return self.target.describe() | described | {name: text for name, text in optional.items() if text}

    def _prepare_next(self) -> None:
        """Prepares the pictures of the frame that is begun next, if that may be soon: until then a newer may come."""
        if (pictures := self._unprepared()) is not None:
            pictures.prepare()

    def _prepare_ahead(self) -> None:
        """The same on a thread beside the tick, for a frame that has waited since before it."""
        if self._unprepared() is not None:
            self._ahead.submit(self._prepare_next)

    def _unprepared(self) -> Pictures | None:
        waiting = self.mailbox.next(self.scheduler.room_soon)
        pictures = waiting.pictures if waiting is not None else None
        return pictures if pictures is not None and not pictures.begun else None

    def _lay_out(self, batch: Batch) -> None:
        """Lays out the prompt of the frame that begins, and drafts the tree that the end of a prompt verifies."""
        if batch.admitted is not None:
            try:
                layout = self._prompt_layout(batch.admitted.observation)
            except UserError as error:
                self.scheduler.refuse(batch, DropReason.BAD_INSTRUCTION, str(error))
            except Exception as error:  # costs this frame alone
                _log.exception("a prompt could not be laid out")
                self.scheduler.refuse(batch, DropReason.ENGINE_FAULT, f"{type(error).__name__}: {error}")
            else:
                self.scheduler.begin(
                    batch, layout, self.runner.forwards.sizes.chunk_rows(layout.rows, self.scheduler.spread)
                )
        for share in batch.shares:
            # Not earlier: what is known of earlier answers grows meanwhile.
            if share.ends_prompt and share.request.drafts:
                seen = share.request.observation
                share.request.tree = self.drafter.draft_prompt(
                    DraftPrompt(
                        seen.epoch,
                        self._codec.max_tokens,
                        self._codec.in_text(()),
                        seen.stamp_ns,
                        seen.stream,
                        self.scheduler.ahead_of(seen),
                    )
                )

    def _embed(self, batch: Batch) -> None:
        """Computes the prompts that begin. One that fails costs its own frame, and no other robot's."""
        for share in [share for share in batch.shares if share.begins]:
            try:
                self.runner.embed(share.request)
            except Exception as error:
                if device_fault(self.target.decoder.device):
                    raise
                _log.exception("a prompt could not be computed")
                self.scheduler.fail(batch, share, f"{type(error).__name__}: {error}")

    def _forward(self, batch: Batch) -> list[Commit]:
        self.last_work = batch.work
        for share in batch.shares:
            if share.begins:
                share.request.rule = self.verifier.rule
        verified = batch.verified
        trees = [share.verify_input() for share in verified]
        prepared = self.verifier.prepare(trees)
        result = self.runner.run(batch)
        if (chooser := self.scheduler.chooser) is not None:
            chooser.play()  # a GPU computes meanwhile
        commits = self.verifier.verify(result, [share.tree_hidden for share in verified], trees, prepared)
        if verified:
            batch.vision_s = self.runner.vision_s()  # after a read-back alone
        return commits

    def _draft(self, batch: Batch, commits: list[Commit]) -> None:
        """Grows the trees that the next forward verifies, and lets the drafters learn from finished answers."""
        for answer in batch.finished:
            self.drafter.observe(answer)
        going_on = self.scheduler.requests
        drafting = [request for request in going_on if request.drafts and self.drafter.sources]
        for share, commit in zip(batch.verified, commits, strict=True):
            if share.request not in drafting:
                share.request.tree = Tree.from_root(commit.tokens_on_device[-1])
        committed = [each for each in zip(batch.verified, commits, strict=True) if each[0].request in drafting]
        embed, ahead_of = self.target.decoder.embed_tokens, self.scheduler.ahead_of
        inputs = [share.draft_input(commit, embed, ahead_of(share.request.observation)) for share, commit in committed]
        inputs += [share.chunk_input() for share in batch.shares if not share.verifies and share.request in drafting]
        if not inputs:
            return
        before = self.drafter.work
        trees = {each.slot: tree for each, tree in zip(inputs, self.drafter.draft(inputs), strict=True)}
        for request in going_on:
            request.tree = trees.get(request.slot, request.tree)
        drafted = self.drafter.work.since(before)
        head_prompts = self.last_work.prompts if drafted.head_forwards else 0.0
        self.last_work = replace(self.last_work, drafting=drafted, head_prompts=head_prompts)

    def _prompt_layout(self, observation: Observation) -> PromptLayout:
        layout = self.target.prompt_layout(observation)
        if len(layout.ids) > self.settings.max_text_tokens:
            raise UserError(
                f"the prompt has {len(layout.ids)} tokens, but a KV slot holds {self.settings.max_text_tokens}: "
                "shorten the instruction, or raise decode.max_text_tokens"
            )
        return layout

    def _set_up(self, settings: EngineSettings) -> None:
        """Loads and allocates what the settings need; nothing of the engine changes if that fails."""
        target = self.target
        if target.action_head:
            settings.check_action_head()
        if settings.spreads[0] > 1 and not target.causal_prompt:
            raise UserError("this policy's prompt sees itself both ways, so it cannot be cut: set prefill_chunks to 1")
        codec = target.codec.with_text(settings.max_reasoning_tokens)
        rule = make_rule(settings.acceptance, target)
        root = Tree.from_root(torch.zeros((), dtype=torch.int64, device=target.decoder.device))
        step_s = settings.step_s(codec)
        ensemble = ChunkEnsemble(codec, settings.ensemble, step_s)
        cache = allocate_cache(target, settings, codec.max_tokens)
        context = DraftContext(settings.draft, target, settings.slots, cache.slot_rows, step_s, codec)
        drafter, fallback = make_drafters(context, wanted=settings.drafts, needed=not settings.chooses)
        if fallback:
            settings = replace(settings, mode={"spec": "ar", "specpipe": "pipeline"}.get(settings.mode, settings.mode))
        drafter.set_tolerance(bins_of(settings.acceptance, target))
        verifier = Verifier(
            rule,
            codec.action_ids,
            cache,
            max_nodes=settings.tree_nodes,
            max_depth=codec.max_tokens,
            generation=target.generation,
            vocab_size=target.decoder.config.vocab_size,
            distances=codec.distances,
        )
        runner = Runner(target, cache, settings, (verifier, drafter))
        chooser = None
        if settings.chooses:
            chooser = Chooser(settings.slots_per_stream, runner.forwards.sizes.spreads, drafts=bool(drafter.sources))
        scheduler = Scheduler(settings, self.mailbox, cache, codec, root, chooser)
        self.mailbox.limit = settings.streams
        self._codec, self._fallback = codec, fallback
        self.settings, self.cache, self.scheduler = settings, cache, scheduler
        self.runner, self.verifier, self.drafter = runner, verifier, drafter
        self._ensemble = ensemble

    def _change_settings(self, settings: EngineSettings) -> None:
        self.settings = self.scheduler.settings = settings


def _remedy(drop: Drop) -> str:
    """Advice about the fault of a first frame, where there is some."""
    if "out of memory" not in drop.detail:
        return ""
    return (
        ". Lower decode.max_in_flight, decode.max_text_tokens or draft.nodes, choose a smaller model.quantization, or "
        "close what else uses the GPU"
    )
