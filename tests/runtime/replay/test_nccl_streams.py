"""Communicators that come and go never have the stream of one that is still used."""

import itertools
import random

import pytest

from slipstream.runtime.replay.nccl import StreamRotation

STREAMS = 32


class Pool:
    """Gives its streams in turn, as torch does, to whoever asks.

    A communicator that connects gets one, too.
    """

    def __init__(self, skipped: int) -> None:
        self._numbers = itertools.count(skipped)

    def draw(self) -> int:
        return 1000 + next(self._numbers) % STREAMS


class Communicator:
    stream = None


@pytest.mark.parametrize("seed", range(20))
def test_no_two_that_live_share_a_stream(seed):
    rng = random.Random(seed)
    pool = Pool(rng.randrange(STREAMS))
    turns, living = StreamRotation(pool.draw), []
    for _ in range(300):
        while living and (len(living) > 20 or rng.random() < 0.4):
            living.remove(rng.choice(living))
        communicator = Communicator()
        with turns.reserve_stream(communicator):
            if rng.random() < 0.8:  # else it fails before it has one
                communicator.stream = pool.draw()
        if communicator.stream is not None:
            living.append(communicator)
        del communicator
        streams = [other.stream for other in living]
        assert len(set(streams)) == len(streams)


def test_two_that_connect_at_the_same_time_both_have_what_was_drawn_meanwhile():
    pool = Pool(0)
    turns, (first, other, third) = StreamRotation(pool.draw), (Communicator() for _ in range(3))
    with turns.reserve_stream(first):
        with turns.reserve_stream(other):
            other.stream = pool.draw()
        first.stream = pool.draw()
    for _ in range(STREAMS - 8):
        with turns.reserve_stream(third):
            third.stream = pool.draw()
        assert third.stream not in {first.stream, other.stream}


def test_where_all_are_used_one_is_shared():
    pool, turns = Pool(0), None
    turns = StreamRotation(pool.draw)
    living = [Communicator() for _ in range(STREAMS + 3)]
    for communicator in living:
        with turns.reserve_stream(communicator):
            communicator.stream = pool.draw()
    numbers = {1000 + number for number in range(STREAMS)}
    assert {communicator.stream for communicator in living[:STREAMS]} == numbers


def test_a_pool_that_gives_no_stream_twice_is_left_alone():
    numbers, communicator = itertools.count(), Communicator()
    turns = StreamRotation(lambda: next(numbers))
    for _ in range(3):
        with turns.reserve_stream(communicator):
            pass
