# SPDX-License-Identifier: Apache-2.0
"""What the demo says of refusals: in words, and by whether the arm was let move."""

import re
from pathlib import Path

import pytest
from diagnostic_msgs.msg import DiagnosticStatus, KeyValue

from specvla_ros.control.action_space import RefusalReason
from specvla_ros.control.guard.cause import Cause
from specvla_ros.lab.ros.demo.record import Motion, in_words
from specvla_ros.ros.driver import node as driver_node


def guard(message: str, **counts: int) -> DiagnosticStatus:
    pairs = [KeyValue(key=f"refused_{kind}", value=str(times)) for kind, times in counts.items()]
    return DiagnosticStatus(name="guard: gate", message=message, values=pairs)


def driver(**counts: int) -> DiagnosticStatus:
    pairs = [KeyValue(key=f"refused: {kind}", value=str(times)) for kind, times in counts.items()]
    return DiagnosticStatus(name="driver: motion", message="following actions", values=pairs)


def test_refusals_are_told_apart_by_whether_motion_had_begun() -> None:
    motion = Motion()
    waiting, moving = "holding: not_enabled: ~/enable is false", "passing"
    motion.hear(guard(waiting, not_enabled=1, policy_silent=0), held=True, count=True)
    motion.hear(driver(not_following=12), held=True, count=True)
    motion.hear(guard(moving, not_enabled=1), held=True, count=True)
    motion.hear(driver(not_following=15), held=True, count=True)  # of the time before
    motion.hear(guard("holding: policy_silent: 1.1 s", not_enabled=1, policy_silent=3), held=True, count=True)
    motion.hear(driver(not_following=19, too_old=1), held=True, count=True)
    motion.hear(guard(waiting, not_enabled=1, policy_silent=3), held=False, count=False)
    motion.hear(guard(waiting, not_enabled=2, policy_silent=3), held=True, count=True)
    assert list(motion.sentences()) == [
        "during the tasks the guard rejected:",
        "  policy silent 3 times: no new action within 1 s, while the driver commands motion",
        "during the tasks the driver rejected:",
        "  not following 4 times: an action arrived while the driver held still, e.g. while the guard blocked motion",
        "  too old once: an action's image was too old: the policy or the machine is slow",
        "between tasks (motion disabled) the guard rejected:",
        "  not enabled 2 times: the dead-man's switch was not held, or the stop button fell silent",
        "between tasks (motion disabled) the driver rejected:",
        "  not following 15 times: an action arrived while the driver held still, e.g. while the guard blocked motion",
    ]
    assert motion.refused == {
        "guard": {"not_enabled": 2, "policy_silent": 3},
        "driver": {"not_following": 19, "too_old": 1},
    }


def test_what_comes_after_the_last_episode_does_not_count() -> None:
    motion = Motion()
    motion.hear(guard("passing"), held=True, count=True)
    motion.hear(guard("holding", driver_silent=1), held=False, count=False)
    assert next(motion.sentences()) == "during the tasks the guard rejected nothing"
    assert motion.refused == {"guard": {}}


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_of_the_guard_has_words(cause: Cause) -> None:
    assert re.fullmatch(r"[^{}]{15,}", in_words("guard", cause.value))


def test_every_kind_of_the_driver_has_words() -> None:
    named = re.findall(r"_refus\w*[(\[]\"(\w+)\"", Path(str(driver_node.__file__)).read_text())
    assert len(named) >= 4
    for kind in (*named, *(reason.value for reason in RefusalReason)):
        assert in_words("driver", kind) != "see the driver's log", kind
