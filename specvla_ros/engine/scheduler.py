# SPDX-License-Identifier: Apache-2.0
"""The scheduler: admits frames, assigns each request its share of the next forward, and releases outcomes.

It works on the host with numbers of rows and tokens only, so that planning can drive it without a model.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from specvla_ros.engine.answer_prefix import NO_PREFIX, AnswerPrefix
from specvla_ros.engine.batch import Batch, ScheduledRequest, TickWork
from specvla_ros.engine.chooser import Chooser
from specvla_ros.engine.kv_cache import SlotPool
from specvla_ros.engine.mailbox import Mailbox, Waiting
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.pace import FirstActions, Kind, Length, may_begin
from specvla_ros.engine.prepared_images import PreparedImages
from specvla_ros.engine.request import Request
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.verifier import Commit
from specvla_ros.models.codecs.codec import Codec, SaysNumbers
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import PromptLayout
from specvla_ros.speculation.accept import NOT_A_NUMBER
from specvla_ros.speculation.drafters.registry import FinishedAnswer
from specvla_ros.speculation.tree import Tree

_MEMORY = 0.9  # decay of the mean number of forwards per request: about the last ten requests


class Scheduler:
    """Keeps requests in the order in which their frames were started; for one robot, in stamp order.

    Robots share only the forwards: instructions, overtaking, flushes and faults are per robot. `root` is the one-node
    tree of a request that has committed nothing. `chooser` chooses the pace in mode auto.
    """

    def __init__(
        self,
        settings: EngineSettings,
        mailbox: Mailbox,
        slots: SlotPool,
        codec: Codec,
        root: Tree,
        chooser: Chooser | None = None,
    ) -> None:
        self.settings, self.chooser = settings, chooser
        self.requests: list[Request] = []
        self._mailbox, self._slots, self._codec, self._root = mailbox, slots, codec, root
        self.forget_answers()
        self._numbers: SaysNumbers | None = codec if isinstance(codec, SaysNumbers) else None
        self._held: list[Action] = []
        self._drops: list[Drop] = []

    def forget_answers(self) -> None:
        """Forgets how long answers took, after a warm-up: its ticks are slow, and its images black."""
        self._first_actions = FirstActions(self.settings.step_s(self._codec))
        self._forwards = 0.0  # mean per finished request; 0: none yet
        self._fewest_forwards = 0  # approximate minimum of the last finished requests

    @property
    def target_in_flight(self) -> int:
        """Number of requests per robot to keep in flight, enough to finish them as fast as its prompts can start.

        More would only increase latency at the same rate. The number is learned from finished requests. Robots take
        turns starting their prompts.
        """
        most = self.settings.slots_per_stream
        if self.chooser is not None:
            return min(most, self.chooser.pace.in_flight)
        prompts = self.settings.spreads[0] * max(1, len(self._mailbox.streams))
        needed = math.ceil(self._forwards / prompts - 1e-9) if self._forwards else most
        return max(1, min(most, needed))

    def room_for(self, stream: str) -> bool:
        """True if the next tick may start a prompt of this robot; one prompt is computed at a time."""
        own = self._of(stream)
        if any(request.prefilling for request in self.requests):
            return False
        if self._replaceable(own) is not None:
            return True
        if not self._slots.free_slots:
            return False
        if self.chooser is None:
            return len(own) < self.target_in_flight
        if any(not each.late for each in self._renewing(stream)) and self.chooser.waits_for_thought:
            return False
        pace, answers = self.chooser.pace, self.chooser.answers
        return not own or may_begin(pace, answers, len(own), (own[-1].others, own[-1].verified, own[-1].prefilling))

    def unprepared(self) -> PreparedImages | None:
        """The images that no thread prepares yet of the frame that may start next; from any thread."""
        waiting = self._mailbox.next(self._room_soon)
        images = waiting.images if waiting is not None else None
        return images if images is not None and not images.started else None

    def _room_soon(self, stream: str) -> bool:
        """Estimates whether the tick after the current one may start a prompt of a robot.

        Assumes that a request may end once it has taken as many forwards as the shortest recent one.
        """
        if self.room_for(stream):
            return True
        requests = [*self.requests]
        if any(request.prefilling and not ScheduledRequest.next_share(request).ends_prompt for request in requests):
            return False
        ending = [each for each in requests if len(each.tokens_per_forward) + 1 >= self._fewest_forwards]
        own = [each for each in requests if each.observation.stream == stream and not each.given.renews]
        has_slot = bool(self._slots.free_slots or ending)
        return has_slot and (len(own) < self.target_in_flight or any(each in ending for each in own))

    def schedule(self) -> Batch:
        """Admits the newest frame if there is room, and assigns each request its share of the next forward."""
        batch = Batch([], self._admit())
        if batch.admitted is not None:
            replaced = self._replaceable(self._of(batch.admitted.observation.stream))
            if replaced is not None:
                self._end_early(replaced, batch)
        batch.shares += [ScheduledRequest.next_share(request) for request in self.requests]
        # Where images were processed ahead of a prompt, older answers may have ended since.
        for request in (share.request for share in batch.shares if share.prompt_rows and not share.request.prefix_len):
            request.others = sum(each is not request for each in self._of(request.observation.stream))
        return batch

    @property
    def spread(self) -> int:
        """Number of forwards over which the prompt of a frame started now is spread."""
        if self.chooser is None:
            return self.settings.spreads[0]
        return self.chooser.pace.spread if self.requests else 1

    def begin(self, batch: Batch, layout: PromptLayout, chunk_rows: int, given: AnswerPrefix = NO_PREFIX) -> None:
        """Turns a batch's admitted frame into a request with a share of the forward.

        The rows of `layout` include those of the given tokens.
        """
        assert batch.admitted is not None
        observation, batch.started_ns = batch.admitted.observation, time.monotonic_ns()
        slot = self._slots.take()
        assert slot is not None
        request = Request(
            observation,
            slot,
            layout,
            chunk_rows,
            wait_s=(batch.started_ns - observation.received_ns) * 1e-9 if observation.received_ns else 0.0,
            tree=self._root,
            codec=self._codec,
            given=given,
            acceptance=self.settings.acceptance.rule,
            spread=self.spread,
            others=len(self._of(observation.stream)),
            drafts=self.settings.drafts if self.chooser is None else self.chooser.pace.drafts,
            ahead=self.chooser is not None and self.chooser.pace.ahead and bool(batch.shares),
            images=batch.admitted.images,
        )
        self.requests.append(request)
        batch.shares.append(ScheduledRequest.next_share(request))
        batch.admitted = None

    def refuse(self, batch: Batch, reason: DropReason, detail: str) -> None:
        """Drops a batch's admitted frame when it cannot become a request."""
        assert batch.admitted is not None
        self._drops.append(Drop(batch.admitted.observation, reason, detail))
        batch.admitted = None

    def commit(self, batch: Batch, commits: Sequence[Commit]) -> None:
        """Commits a forward's rows and tokens, oldest frame first, and adds completed answers to `batch.finished`."""
        for share, commit in zip(batch.verified, commits, strict=True):
            request = share.request
            if NOT_A_NUMBER in commit.tokens:
                self._drop(request, DropReason.NOT_FINITE, "the policy's logits hold NaN")
            elif self._completes(request, commit):
                request.book_time(batch.elapsed_s, batch.vision_s, prefill=share.prefills)
                self._finish(request, batch)
        for share in batch.shares:
            if not share.verifies:
                share.request.advance(share.prompt_rows)
        self._drop_overtaken()

    def learn(self, batch: Batch, work: TickWork, seconds: float) -> None:
        """Updates the requests, the time to first actions and the choice of the pace with a tick's time."""
        for share in batch.shares:
            share.request.spent_s += seconds
        for request in batch.answered:
            if not request.released_actions and not request.late:
                self._first_actions.add(request.spent_s)
        if self.chooser is None or not batch.shares:
            return
        prompts = [share.request.spread for share in batch.shares if share.prompt_rows]
        drafts = any(share.request.drafts for share in batch.shares)
        trees = sum(not share.prefills for share in batch.shares)
        self.chooser.times.add(Kind(work.images > 0, max(prompts, default=0), trees, drafts), seconds)
        for request in batch.answered:
            if request.given.renews:
                self.chooser.thought(request.verified, drafted=request.drafts)
                continue
            self.chooser.answered(*self._lengths(request), others=request.others, drafted=request.drafts)

    def _lengths(self, request: Request) -> tuple[Length, Length]:
        """An answer's length as it was decoded, and as without drafts, when each token takes a forward."""
        forwards, tokens, given = request.verified, len(request.tokens), request.given
        if not request.released_actions:
            return Length(forwards, forwards), Length(tokens - len(given.tokens), tokens - len(given.tokens))
        first = whole = self._tokens_of(request, given.actions + 1)
        if not request.ended_early:
            whole = tokens
        elif forwards > request.first_forwards:  # else they may be several at once, but without drafts one suffices
            whole = self._tokens_of(request, request.released_actions)
        return Length(request.first_forwards, forwards), Length(first - len(given.tokens), whole - len(given.tokens))

    def _tokens_of(self, request: Request, actions: int) -> int:
        """The number of an answer's tokens that complete so many of its actions."""
        tokens = request.tokens
        return bisect_left(range(len(tokens)), actions, key=lambda count: len(self._begun(tokens[:count])))

    def renews(self, stream: str) -> bool:
        """True if a robot's next thought is being written, while newer images are given the last one."""
        return bool(self._renewing(stream))

    def age_at_first_actions_s(self, seen: Observation) -> float:
        """Expected age of an image when its first actions are out, if its answer starts now.

        The mean of the last answers; before the first, and without the clock of the stamps, less.
        """
        return self._mailbox.age_s(seen) + self._first_actions.mean_s

    def before(self, seen: Observation) -> Request | None:
        """The request of the previous image, if in flight with the same instruction."""
        older = [
            each
            for each in self._of(seen.stream)
            if each.observation.stamp_ns < seen.stamp_ns and each.observation.epoch == seen.epoch
        ]
        return older[-1] if older else None

    def previous_answer(self, seen: Observation) -> tuple[int, ...]:
        """Committed tokens of the previous image's answer, if in flight with the same instruction; else empty."""
        before = self.before(seen)
        return tuple(before.tokens) if before is not None else ()

    def book_time(self, batch: Batch) -> None:
        """Adds a tick's time to the requests still in flight."""
        for share in batch.shares:
            if share.request in self.requests:
                share.request.book_time(batch.elapsed_s, batch.vision_s, prefill=share.prefills)

    def release(self) -> list[Outcome]:
        """Returns the outcomes ready for release: drops, then actions, oldest first.

        Checks the age again, since a suspended process, a slow policy or a clock jump ages requests in flight.
        """
        oldest: dict[str, int] = {}  # by stream
        for request in reversed(self.requests if self.settings.in_order else self._acting):
            oldest[request.observation.stream] = request.observation.stamp_ns
        self._held.sort(key=lambda action: action.observation.stamp_ns)
        ended: list[Outcome] = [*self._drops]
        held, self._held, self._drops = self._held, [], []
        for action in held:
            seen = action.observation
            if seen.stamp_ns >= oldest.get(seen.stream, math.inf):
                self._held.append(action)
            else:
                ended.append(self._too_old(seen) or action)
        return ended

    def partial(self) -> list[Action]:
        """The first actions of each robot's oldest answer in flight, if more are known than were published.

        Committed tokens are final, so the whole answer starts with the same actions. The answer to a newer image waits
        until it is the oldest, so that no older one follows it. None of an image that is too old: `release` drops it.
        """
        if self._numbers is None:
            return []
        oldest = {request.observation.stream: request for request in reversed(self.requests)}
        found = []
        for request in oldest.values():
            actions = self._begun(request.tokens)
            if max(request.released_actions, request.given.actions) < len(actions) < self._codec.horizon:
                if self._too_old(request.observation) is not None:
                    continue
                if not request.released_actions:
                    self._first_actions.add(request.spent_s)
                    request.first_forwards = request.verified
                request.released_actions = len(actions)
                found.append(self._action(request, actions, tuple(request.tokens), partial=True))
        return found

    def _too_old(self, seen: Observation) -> Drop | None:
        """The drop of an image that is older than the limit now that its actions are ready; None if it is not."""
        return self._mailbox.dropped_for_age(seen, self.settings.max_image_age_s, DropReason.TOO_OLD)

    def flush(self, reason: DropReason, before_epoch: float = math.inf, stream: str | None = None) -> list[Drop]:
        """Drops everything in flight of epochs before `before_epoch`, including actions that wait for older ones.

        `stream`: limits this to one robot; None: all.
        """

        def void(observation: Observation) -> bool:
            return observation.epoch < before_epoch and stream in (None, observation.stream)

        dropped = [action.observation for action in self._held if void(action.observation)]
        self._held = [action for action in self._held if not void(action.observation)]
        for request in [each for each in self.requests if void(each.observation)]:
            self._remove(request)
            dropped.append(request.observation)
        return [Drop(observation, reason) for observation in dropped]

    def fail(self, batch: Batch, share: ScheduledRequest, detail: str) -> None:
        """Removes a request that could not be computed from its batch and drops it; the others continue."""
        batch.shares.remove(share)
        self._drop(share.request, DropReason.ENGINE_FAULT, detail)

    def _admit(self) -> Waiting | None:
        while isinstance(taken := self._mailbox.take(self.settings.max_image_age_s, self.room_for), Drop):
            self._drops.append(taken)
        return taken

    def _completes(self, request: Request, commit: Commit) -> bool:
        """Commits a request's tokens; True if its answer is complete."""
        known = len(request.tokens)
        request.commit(commit)
        end = self._codec.end(request.tokens, known)
        request.cut(end or len(request.tokens))
        return end > 0

    def _finish(self, request: Request, batch: Batch) -> None:
        problem = self._codec.problem(request.tokens)
        if problem:
            reason = DropReason.BROKEN_OFF if request.released_actions else DropReason.NOT_AN_ACTION
            self._drop(request, reason, problem)
            return
        tokens = self._codec.action_tokens(request.tokens)
        of_head = request.actions
        actions = self._codec.decode(tokens) if of_head is None else np.array(of_head.tolist())
        if not np.isfinite(actions).all():
            self._drop(request, DropReason.NOT_FINITE, f"the action is {actions.tolist()}")
            return
        self._answer(request, batch, actions, tokens)

    def _replaceable(self, own: Sequence[Request]) -> Request | None:
        """A robot's oldest request, if a newer image's actions will be ready before its published ones are used up."""
        if self.settings.tail == "whole" or not own or not own[0].released_actions:
            return None
        oldest, newer_s = own[0], own[1].spent_s if len(own) > 1 else 0.0
        age_s = oldest.observation.receive_s + oldest.wait_s + oldest.spent_s  # an action's time counts from the stamp
        return oldest if self._first_actions.last(oldest.released_actions, age_s, newer_s=newer_s) else None

    def _end_early(self, request: Request, batch: Batch) -> None:
        """Ends an answer with the actions already published."""
        actions, request.ended_early = self._begun(request.tokens)[: request.released_actions], True
        self._answer(request, batch, actions, tuple(request.tokens), whole=False)

    def _begun(self, tokens: Sequence[int]) -> np.ndarray:
        """The actions complete in the first tokens of an answer, float64 [n, dims]."""
        assert self._numbers is not None
        numbers, dims = self._numbers.completed_numbers(tokens), len(self._codec.names)
        return numbers[: len(numbers) // dims * dims].reshape(-1, dims)

    def _answer(
        self, request: Request, batch: Batch, actions: np.ndarray, tokens: tuple[int, ...], *, whole: bool = True
    ) -> None:
        batch.answered.append(request)
        if request.late:
            self._drop(request, DropReason.OVERTAKEN)
            return
        action = self._action(request, actions, tokens)
        self._remove(request)
        forwards = len(request.tokens_per_forward)
        self._forwards = _MEMORY * self._forwards + (1 - _MEMORY) * forwards if self._forwards else forwards
        self._fewest_forwards = min(forwards, self._fewest_forwards + 1)
        self._held.append(action)
        seen = request.observation
        batch.finished.append(
            FinishedAnswer(seen.epoch, tuple(request.tokens), tokens, seen.stamp_ns, seen.stream, whole)
        )
        if not self.settings.in_order:
            for older in [other for other in self._of(seen.stream) if other.observation.stamp_ns < seen.stamp_ns]:
                self._drop(older, DropReason.OVERTAKEN)
            for thinking in self._renewing(seen.stream):
                thinking.late = thinking.late or thinking.observation.stamp_ns < seen.stamp_ns

    def _action(
        self, request: Request, actions: np.ndarray, tokens: tuple[int, ...], *, partial: bool = False
    ) -> Action:
        return Action(
            observation=request.observation,
            names=self._codec.names,
            actions=actions,
            dt_s=self._codec.dt_s,
            tokens=tokens,
            text_tokens=() if partial else self._codec.text_tokens(request.tokens),
            text_ns=request.given.text_ns or request.observation.stamp_ns,
            timings=request.timings(),
            record=request.record(self.settings.mode, len(self.requests)),
            finished_ns=time.monotonic_ns(),
            partial=partial,
            given=request.given.actions,
        )

    def _drop_overtaken(self) -> None:
        """Drops requests that a newer one has caught up with: they would finish in the same forward or later."""
        if self.settings.in_order:
            return
        furthest: dict[str, int] = {}  # by stream
        for request in reversed(self._acting):
            stream = request.observation.stream
            if len(request.tokens) <= furthest.get(stream, -1):
                self._drop(request, DropReason.OVERTAKEN)
            if not request.prefilling:
                furthest[stream] = max(furthest.get(stream, -1), len(request.tokens))

    @property
    def _acting(self) -> list[Request]:
        """The requests whose actions are awaited, unlike those of the ones that renew a thought."""
        return [request for request in self.requests if not request.given.renews]

    def _of(self, stream: str) -> list[Request]:
        """A robot's requests whose actions are awaited, oldest first."""
        return [request for request in self._acting if request.observation.stream == stream]

    def _renewing(self, stream: str) -> list[Request]:
        return [each for each in self.requests if each.given.renews and each.observation.stream == stream]

    def _drop(self, request: Request, reason: DropReason, detail: str = "") -> None:
        self._remove(request)
        self._drops.append(Drop(request.observation, reason, detail))

    def _remove(self, request: Request) -> None:
        self.requests.remove(request)
        self._slots.give_back(request.slot)
