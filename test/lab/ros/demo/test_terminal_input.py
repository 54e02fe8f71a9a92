# SPDX-License-Identifier: Apache-2.0
"""What is typed while a view redraws the terminal."""

import os
import pty
import termios

import pytest

from specvla_ros.lab.ros.demo.operator import CLEAR_KEY, STOP_KEY, TypedLine


@pytest.fixture
def terminal(monkeypatch):
    master, slave = pty.openpty()
    monkeypatch.setattr("sys.stdin", os.fdopen(slave, "r"))
    yield master, slave
    os.close(master)


def test_keys_become_lines(terminal):
    master, slave = terminal
    before = termios.tcgetattr(slave)
    with TypedLine() as typed:
        assert typed.usable and typed.poll() is None
        os.write(master, b"lift the rex\x7fd cube")
        assert typed.poll() is None and typed.text == "lift the red cube"
        os.write(master, b"\nput")
        assert typed.poll() == "lift the red cube" and typed.text == "put"
        os.write(master, b"\x15  \n")
        assert typed.poll() is None and typed.text == ""
    assert termios.tcgetattr(slave) == before


def test_keys_that_stop_the_arm_are_no_text_and_none_gets_lost(terminal):
    master, _ = terminal
    with TypedLine() as typed:
        os.write(master, b"lift\x1b the\x12 red cube\n\x1b")  # also those that come with, or after, an Enter
        assert typed.poll() == "lift the red cube" and typed.text == ""
        assert typed.take_pressed() == STOP_KEY + CLEAR_KEY + STOP_KEY
        assert typed.take_pressed() == ""


def test_terminal_is_given_back_after_an_error(terminal):
    _, slave = terminal
    before = termios.tcgetattr(slave)
    with pytest.raises(KeyboardInterrupt), TypedLine():
        assert termios.tcgetattr(slave) != before
        raise KeyboardInterrupt
    assert termios.tcgetattr(slave) == before


def test_without_a_terminal_nothing_is_typed(monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"lift the red cube\n")
    with os.fdopen(reading, "r") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        with TypedLine() as typed:
            assert not typed.usable and typed.poll() is None
    os.close(writing)
