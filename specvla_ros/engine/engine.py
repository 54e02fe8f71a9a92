"""The engine: observations in, actions out, one tick at a time."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from specvla_kernels.commit_kv import commit_kv
from specvla_ros.acceptance.make_rule import bins_of, make_rule
from specvla_ros.acceptance.settings import AcceptanceSettings
from specvla_ros.acceptance.verification import NOT_A_NUMBER, AcceptanceRule
from specvla_ros.drafting.draft_input import DraftInput
from specvla_ros.drafting.drafter import Drafter
from specvla_ros.engine.answer import AnswerFormat
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.packed_forward import packed_forward
from specvla_ros.engine.prompt_cache import PromptCache
from specvla_ros.engine.request import Request
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.share import Share
from specvla_ros.engine.slot_ring import allocate_ring
from specvla_ros.engine.stage_clock import StageClock
from specvla_ros.engine.tick_work import TickWork
from specvla_ros.engine.verify import Commit, verify
from specvla_ros.errors import UserError
from specvla_ros.models.policy import Policy

_log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = {"ar": 1, "spec": 1}


class Engine:
    """Decodes the newest observation. One thread only may touch it.

    Args:
        policy: the target and what surrounds it.
        settings: how to decode.
        now_ns: the clock of the observations' stamps; needed for the staleness limit.

    Raises:
        UserError: the settings do not fit the policy or the device's memory.
    """

    def __init__(self, policy: Policy, settings: EngineSettings, now_ns: Callable[[], int] | None = None) -> None:
        if settings.max_image_age_s and now_ns is None:
            raise UserError("max_image_age_s needs the clock of the stamps; set it to 0 to decode recorded images")
        self.policy = policy
        self.settings = settings
        self._now_ns = now_ns
        self._clock = StageClock(policy.decoder.device)
        self._answer = AnswerFormat.of(policy, settings.max_reasoning_tokens)
        self._prompts = PromptCache(policy, settings.max_text_tokens)
        slots = _MAX_IN_FLIGHT[settings.mode]
        self._ring = allocate_ring(policy, settings, self._answer, slots=slots)
        self._fallback = ""
        self._drafter = self._make_drafter(slots)
        self.set_acceptance(settings.acceptance)
        self._waiting: Observation | None = None
        self._in_flight: list[Request] = []
        self._last_stamp_ns = 0
        self._work = TickWork()

    def _make_drafter(self, slots: int) -> Drafter:
        """What drafts; nothing, where nothing can be had and the user allowed to go on without."""
        rows, draft = self._ring.slot_rows, self.settings.draft
        if self.settings.mode == "ar":
            return Drafter(self.policy, None, slots=slots, slot_rows=rows)
        try:
            return Drafter(self.policy, draft, slots=slots, slot_rows=rows)
        except UserError as error:
            if not draft.fallback_to_ar:
                raise
            self._fallback = str(error)
            _log.warning("decoding plainly, as draft.fallback_to_ar allows: %s", error)
            self.settings = replace(self.settings, mode="ar")
            return Drafter(self.policy, None, slots=slots, slot_rows=rows)

    @property
    def last_work(self) -> TickWork:
        """What the last tick computed."""
        return self._work

    @property
    def busy(self) -> bool:
        """Whether an observation waits or is in flight."""
        return self._waiting is not None or bool(self._in_flight)

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return len(self._in_flight)

    def rule_for(self, settings: AcceptanceSettings) -> AcceptanceRule:
        """The acceptance rule that settings describe, for this policy.

        Raises:
            UserError: they do not fit its action statistics.
        """
        return make_rule(settings, self.policy)

    def set_acceptance(self, settings: AcceptanceSettings) -> None:
        """Takes another acceptance rule from the next tick on.

        Raises:
            UserError: it does not fit the policy; the old one stays.
        """
        self._rule: AcceptanceRule = self.rule_for(settings)
        self._drafter.set_tolerance(bins_of(settings, self.policy))
        self.settings = replace(self.settings, acceptance=settings)

    def describe(self) -> dict[str, str | int]:
        """What is loaded and how it decodes, for diagnostics and results."""
        described = {"decode.mode": self.settings.mode, "drafts": ", ".join(self._drafter.sources)}
        if self._fallback:
            described["decode.fallback"] = self._fallback
        return self.policy.describe() | described

    def warm_up(self) -> None:
        """Decodes one black image, so that the first real one finds memory and kernels ready.

        Raises:
            UserError: the policy does not get through it, with the reason.
        """
        image = np.zeros((self.policy.model.config.towers[0].image_size,) * 2 + (3,), np.uint8)
        prompt_ids = self.policy.prompt.complete((1,))
        observation = Observation(image, "", stamp_ns=1, prompt_ids=prompt_ids)
        now_ns, self._now_ns = self._now_ns, None
        outcome = self.act(observation)
        self._now_ns = now_ns
        self.reset()
        if isinstance(outcome, Drop) and outcome.reason is not DropReason.NOT_AN_ACTION:
            raise UserError(f"the policy failed on a black test image: {outcome.reason.value}: {outcome.detail}")

    def check_instruction(self, instruction: str) -> None:
        """Whether the policy can be asked this.

        Raises:
            UserError: it is empty, or its prompt is longer than a slot holds.
        """
        self._prompts.ids(Observation(np.zeros((1, 1, 3), np.uint8), instruction, stamp_ns=1))

    def submit(self, observation: Observation) -> list[Drop]:
        """Puts the newest observation before the engine; one that still waited is dropped for it."""
        if observation.stamp_ns <= self._last_stamp_ns:
            age_s = (self._last_stamp_ns - observation.stamp_ns) * 1e-9
            return [Drop(observation, DropReason.OUT_OF_ORDER, f"{age_s:.3f} s before the last frame taken")]
        drops = [Drop(self._waiting, DropReason.SUPERSEDED)] if self._waiting is not None else []
        self._waiting = observation
        self._last_stamp_ns = observation.stamp_ns
        return drops

    def flush(self, reason: DropReason = DropReason.EPOCH_CHANGED) -> list[Drop]:
        """Drops what waits and what is in flight, at once."""
        drops = [Drop(request.observation, reason) for request in self._in_flight]
        for request in self._in_flight:
            self._ring.give_back(request.slot)
        self._in_flight.clear()
        if self._waiting is not None:
            drops.append(Drop(self._waiting, reason))
            self._waiting = None
        return drops

    def reset(self) -> list[Drop]:
        """Flushes, and takes any stamp next: for a clock that jumped, or another recording."""
        self._last_stamp_ns = 0
        self._drafter.forget()
        return self.flush()

    def act(self, observation: Observation) -> Outcome:
        """Decodes one observation to its end."""
        outcomes: list[Outcome] = list(self.submit(observation))
        while not any(outcome.observation is observation for outcome in outcomes):
            outcomes += self.tick()
        return next(outcome for outcome in outcomes if outcome.observation is observation)

    @torch.inference_mode()
    def tick(self) -> list[Outcome]:
        """One packed forward and what surrounds it: admit, pack, forward, accept, retire.

        A fault drops the requests in flight and is reported as their reason; the engine goes on.
        """
        started = time.monotonic_ns()
        self._work = TickWork()
        try:
            outcomes = self._admit()
            if self._in_flight:
                outcomes += self._step(started)
            return outcomes
        except Exception as error:  # whatever it is, the robot's node must outlive it
            _log.exception("a tick failed")
            drops = [
                Drop(drop.observation, drop.reason, f"{type(error).__name__}: {error}")
                for drop in self.flush(DropReason.ENGINE_FAULT)
            ]
            return list(drops)

    def _admit(self) -> list[Outcome]:
        """Gives the waiting observation a slot, if one is free."""
        observation = self._waiting
        if observation is None or not self._ring.free_slots:
            return []
        limit_s = self.settings.max_image_age_s
        if limit_s and self._now_ns is not None:
            age_s = (self._now_ns() - observation.stamp_ns) * 1e-9
            if age_s > limit_s:
                self._waiting = None
                return [Drop(observation, DropReason.STALE, f"{age_s:.3f} s old, the limit is {limit_s:g} s")]
        try:
            prompt_ids = self._prompts.ids(observation)
        except UserError as error:
            self._waiting = None
            return [Drop(observation, DropReason.BAD_INSTRUCTION, str(error))]
        received_ns = observation.received_ns
        wait_s = (time.monotonic_ns() - received_ns) * 1e-9 if received_ns else 0.0
        self._clock.start()
        prompt = self.policy.prompt_embeddings(observation.image, prompt_ids)
        self._clock.stop()
        slot = self._ring.take()
        assert slot is not None
        in_text = self._answer.in_text(())
        tree = self._drafter.behind_prompt(observation.epoch, levels=self._answer.longest, in_text=in_text)
        self._in_flight.append(Request(observation, slot, prompt, prompt_ids, wait_s, tree))
        self._waiting = None
        return []

    def _step(self, started_ns: int) -> list[Outcome]:
        """One forward for all requests in flight."""
        requests = tuple(self._in_flight)
        segments = [request.segments() for request in requests]
        self._work = _work(requests)
        result = packed_forward(self.policy.decoder, [each for mine in segments for each in mine], self._ring)
        hidden = result.hidden.split([sum(map(len, mine)) for mine in segments])
        shares = [Share(*each) for each in zip(requests, hidden, (r.prefilling for r in requests), strict=True)]
        if self._rule.needs_visual:
            for share in shares:
                share.keep_visual(self.policy.image_tokens)
        trees = [share.to_verify(self._answer) for share in shares]
        commits = verify(result.logits, trees, self._rule, self._answer.actions)
        vision_s = self._clock.read_s()
        outcomes: list[Outcome] = []
        drafts: list[DraftInput] = []
        for share, commit in zip(shares, commits, strict=True):
            request = share.request
            if NOT_A_NUMBER in commit.tokens:
                outcomes.append(Drop(request.observation, DropReason.NOT_FINITE, "the policy's logits hold NaN"))
                self._retire(request)
            elif self._commit(request, commit):
                request.book_time(_seconds_since(started_ns), vision_s, prefill=share.prefill)
                outcomes.append(self._outcome(request))
                self._retire(request)
            else:
                drafts.append(share.draft_input(commit, self._answer, self.policy.decoder.embed_tokens))
        before = self._drafter.head_forwards, self._drafter.self_forwards, self._drafter.self_rows
        self._draft(drafts)
        head_forwards = self._drafter.head_forwards - before[0]
        for share in shares:
            if share.request in self._in_flight:
                share.request.book_time(_seconds_since(started_ns), vision_s, prefill=share.prefill)
        self._work = replace(
            self._work,
            finished=len(requests) - len(self._in_flight),
            head_forwards=head_forwards,
            head_prompts=sum(share.prefill for share in shares) if head_forwards else 0,
            self_forwards=self._drafter.self_forwards - before[1],
            self_rows=self._drafter.self_rows - before[2],
        )
        return outcomes

    def _commit(self, request: Request, commit: Commit) -> bool:
        """Makes a forward's rows and tokens final; True when the answer is complete."""
        known = len(request.tokens)
        commit_kv(self._ring.keys, self._ring.values, request.slot, request.root_row, commit.nodes)
        request.commit(commit)
        end = self._answer.end(request.tokens, known)
        request.cut(end or len(request.tokens))
        return end > 0

    def _draft(self, inputs: list[DraftInput]) -> None:
        """Grows the trees that the next forward verifies."""
        if not inputs:
            return
        trees = {each.slot: tree for each, tree in zip(inputs, self._drafter.draft(inputs), strict=True)}
        for request in self._in_flight:
            request.tree = trees.get(request.slot, request.tree)

    def _retire(self, request: Request) -> None:
        self._in_flight.remove(request)
        self._ring.give_back(request.slot)

    def _outcome(self, request: Request) -> Outcome:
        tokens = self._answer.action(request.tokens)
        strangers = [token for token in tokens if not self.policy.action_tokenizer.is_action(token)]
        if strangers:
            return Drop(request.observation, DropReason.NOT_AN_ACTION, f"token {strangers[0]} is no action token")
        values = self.policy.action(tokens)
        if not np.isfinite(values).all():
            return Drop(request.observation, DropReason.NOT_FINITE, f"the action is {values.tolist()}")
        self._drafter.observe(request.observation.epoch, tuple(request.tokens), tokens)
        return Action(
            observation=request.observation,
            names=self.policy.action_names,
            values=values,
            tokens=tokens,
            timings=request.timings(),
            record=request.record(self.settings.mode, self.settings.acceptance.rule, len(self._in_flight)),
            finished_ns=time.monotonic_ns(),
        )


def _work(requests: Sequence[Request]) -> TickWork:
    begun = sum(request.prefix_len == 0 for request in requests)  # its image is seen in the tick that admits it
    prompts = sum(request.prefilling for request in requests)
    nodes = sum(len(request.tree) - request.prefilling for request in requests)
    return TickWork(images=begun, prompts=prompts, nodes=nodes)


def _seconds_since(started_ns: int) -> float:
    return (time.monotonic_ns() - started_ns) * 1e-9
