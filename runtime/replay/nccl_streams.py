"""Streams of communicators: no two that are used at the same time have the same one.

Torch gives each communicator a stream out of 32, in turn. Where communicators come and go for long, a new one would get
the stream of one that is still used, and what it sends would wait for whatever that one waits for, perhaps for ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary

import torch

HIGHEST_PRIORITY = -100
"""Torch takes the nearest that there is, which is that of communicators (`torch_private.nccl_group`)."""
MOST_STREAMS = 256
"""Of a pool: where more come without a repetition, they do not come in turn."""


class StreamTurns:
    """Skips the streams of a pool that communicators use, and remembers which one each new communicator gets.

    `draw` returns the identity of the pool's next stream.
    """

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw = draw
        self._turns: list[int] = []
        """All streams of the pool, in the order in which they come."""
        self._used: WeakKeyDictionary[object, frozenset[int]] = WeakKeyDictionary()
        """What each communicator that lives may have."""
        self._lock = threading.Lock()

    @contextmanager
    def connecting(self, communicator: object) -> Iterator[None]:
        """Within this block, torch gives a communicator its stream: one that no other has, if there is one."""
        with self._lock:
            before = self._skip_used()
        try:
            yield
        finally:
            with self._lock:
                after = self._draw_next()
                count = len(self._turns)
                # What another thread has drawn meanwhile counts for both.
                self._used[communicator] = frozenset(
                    self._turns[(before + 1 + step) % count] for step in range((after - before - 1) % count))

    def _skip_used(self) -> int:
        """Draw until the next stream is one that nobody uses; return the place of the last one that was drawn."""
        if not self._turns:
            self._turns.append(self._draw())
            while (one := self._draw()) != self._turns[0] and len(self._turns) < MOST_STREAMS:
                self._turns.append(one)
        place, used = self._draw_next(), {one for some in self._used.values() for one in some}
        for _ in self._turns:
            if self._turns[(place + 1) % len(self._turns)] not in used:
                break
            place = self._draw_next()
        return place

    def _draw_next(self) -> int:
        """Draw one; return its place."""
        one = self._draw()
        return self._turns.index(one) if one in self._turns else 0


@cache
def stream_turns(device: torch.device) -> StreamTurns:
    """Return what chooses the streams of this process's communicators on a GPU."""
    return StreamTurns(lambda: torch.cuda.Stream(device, HIGHEST_PRIORITY).cuda_stream)  # type: ignore[no-untyped-call]
