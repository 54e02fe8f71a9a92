# SPDX-License-Identifier: Apache-2.0
"""The engine: observations in, actions out, one tick at a time."""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from specvla_kernels.device import device_fault, distrust_kernels, on_device, operators_on
from specvla_ros.engine.answer_prefix import NO_PREFIX, AnswerPrefix
from specvla_ros.engine.batch import Batch, ScheduledRequest, TickWork
from specvla_ros.engine.chooser import Chooser
from specvla_ros.engine.ensemble import ChunkEnsemble
from specvla_ros.engine.executed import ExecutedActions
from specvla_ros.engine.kernel_check import kernel_fault
from specvla_ros.engine.kv_cache import allocate_cache, memory_advice
from specvla_ros.engine.mailbox import Mailbox
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.prepared_images import PreparedImages, prepared_images
from specvla_ros.engine.request import Request
from specvla_ros.engine.runner import Runner
from specvla_ros.engine.scheduler import Scheduler
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.thoughts import Thoughts
from specvla_ros.engine.verifier import NO_EXTRA_INPUTS, Commit, Verifier
from specvla_ros.errors import UserError
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PromptLayout, Target
from specvla_ros.models.weights import Progress, no_progress
from specvla_ros.speculation.drafters.registry import DraftContext, make_drafters
from specvla_ros.speculation.rules.registry import bins_of, make_rule
from specvla_ros.speculation.settings import AcceptanceSettings
from specvla_ros.speculation.tree import Tree

_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger(__name__)
_TICKS_OF_A_PACE = 16  # least, enough for each of its kinds of ticks to occur more than once
_TIME_OF_A_PACE_S = 0.1  # least, so that the first ones of short ticks, which are slow, hardly count
# A device that needs longer, such as a CPU with a policy of 7 billion parameters, chooses among fewer paces.
_MEASURING_S = 60.0


