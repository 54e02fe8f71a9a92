"""The requests in flight: who is admitted, who is overtaken, and in which order actions leave."""

import math

from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.request import Request

_MEMORY = 0.9  # of the mean number of forwards per request: about the last ten requests


class Flight:
    """Keeps requests in the order of their frames.

    Args:
        cache: whose slots the requests hold.
        chunks: forwards over which a prompt is spread.
        in_order: whether actions wait for those of older frames, in place of overtaking them.
    """

    def __init__(self, cache: KVCache, *, chunks: int, in_order: bool) -> None:
        self._cache = cache
        self._chunks = chunks
        self._in_order = in_order
        self._forwards = 0.0  # per finished request, mean; 0: none yet
        self._held: list[Action] = []
        self.requests: list[Request] = []

    @property
    def target(self) -> int:
        """Requests to keep in flight: as many as are finished at the rate at which prompts can begin.

        More would only wait longer for the same rate; how many it takes is learnt from the requests that finished.
        """
        needed = math.ceil(self._forwards / self._chunks - 1e-9) if self._forwards else self._cache.slots
        return max(1, min(self._cache.slots, needed))

    @property
    def has_room(self) -> bool:
        """Whether the next tick may begin a prompt: one at a time."""
        prefilling = any(request.prefilling for request in self.requests)
        return bool(self._cache.free_slots) and len(self.requests) < self.target and not prefilling

    def remove(self, request: Request) -> None:
        """Takes a request out that is finished or dropped; its slot is free."""
        self.requests.remove(request)
        self._cache.give_back(request.slot)

    def finish(self, request: Request, action: Action) -> list[Drop]:
        """Takes a request out with its action; what was older is overtaken."""
        self.remove(request)
        forwards = len(request.tokens_per_forward)
        self._forwards = _MEMORY * self._forwards + (1 - _MEMORY) * forwards if self._forwards else forwards
        self._held.append(action)
        if self._in_order:
            return []
        stamp_ns = request.observation.stamp_ns
        return self._overtaken([each for each in self.requests if each.observation.stamp_ns < stamp_ns])

    def hopeless(self) -> list[Drop]:
        """Takes out what a newer request has caught up with: it would be overtaken, or finish in the same forward."""
        if self._in_order:
            return []
        caught_up, most = [], -1
        for request in reversed(self.requests):
            if len(request.tokens) <= most:
                caught_up.append(request)
            if request.tokens:
                most = max(most, len(request.tokens))
        return self._overtaken(caught_up)

    def released(self) -> list[Outcome]:
        """The actions that may leave now, oldest first."""
        oldest = min((each.observation.stamp_ns for each in self.requests), default=math.inf)
        self._held.sort(key=lambda action: action.observation.stamp_ns)
        ready = [action for action in self._held if action.observation.stamp_ns < oldest]
        del self._held[: len(ready)]
        return list(ready)

    def flush(self, reason: DropReason) -> list[Drop]:
        """Drops everything, actions that wait for older ones included."""
        voided = [each.observation for each in self._held] + [each.observation for each in self.requests]
        drops = [Drop(observation, reason) for observation in voided]
        self._held.clear()
        for request in list(self.requests):
            self.remove(request)
        return drops

    def _overtaken(self, requests: list[Request]) -> list[Drop]:
        for request in requests:
            self.remove(request)
        return [Drop(request.observation, DropReason.OVERTAKEN) for request in requests]
