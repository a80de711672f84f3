"""Tensors and sums on their way between workers, and the one line that says what of it has failed."""

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work

from slipstream.runtime.errors import first_line
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.schedules.schedule import Worker

TIMEOUT = timedelta(minutes=10)
"""Of any one transfer. Long, because a gloo timeout closes all connections; a dead peer is noticed in milliseconds."""
_GLOO_PLACE = re.compile(r"\[[^\s\]]*gloo[^\s\]]*:[0-9]+\] ")


class CommunicationError(RuntimeError):
    """A peer is gone, or did not answer in time. The message is one line."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor being sent; it must live until it has been."""

    work: Work | Future[Work]
    """What carries it; a future where that begins once the tensor is in host memory."""
    payload: Tensor
    target: Worker

    def wait(self) -> None:
        """Wait until the tensor may go. Raises CommunicationError."""
        with told_in_one_line(f"sending to worker {self.target}"):
            work = self.work.result(TIMEOUT.total_seconds()) if isinstance(self.work, Future) else self.work
            work.wait()


@dataclass(frozen=True, slots=True)
class Arriving:
    """A tensor on its way here."""

    work: Work
    payload: Tensor
    source: Worker
    device: torch.device

    def take(self) -> Tensor:
        """Wait for the tensor, on the device that computes. Raises CommunicationError."""
        with told_in_one_line(f"receiving from worker {self.source}"):
            self.work.wait()
        return self.payload.to(self.device, non_blocking=True)


class Summing:
    """Numbers on their way to being summed over all workers."""

    def __init__(self, payload: Tensor) -> None:
        self.payload = payload
        self._over = threading.Event()
        self._failed: str | None = None

    def end(self, failed: str | None) -> None:
        """They have been summed up, or that has failed for a reason."""
        self._failed = failed
        self._over.set()

    def arrived(self) -> bool:
        """Whether `take` returns at once."""
        return self._over.is_set()

    def take(self) -> Sequence[float]:
        """Wait for the sums. Raises CommunicationError."""
        with told_in_one_line("summing over all workers"):
            if not self._over.wait(TIMEOUT.total_seconds()):
                raise RuntimeError(f"no answer within {TIMEOUT.total_seconds():.0f} s")
            if self._failed is not None:
                raise RuntimeError(self._failed)
        sums: list[float] = self.payload.tolist()
        return sums


@contextmanager
def told_in_one_line(what: str) -> Iterator[None]:
    """Turn what a process group raises into one line that says what was going on."""
    OPEN_CALLS.begin(what)
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{what} failed: {_plain(first_line(error))}") from error
    finally:
        OPEN_CALLS.end()


def _plain(told: str) -> str:
    """Without the place in gloo's sources, and the advice."""
    return _GLOO_PLACE.sub("", told).partition(". This is typically")[0]
