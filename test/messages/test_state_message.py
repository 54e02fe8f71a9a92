# SPDX-License-Identifier: Apache-2.0
"""The state is read by names, in whatever order or parts it comes."""

from types import SimpleNamespace
from typing import Any

import pytest

from specvla_ros.control.joint_parts import JointParts
from specvla_ros.errors import UserError
from specvla_ros.messages.state_message import StateReader
from specvla_ros.messages.synchronizer import Matched, Synchronizer

MS = 1_000_000


def joints(names: str, *values: float) -> Any:
    return SimpleNamespace(name=names.split(), position=list(values))


def test_another_order_is_the_same_state() -> None:
    reader = StateReader(("a", "b", "c"), 3)
    for names, values in (("a b c", (1, 2, 3)), ("c b a", (3, 2, 1)), ("b x c a", (2, float("nan"), 3, 1))):
        state = reader.read(joints(names, *values), MS)
        assert state is not None and state.tolist() == [1, 2, 3]


def test_the_first_message_gives_the_order_where_nobody_does(caplog: pytest.LogCaptureFixture) -> None:
    reader = StateReader((), 2)
    first, later = reader.read(joints("a b", 1, 2), MS), reader.read(joints("b a", 4, 3), 2 * MS)
    assert first is not None and first.tolist() == [1, 2] and later is not None and later.tolist() == [3, 4]
    assert caplog.text.count("in the first message's order, a, b: set state_names") == 1


def test_parts_of_several_publishers_are_put_together_within_the_tolerance() -> None:
    reader = StateReader(("a", "b", "grip"), 3, 0.05)
    assert reader.read(joints("a b", 1, 2), MS) is None
    assert reader.lacking == "no message has 'grip'; they have a, b: see state_names"
    state = reader.read(joints("grip", 3), 40 * MS)
    assert state is not None and state.tolist() == [1, 2, 3] and not reader.lacking
    state = reader.read(joints("b a", 5, 4), 60 * MS)
    assert state is not None and state.tolist() == [4, 5, 3]
    assert reader.read(joints("a b", 6, 7), 100 * MS) is None, "the gripper's is too old"
    assert reader.read(joints("wheel", 1), 101 * MS) is None


def test_parts_from_before_a_clock_jump_complete_no_state_after_it() -> None:
    reader = StateReader((), 0)
    assert reader.read(joints("a grip", 1, 2), MS) is not None
    reader.start_over()
    assert reader.read(joints("a", 3), MS) is None and "no message has 'grip'" in reader.lacking
    state = reader.read(joints("grip", 4), MS)
    assert state is not None and state.tolist() == [3, 4]


def test_parts_of_one_moment_belong_to_the_image_of_that_moment() -> None:
    reader, together = StateReader(("a", "grip"), 2, 0.05), Synchronizer("image", ["state"], 0.05)
    for at in range(20, 220, 20):
        for part in (joints("a", at), joints("grip", at)):
            state = reader.read(part, at * MS)
            if state is not None:
                together.add("state", reader.stamp_ns, state)
    for at in (40, 100, 160):
        (matched,) = together.add("image", at * MS, "pixels")
        assert isinstance(matched, Matched) and matched.others["state"].tolist() == [at, at]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (joints("a b c", 1, 2), "it has 3 names and 2 positions"),
        (joints("a a", 1, 2), "it has a duplicate name: a"),
        (joints("a b", 1, float("inf")), "a value that is not finite"),
        (joints("", 1, 2), "it has 0 names and 2 positions"),
    ],
)
def test_what_is_no_state_is_refused(message: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        StateReader(("a", "b"), 2).read(message, MS)


def test_what_was_wrong_with_a_message_is_told_until_a_right_one_comes() -> None:
    parts = JointParts(("a", "b"))
    with pytest.raises(UserError, match="not finite"):
        parts.add(["a", "b"], [1.0, float("nan")], MS)
    assert "not finite" in parts.lacking
    with pytest.raises(UserError, match=r"header\.stamp is 0: its publisher must fill in the time"):
        parts.add(["a"], [1.0], 0)
    assert parts.add(["a", "b"], [1.0, 2.0], MS)
    assert not parts.lacking


def test_a_joint_that_is_no_longer_in_the_messages_is_told_beside_those_that_are() -> None:
    parts = JointParts(("a", "b"))
    assert parts.add(["a", "b"], [1.0, 2.0], MS)
    parts.take()
    assert not parts.add(["left_a", "b"], [1.0, 2.0], 2 * MS)
    assert parts.lacking == "no new message has 'a'; they have left_a, b"


def test_numbers_without_names_are_taken_where_none_are_asked_for() -> None:
    state = StateReader((), 2).read(joints("", 1, 2), 0)
    assert state is not None and state.tolist() == [1, 2]
    with pytest.raises(UserError, match="it has 3 values, but the policy reads 2; set state_names"):
        StateReader((), 2).read(joints("a b c", 1, 2, 3), 0)
    with pytest.raises(UserError, match="state_names has 1 names, but the policy reads 2 values"):
        StateReader(("a",), 2)
