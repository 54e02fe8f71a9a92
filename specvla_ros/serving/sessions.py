# SPDX-License-Identifier: Apache-2.0
"""One engine for many clients: each session is a stream of the engine, and has one request under way at a time."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specvla_ros.engine.outcome import Action, DropReason, Outcome
from specvla_ros.engine.thread import SharedEngine
from specvla_ros.errors import UserError
from specvla_ros.models.observation import Observation


@dataclass(frozen=True)
class ServeSettings:
    """Limits for a server's clients."""

    sessions: int = 4  # at once; the engine has slots for as many
    token: str = ""  # that clients must show; empty: none
    budget_s: float = 0.5  # in which a request should be answered
    max_message_bytes: int = 32_000_000  # of one request
    max_rate_hz: float = 0.0  # of one session's requests; 0: no limit
    idle_s: float = 60.0  # after which a session over HTTP, which has no goodbye, is closed
    message_s: float = 10.0  # in which the body of a request over HTTP must arrive


class NoRoomError(Exception):
    """All sessions are taken."""


class Session:
    """One client, a stream of the engine, whose requests are answered one after the other."""

    def __init__(
        self, thread: SharedEngine, name: str, min_period_s: float, silence_s: float, *, lasting: bool
    ) -> None:
        self.name, self.lasting, self._silence_s = name, lasting, silence_s
        self.used_s = time.monotonic()
        self._thread = thread
        self._min_period_s = min_period_s
        self._lock = asyncio.Lock()
        self._instruction = ""
        self._epoch = 0
        self._stamp_ns = 0
        self._asked_s = -math.inf

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    def begin_episode(self) -> None:
        """What follows is unrelated to what came before."""
        self._epoch += 1

    async def act(self, images: Mapping[str, np.ndarray], instruction: str, state: np.ndarray | None) -> Outcome:
        """A request's outcome; UserError if the images cannot be used, or it is too soon."""
        async with self._lock:
            now_s = time.monotonic()
            if now_s - self._asked_s < self._min_period_s:
                raise UserError(f"at most {1 / self._min_period_s:g} requests per second: this one came too soon")
            if now_s - self.used_s > self._silence_s:  # no protocol but vla-eval's tells that an episode ends
                self.begin_episode()
            self._asked_s = self.used_s = now_s
            self._epoch += instruction != self._instruction
            self._instruction = instruction
            self._stamp_ns = max(time.time_ns(), self._stamp_ns + 1)  # the client's clock is not asked
            observation = Observation(
                images,
                instruction,
                self._stamp_ns,
                epoch=self._epoch,
                received_ns=time.monotonic_ns(),
                state=state,
                stream=self.name,
            )
            pictures = await asyncio.to_thread(self._thread.prepared, observation)
            outcome = (await asyncio.wrap_future(self._thread.decode(observation, pictures))).outcome
            self.used_s = time.monotonic()
            return outcome


class Sessions:
    """All clients, with counts of answers and, by reason, of failures.

    `silence_s`: after which a session's next request begins another episode.
    """

    def __init__(self, thread: SharedEngine, settings: ServeSettings, silence_s: float) -> None:
        self.actions = 0
        self.drops: Counter[str] = Counter()
        self._thread, self._settings, self._silence_s = thread, settings, silence_s
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        self._close_idle()
        return len(self._open)

    def open(self, name: str, *, lasting: bool) -> Session:
        """The session of this name, opened if needed; NoRoomError if all are taken and none is idle.

        A lasting one is closed by its opener, and not because it is idle.
        """
        if name in self._open:
            return self._open[name]
        chosen = self._settings
        if len(self) >= chosen.sessions:
            self.drops[DropReason.TOO_MANY_STREAMS.value] += 1
            raise NoRoomError(f"{chosen.sessions} sessions are open, which is the limit (--robots): try again later")
        period_s = 1 / chosen.max_rate_hz if chosen.max_rate_hz else 0.0
        session = self._open[name] = Session(self._thread, name, period_s, self._silence_s, lasting=lasting)
        self._thread.call(lambda engine: engine.open(name, budget_s=chosen.budget_s))
        return session

    def close(self, session: Session) -> None:
        if self._open.pop(session.name, None) is not None:
            self._thread.close(session.name)

    def count(self, outcome: Outcome) -> None:
        if isinstance(outcome, Action):
            self.actions += 1
        else:
            self.drops[outcome.reason.value] += 1

    def _close_idle(self) -> None:
        now_s = time.monotonic()
        for session in [*self._open.values()]:
            idle = now_s - session.used_s > self._settings.idle_s and not session.busy
            if idle and not session.lasting:
                self.close(session)
