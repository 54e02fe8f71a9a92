# SPDX-License-Identifier: Apache-2.0
"""Who changes a launched node's state: the launch file once for each start of its process, then the user alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.ros.wiring import Autostart, Step

CONFIGURED = (("unconfigured", "configuring"), ("configuring", "inactive"))
ACTIVATED = (("inactive", "activating"), ("activating", "active"))
CLEANED_UP = (("active", "deactivating"), ("deactivating", "inactive"), ("inactive", "cleaningup"))
UNCONFIGURED = (("cleaningup", "unconfigured"),)


def follow(autostart: Autostart, *changes: tuple[str, str]) -> list[Step]:
    return [step for change in changes if (step := autostart.state_changed(*change)) is not Step.NOTHING]


def test_the_first_configure_is_followed_by_activate_and_one_by_hand_by_nothing() -> None:
    autostart = Autostart()
    assert autostart.process_started() is Step.CONFIGURE
    assert follow(autostart, *CONFIGURED, *ACTIVATED) == [Step.ACTIVATE]
    assert follow(autostart, *CLEANED_UP, *UNCONFIGURED, *CONFIGURED) == []


@pytest.mark.parametrize("goal", ["unconfigured", "errorprocessing"])
def test_a_failure_is_told_once_and_what_the_user_tries_then_is_his_own(goal: str) -> None:
    autostart = Autostart()
    autostart.process_started()
    assert follow(autostart, ("unconfigured", "configuring"), ("configuring", goal)) == [Step.FAILED]
    assert follow(autostart, ("unconfigured", "configuring"), ("configuring", goal)) == []
    assert follow(autostart, *CONFIGURED) == []


def test_a_process_that_starts_again_is_configured_again_unless_it_was_shut_down() -> None:
    autostart = Autostart()
    for _ in range(3):
        assert autostart.process_started() is Step.CONFIGURE
        assert autostart.waiting
        assert follow(autostart, *CONFIGURED, *ACTIVATED) == [Step.ACTIVATE]
        assert not autostart.waiting
        assert autostart.process_ended(-9) is Step.NOTHING
    autostart.process_started()
    assert follow(autostart, *CONFIGURED, *ACTIVATED, ("active", "shuttingdown"), ("shuttingdown", "finalized"))
    assert autostart.process_ended(0) is Step.NOTHING
    assert autostart.process_started() is Step.NOTHING
    assert not autostart.waiting and follow(autostart, *CONFIGURED) == []


@pytest.mark.parametrize(("code", "step"), [(2, Step.FAILED), (-11, Step.FAILED), (0, Step.NOTHING)])
def test_a_process_that_ends_before_it_is_configured_has_failed(code: int, step: Step) -> None:
    autostart = Autostart()
    autostart.process_started()
    assert autostart.process_ended(code) is step
    assert not autostart.waiting


states = st.sampled_from(["unconfigured", "configuring", "inactive", "activating", "active", "finalized"])


@given(events=st.lists(st.one_of(st.just("start"), st.integers(-9, 2), st.tuples(states, states)), max_size=30))
def test_no_start_of_a_process_is_activated_twice(events: list) -> None:
    autostart, starts, activated = Autostart(), 0, 0
    for event in events:
        if event == "start":
            starts += autostart.process_started() is Step.CONFIGURE
        elif isinstance(event, int):
            autostart.process_ended(event)
        else:
            activated += autostart.state_changed(*event) is Step.ACTIVATE
    assert activated <= starts
