"""Streams of NCCL communicators: no two communicators in use at the same time share one.

Torch gives each communicator a stream out of 32, in turn. After many communicators were created and closed, a new one
would get the stream of one that is still used, and its transfers would wait for those of the other one, perhaps
forever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary

import torch

HIGHEST_PRIORITY = -100
"""Priority of the CUDA streams that are drawn. Torch takes the nearest one that exists, which is that of communicators
(`torch_private.create_nccl_group`)."""
MAX_STREAMS = 256
"""Largest number of streams in torch's pool. If it gives out more different ones, it does not give them out in turn."""


class StreamRotation:
    """Chooser of CUDA streams: gives each new communicator a stream of torch's pool that no other communicator uses.

    The function `draw` takes the pool's next stream, and returns its identity.
    """

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw = draw
        self._streams: list[int] = []
        """All streams of the pool, in the order in which they are drawn."""
        self._used: WeakKeyDictionary[object, frozenset[int]] = WeakKeyDictionary()
        """Streams that each live communicator may have."""
        self._lock = threading.Lock()

    @contextmanager
    def reserve_stream(self, communicator: object) -> Iterator[None]:
        """Make torch give the communicator that connects within this context a stream of its own, if one is free."""
        with self._lock:
            before = self._skip_used()
        try:
            yield
        finally:
            with self._lock:
                after = self._draw_next()
                count = len(self._streams)
                # Streams that another thread drew meanwhile count as used by both communicators.
                self._used[communicator] = frozenset(
                    self._streams[(before + 1 + step) % count] for step in range((after - before - 1) % count))

    def _skip_used(self) -> int:
        """Draw streams until the pool's next one is unused; return the index in the pool of the last one that was
        drawn."""
        if not self._streams:
            self._streams.append(self._draw())
            while (stream := self._draw()) != self._streams[0] and len(self._streams) < MAX_STREAMS:
                self._streams.append(stream)
        place, used = self._draw_next(), {stream for streams in self._used.values() for stream in streams}
        for _ in self._streams:
            if self._streams[(place + 1) % len(self._streams)] not in used:
                break
            place = self._draw_next()
        return place

    def _draw_next(self) -> int:
        """Draw the pool's next stream, and return its index in the order of the pool."""
        stream = self._draw()
        return self._streams.index(stream) if stream in self._streams else 0


@cache
def get_stream_rotation(device: torch.device) -> StreamRotation:
    """Return the object that chooses the streams of this process's communicators on a GPU."""
    return StreamRotation(lambda: torch.cuda.Stream(device, HIGHEST_PRIORITY).cuda_stream)  # type: ignore[no-untyped-call]
