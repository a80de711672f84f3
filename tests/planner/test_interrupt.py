"""Ctrl-C is noted while a search runs, by all searches of which it is part."""

import signal

import pytest

from slipstream.planner.budget import defer_interrupts


def test_the_first_is_noted_and_the_second_raised():
    with defer_interrupts() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_ends_a_part_ends_the_whole():
    with defer_interrupts() as whole:
        with defer_interrupts():
            pass
        assert not whole.is_set()
        with defer_interrupts() as part:
            signal.raise_signal(signal.SIGINT)
            assert part.is_set()
        assert whole.is_set()