def _on_its_device(method: Callable[Concatenate["Engine", _P], _R]) -> Callable[Concatenate["Engine", _P], _R]:
    """Runs a method with the target's GPU as the current device of whichever thread calls it."""

    @wraps(method)
    def run(engine: "Engine", *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with on_device(engine.target.decoder.device):
            return method(engine, *args, **kwargs)

    return run


class Engine:
    """Decodes the newest observations. Only one thread may use it, except for `submit`, which any thread may call.

    The constructor and `switch` raise UserError if the settings do not fit the target or the device's memory.

    Args:
        target: the policy that decides every token.
        now_ns: the clock of the observations' stamps; needed for the staleness limit.

    Attributes:
        settings: current settings; mode `ar` or `pipeline` if no drafter is available and the fallback is allowed.
        scheduler: the requests in flight.
        mailbox: the newest observation of each robot.
        last_work: the work of the last tick.
        takes_partial: whether `tick` also returns the first actions of answers still being decoded; False by default.
        warm_up_s: seconds of the last warm-up; 0 before it.
        tick_time: maps a tick's work and measured seconds to the seconds that mode auto uses; emulation replaces it.
    """

    def __init__(self, target: Target, settings: EngineSettings, now_ns: Callable[[], int] | None = None) -> None:
        self.target = target
        self.mailbox = Mailbox(now_ns)
        self.last_work = TickWork()
        self.warm_up_s = 0.0
        self.takes_partial = False
        self.tick_time: Callable[[TickWork, float], float] = lambda _, measured_s: measured_s
        self._preprocessing = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        self._device_fault = ""  # why the device is unusable; empty: it works
        with on_device(target.decoder.device):
            self._set_up(settings)

    @property
    def busy(self) -> bool:
        """True if an observation waits or is in flight."""
        return self.mailbox.waiting or bool(self.scheduler.requests)

    @property
    def fault(self) -> str:
        """The reason why the device has failed and frames are dropped until the process restarts; empty: it works."""
        return self._device_fault

    @property
    def has_room(self) -> bool:
        """True if the next tick would admit an observation of the unnamed stream ''."""
        return self.scheduler.room_for("")

    def open(self, stream: str, *, budget_s: float = 0.0, priority: int = 0) -> None:
        """Registers a robot, or updates a registered one. Optional: a robot's first observation registers it.

        Args:
            budget_s: deadline for answering its frames, counted from their arrival. Among waiting frames the earliest
                deadline is served first.
            priority: higher priorities are served first, regardless of budgets.
        """
        if not self.mailbox.open(stream, budget_s=budget_s, priority=priority):
            raise UserError(
                f"decode.streams is {self.settings.streams}, and that many robots are open: close one, or raise it"
            )

    def close(self, stream: str, *, before_epoch: float = math.inf) -> list[Drop]:
        """Removes a robot: drops its frames and frees its entry for another.

        `before_epoch`: frames of this epoch or later stay, as the robot may have returned, and so does the entry if one
        of them waits.
        """
        self._forget(stream)
        flushed = self.scheduler.flush(DropReason.EPOCH_CHANGED, before_epoch, stream)
        return flushed + self.mailbox.close(stream, DropReason.EPOCH_CHANGED, before_epoch)

    def submit(self, observation: Observation, images: PreparedImages | None = None) -> list[Drop]:
        """Submits the newest observation of its stream and drops the one that still waited.

        If the next tick may start it, its images are resized and normalised here, on the caller's thread. `images`:
        its vision input from `prepared_images`; None: made here.
        """
        drops = self.mailbox.submit(observation, images or prepared_images(self.target, observation))
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
        """Runs one packed forward and the work around it.

        An exception drops the requests in flight, with the error as their reason, and the engine continues. After a
        device fault every frame is dropped on arrival and the device is not used again.
        """
        self.last_work = TickWork()
        if self._device_fault:
            return self._drop_all(self._device_fault)
        try:
            batch = self.scheduler.schedule()  # newest frames; chunks
            self._lay_out(batch)
            self._prepare_next_in_thread()
            self._embed(batch)
            if batch.shares:
                commits = self._forward(batch)
                self.scheduler.commit(batch, commits)
                self._draft(batch, commits)
                self.scheduler.book_time(batch)
                self.scheduler.learn(batch, self.last_work, self.tick_time(self.last_work, batch.elapsed_s))
            ended = self.scheduler.release()  # in stamp order, each frame once
            self._thoughts.void(ended)
            published = self._ensemble.averaged(ended) + self._partial_actions()
            self._executed.learn(published)
            return published
        except Exception as error:  # any: the robot's node must survive it
            _log.exception("a tick failed")
            self._device_fault = device_fault(self.target.decoder.device)
            if self._device_fault:
                _log.error("all further frames are dropped: %s", self._device_fault)
            return self._drop_all(self._device_fault or f"{type(error).__name__}: {error}")

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
        """Drops waiting frames and requests in flight immediately.

        `before_epoch`: frames of this epoch or later stay. `stream`: limits this to one robot; None: all.
        """
        return self.scheduler.flush(reason, before_epoch, stream) + self.mailbox.drop(reason, before_epoch, stream)

    def reset(self, stream: str | None = None) -> list[Drop]:
        """Flushes and accepts any stamp next, after a clock jump or for another recording; None: for all robots."""
        self.mailbox.take_any_stamp(stream)
        self._forget(stream)
        return self.flush(stream=stream)

    def _forget(self, stream: str | None) -> None:
        """Forgets the earlier answers of a robot; None: of all."""
        for part in (self.drafter, self._ensemble, self._thoughts, self._executed):
            part.forget(stream)

    def set_acceptance(self, settings: AcceptanceSettings) -> None:
        """Changes the acceptance rule for new frames; requests in flight keep theirs.

        Raises UserError and keeps the old rule if the new one does not fit the policy.
        """
        rule, bins = make_rule(settings, self.target), bins_of(settings, self.target)
        self.verifier.rule = rule
        self.drafter.set_tolerance(bins)
        self._change_settings(replace(self.settings, acceptance=settings))

    def set_max_image_age(self, seconds: float) -> None:
        settings = replace(self.settings, max_image_age_s=seconds)
        self._check_clock(settings)
        self._change_settings(settings)

    @_on_its_device
    def switch(self, settings: EngineSettings) -> list[Drop]:
        """Changes the settings from the next tick; requests in flight are dropped, waiting frames are kept.

        If it raises, the engine is unchanged.
        """
        before, warm = self.scheduler, self.runner.graphs.warm
        self._set_up(settings)
        drops = before.flush(DropReason.MODE_CHANGED)
        del before  # with the earlier KV cache: captures need the memory
        if warm:
            self._check_kernels()  # on trees that the earlier settings may not have had
            self._capture()
        return drops

    @_on_its_device
    def warm_up(self, progress: Progress = no_progress) -> None:
        """Decodes one black image and captures CUDA graphs, so that the first real image needs no preparation.

        Kernels that fail here, or compute something else than their references, are not used from then on.

        `progress` gets each step; its fraction is that of loading, which is done. Raises UserError with the reason if
        the policy fails on the image.
        """
        started = time.perf_counter()
        progress("warming up: comparing kernels with their references", 1.0)
        self._check_kernels()
        progress("warming up: decoding a black test image", 1.0)
        with self.mailbox.without_clock():
            outcome = self.act(self.target.blank_observation())
        self.close("")
        if isinstance(outcome, Drop) and outcome.reason not in (DropReason.NOT_AN_ACTION, DropReason.BROKEN_OFF):
            advice = memory_advice(outcome.detail)
            raise UserError(
                f"the policy failed on a black test image: {outcome.reason.value}: {outcome.detail}{advice}"
            )
        self._capture(progress)
        if (chooser := self.scheduler.chooser) is not None and chooser.ahead:
            progress("warming up: comparing vision beside a forward with vision alone", 1.0)
            if fault := self.runner.ahead_fault():
                _log.warning("no image is processed beside a forward: %s", fault)
                chooser.ahead = False
        progress("warming up: timing ticks", 1.0)
        self.measure_ticks()
        self.scheduler.forget_answers()
        self.warm_up_s = time.perf_counter() - started
        _log.info("warmed up in %.1f s", self.warm_up_s)

    def _check_kernels(self) -> None:
        decoder = self.target.decoder
        if fault := kernel_fault(decoder, self.cache, self.runner.forwards.sizes):
            distrust_kernels(decoder.device, fault)

    def _capture(self, progress: Progress = no_progress) -> None:
        self.runner.graphs.warm_up(progress)
        self.runner.compile_layers(progress)
        if self.settings.chooses:
            self.drafter.free_rows = self.runner.forwards.sizes.free_rows

    def measure_ticks(self) -> None:
        """In mode auto, measures every kind of tick that a pace may need, on black images whose answers are discarded.

        Requests in flight and waiting frames are dropped. After a minute the paces left are not measured, nor chosen.
        """
        chooser = self.scheduler.chooser
        if chooser is None:
            return
        blank = self.target.blank_observation()
        self.reset("")
        chooser.forget_times()
        until_s = time.perf_counter() + _MEASURING_S
        with self.mailbox.without_clock():
            for pace in chooser.every_kind():
                with chooser.pinned(pace):
                    begun_s, number = time.perf_counter(), 0
                    while (now_s := time.perf_counter()) < until_s:
                        if number >= _TICKS_OF_A_PACE and now_s - begun_s >= _TIME_OF_A_PACE_S:
                            break
                        number += 1
                        if self.has_room:
                            self.submit(replace(blank, stamp_ns=number))
                        self.tick()
                self.reset("")
        chooser.settle()
        self.scheduler.forget_answers()
        self.close("")

    def check_instruction(self, instruction: str) -> None:
        """Raises UserError if an instruction is empty or its prompt is longer than a slot holds."""
        asked = replace(self.target.blank_observation(), instruction=instruction, prompt_ids=None)
        self._prompt_layout(asked, NO_PREFIX)

    def describe(self) -> dict[str, Any]:
        """A description of the policy and its decoding, for diagnostics and results."""
        described: dict[str, Any] = {
            "decode.mode": self.settings.mode,
            "slots": self.settings.slots,
            "drafts": ", ".join(self.drafter.sources),
        }
        optional = {
            "decode.preset": self.settings.preset_summary,
            "decode.fallback": self._fallback,
            "decode.pace": str(self.scheduler.chooser or ""),
            "tokens": "" if self.target.head else self.settings.tokens_in(self.target.decoder.dtype),
            "kernels": operators_on(self.target.decoder.device, self.target.decoder.dtype),
            "cuda_graphs": self.runner.graphs.status,
            "compiled_layers": self.runner.compiled,
            "attention": self.runner.forwards.attention,
            "fault": self._device_fault,
        }
        return self.target.describe() | described | {name: text for name, text in optional.items() if text}

    def _prepare_next(self) -> None:
        """Preprocesses the next frame's images if it may start soon; before that a newer frame may replace it."""
        if (images := self.scheduler.unprepared()) is not None:
            images.prepare()

    def _prepare_next_in_thread(self) -> None:
        """Does the same on another thread during the tick, for a frame that was already waiting."""
        if self.scheduler.unprepared() is not None:
            self._preprocessing.submit(self._prepare_next)

    def _lay_out(self, batch: Batch) -> None:
        """Lays out the prompt of the starting frame, and drafts the tree verified with the end of a prompt."""
        if batch.admitted is not None:
            observation = batch.admitted.observation
            given = self._given_to(observation)
            try:
                layout = self._prompt_layout(observation, given)
            except UserError as error:
                self.scheduler.refuse(batch, DropReason.BAD_INSTRUCTION, str(error))
            except Exception as error:  # drops only this frame
                _log.exception("a prompt could not be laid out")
                self.scheduler.refuse(batch, DropReason.ENGINE_FAULT, f"{type(error).__name__}: {error}")
            else:
                chunk_rows = self.runner.forwards.sizes.chunk_rows(layout.rows, self.scheduler.spread)
                self.scheduler.begin(batch, layout, chunk_rows, given)
        for share in batch.shares:
            # Not earlier: until now, more of the earlier answers may become known.
            if share.ends_prompt and share.request.drafts:
                previous = self.scheduler.previous_answer(share.request.observation)
                share.request.tree = self.drafter.draft_prompt(share.prompt_input(previous))

    def _given_to(self, seen: Observation) -> AnswerPrefix:
        if self.settings.commit == "none":
            return self._thoughts.given_to(seen, thinking=self.scheduler.renews(seen.stream))
        scheduler = self.scheduler
        return self._executed.given_to(seen, scheduler.age_at_first_actions_s(seen), scheduler.before(seen))

    def _embed(self, batch: Batch) -> None:
        """Computes the starting prompts, except those computed beside the forward."""
        for share in [share for share in batch.shares if share.begins and not share.ahead]:
            self._compute_prompt(batch, share, self.runner.embed)

    def _compute_prompt(self, batch: Batch, share: ScheduledRequest, embed: Callable[[Request], None]) -> None:
        """Computes a prompt. A failure drops only its own frame."""
        try:
            embed(share.request)
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
        prepared = self.verifier.prepare(trees) if trees else None
        result = self.runner.run(batch, prepared.extra if prepared else NO_EXTRA_INPUTS)
        for share in batch.ahead:
            self._compute_prompt(batch, share, self.runner.embed_ahead)
        if (chooser := self.scheduler.chooser) is not None:
            chooser.evaluate_next_candidate()  # while a GPU computes
        if prepared is None:
            return []
        commits = self.verifier.verify(result, [share.tree_hidden for share in verified], trees, prepared)
        if not batch.ahead:  # else the towers are timed with the prompt
            batch.vision_s = self.runner.vision_s()  # only valid after a read-back
        return commits

    def _draft(self, batch: Batch, commits: list[Commit]) -> None:
        """Grows the trees for the next forward, and lets drafters and thoughts learn from finished answers."""
        for answer in batch.finished:
            self.drafter.observe(answer)
        for request in batch.answered:
            self._thoughts.learn(request)
        going_on = self.scheduler.requests
        drafting = [request for request in going_on if request.drafts and self.drafter.sources]
        for share, commit in zip(batch.verified, commits, strict=True):
            if share.request not in drafting:
                share.request.tree = Tree.from_root(commit.tokens_on_device[-1])
        committed = [each for each in zip(batch.verified, commits, strict=True) if each[0].request in drafting]
        embed, previous = self.target.decoder.embed_tokens, self.scheduler.previous_answer
        inputs = [share.draft_input(commit, embed, previous(share.request.observation)) for share, commit in committed]
        chunks = [share for share in batch.shares if not (share.verifies or share.ahead)]
        inputs += [share.chunk_input() for share in chunks if share.request in drafting]
        if not inputs:
            return
        before = self.drafter.work
        trees = {each.slot: tree for each, tree in zip(inputs, self.drafter.draft(inputs), strict=True)}
        for request in going_on:
            request.tree = trees.get(request.slot, request.tree)
        drafted = self.drafter.work.since(before)
        head_prompts = self.last_work.prompts if drafted.head_forwards else 0.0
        self.last_work = replace(self.last_work, drafting=drafted, head_prompts=head_prompts)

    def _prompt_layout(self, observation: Observation, given: AnswerPrefix) -> PromptLayout:
        layout = given.lay_out(self.target, self._codec, observation)
        if len(layout.ids) > self.settings.max_text_tokens:
            raise UserError(
                f"the prompt has {len(layout.ids)} tokens, but a KV slot holds {self.settings.max_text_tokens}: "
                "shorten the instruction, or raise decode.max_text_tokens"
            )
        return layout

    def _set_up(self, settings: EngineSettings) -> None:
        """Loads and allocates what the settings need; if that fails, the engine is unchanged."""
        target = self.target
        self._check_clock(settings)
        if target.action_head:
            settings.check_action_head()
        if settings.spreads[0] > 1 and not target.causal_prompt:
            raise UserError(
                "this policy's prompt attends bidirectionally and cannot be split: set decode.prefill_chunks to 1"
            )
        if settings.think_every_s:
            settings.check_thinking(causal_prompt=target.causal_prompt)
        codec = target.codec.with_text(settings.max_reasoning_tokens)
        rule = make_rule(settings.acceptance, target)
        root = Tree.from_root(torch.zeros((), dtype=torch.int64, device=target.decoder.device))
        step_s = settings.step_s(codec)
        ensemble = ChunkEnsemble(codec, settings.ensemble, step_s)
        executed = ExecutedActions(codec, step_s)
        if settings.commit == "executed":
            executed.check(causal_prompt=target.causal_prompt, ensemble=settings.ensemble)
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
            chooser = Chooser(
                settings.slots_per_stream,
                runner.forwards.sizes.spreads,
                drafts=bool(drafter.sources),
                ahead=runner.side.concurrent,
            )
        scheduler = Scheduler(settings, self.mailbox, cache, codec, root, chooser)
        self.mailbox.limit = settings.streams
        self._codec, self._fallback = codec, fallback
        self.settings, self.cache, self.scheduler = settings, cache, scheduler
        self.runner, self.verifier, self.drafter = runner, verifier, drafter
        self._ensemble, self._thoughts = ensemble, Thoughts(settings.think_every_s, codec)
        self._executed = executed

    def _check_clock(self, settings: EngineSettings) -> None:
        if settings.max_image_age_s and self.mailbox.now_ns is None:
            raise UserError("max_image_age_s needs the clock of the stamps; set it to 0 to decode recorded images")

    def _change_settings(self, settings: EngineSettings) -> None:
        self.settings = self.scheduler.settings = settings
