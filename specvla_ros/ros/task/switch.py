# SPDX-License-Identifier: Apache-2.0
"""A SetBool service of another node, kept at a wanted value."""

import time
from functools import partial

from rclpy.client import Client
from rclpy.node import Node
from rclpy.task import Future
from std_srvs.srv import SetBool

_LOST_S = 0.5  # an answer that has not come by then was lost, with its server or before both had found each other


class Switch:
    """Calls the service until it has taken the value, also one that comes later or has started again.

    Args:
        node: the node that calls.
        service: the service's name.
    """

    def __init__(self, node: Node, service: str) -> None:
        self._client: Client = node.create_client(SetBool, service)
        self.name = node.resolve_service_name(service)
        self._wanted = True
        self._wish = 0  # how many values were wanted so far
        self._asked: Future | None = None
        self._asked_s = 0.0
        self.settled = False
        self.called = False  # once at least: somebody is there, or was, and may have taken it without being heard

    @property
    def present(self) -> bool:
        """Whether somebody offers the service."""
        return bool(self._client.service_is_ready())

    def want(self, value: bool) -> None:
        """Asks for a value at once; `settled` says when it has been taken."""
        self._wanted, self.settled, self._asked = value, False, None
        self._wish += 1
        self.keep()

    def observe(self, value: bool) -> None:
        """Takes what the other node says its value is."""
        if self.settled and value is not self._wanted:  # it started again
            self.want(self._wanted)

    def keep(self) -> None:
        """Asks again where no answer came; to be called often."""
        lost = self._asked is not None and time.monotonic() - self._asked_s > _LOST_S
        if self.settled or (self._asked is not None and not lost) or not self.present:
            return
        self.called = True
        self._asked, self._asked_s = self._client.call_async(SetBool.Request(data=self._wanted)), time.monotonic()
        self._asked.add_done_callback(partial(self._on_answer, self._wish))

    def _on_answer(self, wish: int, answered: Future) -> None:
        if wish != self._wish:  # of a value that is wanted no more
            return
        answer = answered.result()  # also one that came after it was asked again
        self.settled, self._asked = bool(answer is not None and answer.success), None
