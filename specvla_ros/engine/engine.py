"""The engine: observations in, actions out, one tick at a time."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specvla_ros.engine.admission import Admission
from specvla_ros.engine.finish import outcome_of
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.prompt_cache import PromptCache
from specvla_ros.engine.request import Request
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.setup import set_up
from specvla_ros.engine.share import Share
from specvla_ros.engine.stage_clock import StageClock
from specvla_ros.engine.tally import TickWork
from specvla_ros.engine.verifier import Commit
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import Target
from specvla_ros.speculation.accept import NOT_A_NUMBER, AcceptanceRule
from specvla_ros.speculation.drafters.protocol import DraftInput
from specvla_ros.speculation.rules.registry import make_rule
from specvla_ros.speculation.settings import AcceptanceSettings
from specvla_ros.speculation.tree import Tree

_log = logging.getLogger(__name__)


class Engine:
    """Decodes the newest observations. One thread only may touch it.

    Args:
        policy: the target and what surrounds it.
        settings: how to decode.
        now_ns: the clock of the observations' stamps; needed for the staleness limit.

    Raises:
        UserError: the settings do not fit the policy or the device's memory.
    """

    def __init__(self, policy: Target, settings: EngineSettings, now_ns: Callable[[], int] | None = None) -> None:
        if settings.max_image_age_s and now_ns is None:
            raise UserError("max_image_age_s needs the clock of the stamps; set it to 0 to decode recorded images")
        self.policy = policy
        self._admission = Admission(now_ns)
        self._clock = StageClock(policy.decoder.device)
        self._prompts = PromptCache(policy, settings.max_text_tokens)
        self._setup = set_up(policy, settings)
        self._work = TickWork()

    @property
    def settings(self) -> EngineSettings:
        """How it decodes."""
        return self._setup.settings

    @property
    def last_work(self) -> TickWork:
        """What the last tick computed."""
        return self._work

    @property
    def busy(self) -> bool:
        """Whether an observation waits or is in flight."""
        return self._admission.waiting is not None or bool(self._setup.flight.requests)

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return len(self._setup.flight.requests)

    @property
    def has_room(self) -> bool:
        """Whether an observation submitted now would be admitted by the next tick."""
        return self._setup.flight.has_room

    def rule_for(self, settings: AcceptanceSettings) -> AcceptanceRule:
        """The acceptance rule that settings describe, for this policy.

        Raises:
            UserError: they do not fit its action statistics.
        """
        return make_rule(settings, self.policy)

    def set_acceptance(self, settings: AcceptanceSettings) -> None:
        """Takes another acceptance rule from the next frame on; frames in flight finish with theirs.

        Raises:
            UserError: it does not fit the policy; the old one stays.
        """
        self._setup.set_acceptance(settings, self.policy)

    def switch(self, settings: EngineSettings) -> list[Drop]:
        """Decodes otherwise from the next tick on; what is in flight is dropped, what waits is kept.

        Raises:
            UserError: the settings do not fit the policy or the device's memory; it goes on as before.
        """
        changed = set_up(self.policy, settings)  # beside the old one, which is still whole if this fails
        drops, warm = self._setup.flight.flush(DropReason.MODE_CHANGED), self._setup.graphs.warm
        self._setup, self._prompts = changed, PromptCache(self.policy, settings.max_text_tokens)
        if warm:
            changed.graphs.warm_up()
        return drops

    def set_max_image_age(self, seconds: float) -> None:
        """Takes another staleness limit; 0: none."""
        self._setup.settings = replace(self._setup.settings, max_image_age_s=seconds)

    def describe(self) -> dict[str, str | int]:
        """What is loaded and how it decodes, for diagnostics and results."""
        return self.policy.describe() | self._setup.describe()

    def warm_up(self) -> None:
        """Decodes one black image and captures CUDA graphs, so that the first real one finds everything ready.

        Raises:
            UserError: the policy does not get through it, with the reason.
        """
        image = np.zeros((self.policy.model.config.towers[0].image_size,) * 2 + (3,), np.uint8)
        observation = Observation(image, "", stamp_ns=1, prompt_ids=self.policy.prompt.complete((1,)))
        now_ns, self._admission.now_ns = self._admission.now_ns, None
        outcome = self.act(observation)
        self._admission.now_ns = now_ns
        self.reset()
        if isinstance(outcome, Drop) and outcome.reason is not DropReason.NOT_AN_ACTION:
            raise UserError(f"the policy failed on a black test image: {outcome.reason.value}: {outcome.detail}")
        self._setup.graphs.warm_up()

    def check_instruction(self, instruction: str) -> None:
        """Whether the policy can be asked this.

        Raises:
            UserError: it is empty, or its prompt is longer than a slot holds.
        """
        self._prompts.ids(Observation(np.zeros((1, 1, 3), np.uint8), instruction, stamp_ns=1))

    def submit(self, observation: Observation) -> list[Drop]:
        """Puts the newest observation before the engine; one that still waited is dropped for it."""
        return self._admission.submit(observation)

    def flush(self, reason: DropReason = DropReason.EPOCH_CHANGED) -> list[Drop]:
        """Drops what waits and what is in flight, at once."""
        return self._setup.flight.flush(reason) + self._admission.drop(reason)

    def reset(self) -> list[Drop]:
        """Flushes, and takes any stamp next: for a clock that jumped, or another recording."""
        self._admission.take_any_stamp()
        self._setup.drafter.forget()
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
            if self._setup.flight.requests:
                outcomes += self._step(started)
            return outcomes
        except Exception as error:  # whatever it is, the robot's node must outlive it
            _log.exception("a tick failed")
            detail = f"{type(error).__name__}: {error}"
            return [replace(drop, detail=detail) for drop in self.flush(DropReason.ENGINE_FAULT)]

    def _admit(self) -> list[Outcome]:
        """Gives the waiting observation a slot, if its prompt may begin now."""
        setup = self._setup
        if self._admission.waiting is None or not setup.flight.has_room:
            return []
        observation = self._admission.take(setup.settings.max_image_age_s)
        if not isinstance(observation, Observation):
            return [observation] if observation is not None else []
        try:
            prompt_ids = self._prompts.ids(observation)
        except UserError as error:
            return [Drop(observation, DropReason.BAD_INSTRUCTION, str(error))]
        self._admission.waiting = observation  # a fault of the vision tower drops it as what waits
        received_ns = observation.received_ns
        wait_s = (time.monotonic_ns() - received_ns) * 1e-9 if received_ns else 0.0
        self._clock.start()
        prompt = self.policy.prompt_embeddings(observation.image, prompt_ids, setup.vision)
        self._clock.stop()
        slot = setup.cache.take()
        assert slot is not None
        nothing = Tree.of_root(torch.zeros((), dtype=torch.int64, device=prompt.device))
        rule = setup.verifier.rule
        setup.flight.requests.append(Request(observation, slot, prompt, prompt_ids, wait_s, nothing, rule))
        self._admission.waiting = None
        self._work = replace(self._work, images=1)
        return []

    def _step(self, started_ns: int) -> list[Outcome]:
        """One forward for all requests in flight."""
        setup = self._setup
        shares = self._shares()
        verified = [share for share in shares if share.verifies]
        parts = [share.to_verify(setup.answer) for share in verified]
        prepared = setup.verifier.prepare(parts)
        logits = self._forward(shares)
        parts = [share.with_states(part) for share, part in zip(verified, parts, strict=True)]
        commits = setup.verifier.verify(logits, parts, prepared) if parts else []
        vision_s = self._clock.read_s() if verified else 0.0  # behind a read-back alone
        outcomes, told = self._commit_all(verified, commits, vision_s, started_ns)
        for share in shares:
            if not share.verifies:
                share.request.advance(share.prompt_rows)
                told.append((share.request, share.prompt_input()))
        outcomes += setup.flight.hopeless()
        self._draft([each for request, each in told if request in setup.flight.requests])
        for share in shares:
            if share.request in setup.flight.requests:
                share.request.book_time(_seconds_since(started_ns), vision_s, prefill=share.prompt_rows > 0)
        self._work = replace(self._work, finished=len(shares) - len(setup.flight.requests))
        return outcomes + setup.flight.released()

    def _shares(self) -> list[Share]:
        """Each request's rows of the next forward."""
        shares = [Share.of(request, self._setup.settings.chunks) for request in self._setup.flight.requests]
        for share in shares:
            if share.ends_prompt:  # not earlier: what is known of earlier answers grows meanwhile
                share.request.tree = self._behind_prompt(share.request)
        self._work = _with_shares(self._work, shares)
        return shares

    def _forward(self, shares: Sequence[Share]) -> Tensor:
        """The packed forward: hidden states go to their shares; the logits, float32 [nodes of all trees, vocab]."""
        segments = [share.segments() for share in shares]
        result = self._setup.forwards([each for mine in segments for each in mine])
        for share, hidden in zip(shares, result.hidden.split([sum(map(len, mine)) for mine in segments]), strict=True):
            share.hidden = hidden
            if share.request.rule.needs_visual:
                share.keep_visual(self.policy.image_tokens)
        return result.logits

    def _commit_all(
        self, shares: Sequence[Share], commits: Sequence[Commit], vision_s: float, started_ns: int
    ) -> tuple[list[Outcome], list[tuple[Request, DraftInput]]]:
        """Makes tokens final, oldest frame first; drops, and what a drafter is told of the requests that go on."""
        setup = self._setup
        outcomes: list[Outcome] = []
        told: list[tuple[Request, DraftInput]] = []
        for share, commit in zip(shares, commits, strict=True):
            request = share.request
            if NOT_A_NUMBER in commit.tokens:
                setup.flight.remove(request)
                outcomes.append(Drop(request.observation, DropReason.NOT_FINITE, "the policy's logits hold NaN"))
            elif self._commit(request, commit):
                request.book_time(_seconds_since(started_ns), vision_s, prefill=share.prompt_rows > 0)
                outcomes += self._finish(request)
            else:
                told.append((request, share.draft_input(commit, setup.answer, self.policy.decoder.embed_tokens)))
        return outcomes, told

    def _commit(self, request: Request, commit: Commit) -> bool:
        """Makes a forward's tokens final; True when the answer is complete."""
        setup, known = self._setup, len(request.tokens)
        request.commit(commit)
        end = setup.answer.end(request.tokens, known)
        request.cut(end or len(request.tokens))
        return end > 0

    def _finish(self, request: Request) -> Sequence[Outcome]:
        """Ends a request; its action leaves by `Flight.released`."""
        setup = self._setup
        outcome = outcome_of(request, self.policy, setup.answer, setup.settings, in_flight=self.in_flight)
        if not isinstance(outcome, Action):
            setup.flight.remove(request)
            return [outcome]
        setup.drafter.observe(request.observation.epoch, tuple(request.tokens), outcome.tokens)
        return setup.flight.finish(request, outcome)

    def _draft(self, inputs: list[DraftInput]) -> None:
        """Grows the trees that the next forward verifies."""
        if not inputs:
            return
        drafter = self._setup.drafter
        before = drafter.work
        trees = {each.slot: tree for each, tree in zip(inputs, drafter.draft(inputs), strict=True)}
        for request in self._setup.flight.requests:
            request.tree = trees.get(request.slot, request.tree)
        drafted = drafter.work.since(before)
        head_prompts = self._work.prompts if drafted.head_forwards else 0.0
        self._work = replace(self._work, drafting=drafted, head_prompts=head_prompts)

    def _behind_prompt(self, request: Request) -> Tree:
        """What the end of a prompt verifies with it."""
        answer = self._setup.answer
        return self._setup.drafter.behind_prompt(
            request.observation.epoch, levels=answer.longest, in_text=answer.in_text(())
        )


def _with_shares(work: TickWork, shares: Sequence[Share]) -> TickWork:
    prompts = sum(share.prompt_rows / len(share.request.prompt) for share in shares)
    nodes = sum(len(share.request.tree) - share.ends_prompt for share in shares if share.verifies)
    return replace(work, prompts=prompts, nodes=nodes)


def _seconds_since(started_ns: int) -> float:
    return (time.monotonic_ns() - started_ns) * 1e-9
