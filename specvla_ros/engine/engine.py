"""The engine: observations in, actions out, one tick at a time."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from specvla_ros.acceptance.strict import NOT_A_NUMBER, accept_strict, greedy_choice
from specvla_ros.engine.kv_ring import KVRing
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.packed_forward import new_ring, packed_forward
from specvla_ros.engine.request import Request
from specvla_ros.engine.segment import Segment
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.stage_clock import StageClock
from specvla_ros.engine.tick_work import TickWork
from specvla_ros.errors import UserError
from specvla_ros.models.policy import Policy

_log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = {"ar": 1}
_ROW_MULTIPLE = 16  # slots begin on a multiple of an attention tile's rows


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
        self._max_prompt = policy.image_tokens + settings.max_text_tokens
        self._ring = _allocate_ring(policy, self._max_prompt, slots=_MAX_IN_FLIGHT[settings.mode])
        self._waiting: Observation | None = None
        self._in_flight: list[Request] = []
        self._last_stamp_ns = 0
        self._prompt_ids: tuple[str, tuple[int, ...]] = ("", ())
        self._work = TickWork()

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
        self._ids(Observation(np.zeros((1, 1, 3), np.uint8), instruction, stamp_ns=1))

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
            prompt_ids = self._ids(observation)
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
        self._in_flight.append(Request(observation, slot, prompt, wait_s))
        self._waiting = None
        return []

    def _step(self, started_ns: int) -> list[Outcome]:
        """One forward for all requests in flight."""
        requests = tuple(self._in_flight)
        segments = [request.segment() for request in requests]
        self._work = _work(requests, segments)
        result = packed_forward(self.policy.decoder, segments, self._ring)
        choices = greedy_choice(result.logits).tolist()  # the tick's one read-back
        tick_s = (time.monotonic_ns() - started_ns) * 1e-9
        vision_s = self._clock.read_s()
        outcomes: list[Outcome] = []
        for request, segment in zip(requests, segments, strict=True):
            mine, choices = choices[: segment.wanted], choices[segment.wanted :]
            _book_time(request, tick_s, vision_s)
            if NOT_A_NUMBER in mine:
                outcomes.append(Drop(request.observation, DropReason.NOT_FINITE, "the policy's logits hold NaN"))
                self._retire(request)
                continue
            _commit(request, (-1,) if segment.ancestry is not None else None, mine)
            if len(request.tokens) >= self.policy.action_dim:
                outcomes.append(self._outcome(request))
                self._retire(request)
        self._work = replace(self._work, finished=len(requests) - len(self._in_flight))
        return outcomes

    def _retire(self, request: Request) -> None:
        self._in_flight.remove(request)
        self._ring.give_back(request.slot)

    def _outcome(self, request: Request) -> Outcome:
        tokens = tuple(request.tokens[: self.policy.action_dim])
        strangers = [token for token in tokens if not self.policy.action_tokenizer.is_action(token)]
        if strangers:
            return Drop(request.observation, DropReason.NOT_AN_ACTION, f"token {strangers[0]} is no action token")
        values = self.policy.action(tokens)
        if not np.isfinite(values).all():
            return Drop(request.observation, DropReason.NOT_FINITE, f"the action is {values.tolist()}")
        return Action(
            observation=request.observation,
            names=self.policy.action_names,
            values=values,
            tokens=tokens,
            timings=request.timings(),
            record=request.record(self.settings.mode, len(self._in_flight)),
            finished_ns=time.monotonic_ns(),
        )

    def _ids(self, observation: Observation) -> tuple[int, ...]:
        if observation.prompt_ids is not None:
            ids = self.policy.prompt.complete(observation.prompt_ids)
        elif self._prompt_ids[0] == observation.instruction and self._prompt_ids[1]:
            return self._prompt_ids[1]
        else:
            ids = self.policy.prompt_ids(observation.instruction)
        if len(ids) > self.settings.max_text_tokens:
            raise UserError(
                f"the prompt has {len(ids)} tokens, but a KV slot holds {self.settings.max_text_tokens}: "
                "shorten the instruction, or raise decode.max_text_tokens"
            )
        if observation.prompt_ids is None:
            self._prompt_ids = (observation.instruction, ids)
        return ids


def _allocate_ring(policy: Policy, max_prompt: int, *, slots: int) -> KVRing:
    rows = max_prompt + policy.action_dim
    rows += -rows % _ROW_MULTIPLE
    longest = policy.decoder.config.max_position_embeddings
    if rows > longest:
        raise UserError(
            f"a slot of {rows} rows is longer than the model's {longest} positions: lower decode.max_text_tokens"
        )
    return new_ring(policy.decoder, slots=slots, slot_rows=rows)


def _work(requests: Sequence[Request], segments: Sequence[Segment]) -> TickWork:
    begun = sum(request.prefix_len == 0 for request in requests)  # its image is seen in the tick that admits it
    prompts = sum(request.prefilling for request in requests)
    nodes = sum(len(segment) for segment in segments if segment.ancestry is not None)
    return TickWork(images=begun, prompts=prompts, nodes=nodes)


def _book_time(request: Request, tick_s: float, vision_s: float) -> None:
    """Books the tick to the stage it served: the vision tower runs in the tick that begins a prefill."""
    request.tick_s.append(tick_s)
    if request.prefilling:
        request.vision_s += vision_s
        request.prefill_s += tick_s - vision_s
    else:
        request.decode_s += tick_s


def _commit(request: Request, parents: tuple[int, ...] | None, choices: list[int]) -> None:
    """Makes a forward's rows and tokens final."""
    if parents is None:
        request.prefix_len = request.prompt.shape[0]
        committed: tuple[int, ...] = (choices[0],)
    else:
        accepted = accept_strict(choices, request.tokens[-1:], parents)
        request.prefix_len += len(accepted.path)
        request.accept_lengths.append(len(accepted.path) - 1)
        request.tree_nodes.append(len(parents))
        committed = accepted.tokens
    request.tokens += committed
    request.tokens_per_forward.append(len(committed))
