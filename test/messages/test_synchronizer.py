# SPDX-License-Identifier: Apache-2.0
"""What several sensors saw at one moment: every sample of the leading one ends once, with the nearest of the others."""

from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.messages.synchronizer import Matched, Synchronizer, Unmatched

MS = 1_000_000
TOLERANCE_S = 0.05
ARRIVALS = st.lists(st.tuples(st.sampled_from(("lead", "wrist", "state")), st.integers(0, 400)), max_size=40)


def play(arrivals: list[tuple[str, int]]) -> tuple[list[tuple[int, Matched | Unmatched]], Synchronizer]:
    """Samples are (name, stamp in ms); what ended, each with the number of the arrival that ended it."""
    made = Synchronizer("lead", ("wrist", "state"), TOLERANCE_S)
    ended = [
        (number, each)
        for number, (name, stamp) in enumerate(arrivals)
        for each in made.add(name, stamp * MS, (number, stamp))
    ]
    return ended, made


@given(ARRIVALS)
def test_every_leading_sample_ends_once_and_in_order(arrivals: list[tuple[str, int]]) -> None:
    ended, made = play(arrivals)
    leads = [number for number, (name, _) in enumerate(arrivals) if name == "lead"]
    last = [each.lead[0] for each in made.give_up()]
    assert [each.lead[0] for _, each in ended] + last == leads


@given(ARRIVALS)
def test_a_match_is_made_of_the_nearest_that_have_come_and_as_soon_as_it_can(arrivals: list[tuple[str, int]]) -> None:
    ended, _ = play(arrivals)
    for when, each in ended:
        number, stamp = each.lead
        come = {
            name: [(i, s) for i, (other, s) in enumerate(arrivals[: when + 1]) if other == name]
            for name in ("wrist", "state")
        }
        near = {name: [s for _, s in found if abs(s - stamp) <= 50] for name, found in come.items()}
        if isinstance(each, Matched):
            for name, (_, found) in each.others.items():
                assert abs(found - stamp) == min(abs(s - stamp) for s in near[name])
            before = arrivals[:when]
            complete = all(any(o == name and abs(s - stamp) <= 50 for o, s in before) for name in near)
            assert number == when or not complete, "it could have been made earlier"
        else:
            earlier = {name: [s for i, s in come[name] if i < when] for name in come}
            assert any(not [s for s in found if abs(s - stamp) <= 50] for found in earlier.values())


def test_what_was_missing_is_said() -> None:
    made = Synchronizer("lead", ("wrist",), TOLERANCE_S)
    assert made.add("lead", 0, "first") == []
    (lost,) = made.add("lead", 100 * MS, "second")
    assert lost == Unmatched("first", "no 'wrist' sample was received")
    made.add("wrist", 400 * MS, "w")
    (lost,) = made.give_up()
    assert lost == Unmatched("second", "no 'wrist' sample within 0.05 s, the nearest is 0.300 s away")


def test_a_single_sensor_waits_for_nobody() -> None:
    made = Synchronizer("image", (), TOLERANCE_S)
    assert made.add("image", 5, "frame") == [Matched("frame", {})] and made.give_up() == []


def test_after_starting_over_the_same_stamps_are_other_samples() -> None:
    made = Synchronizer("lead", ("wrist",), TOLERANCE_S)
    made.add("wrist", 0, "old")
    assert made.add("lead", 0, "first") == [Matched("first", {"wrist": "old"})]
    made.add("lead", 400 * MS, "second")
    assert [each.lead for each in made.start_over()] == ["second"]
    assert made.add("lead", 0, "third") == []
    assert made.add("wrist", 0, "new") == [Matched("third", {"wrist": "new"})]
