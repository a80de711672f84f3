"""Transfer tensors and sums between workers, with errors of one line that say what failed."""

import re
import threading
from collections.abc import Collection, Iterator, Sequence
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

TRANSFER_TIMEOUT = timedelta(minutes=10)
"""Timeout of any one transfer, long because a gloo timeout closes all connections."""
_GLOO_PLACE = re.compile(r"\[[^\s\]]*gloo[^\s\]]*:[0-9]+\] ")


class CommunicationError(RuntimeError):
    """Error of one line: communication failed, as one of `peers` is gone or too late."""

    def __init__(self, message: str, peers: Collection[Worker] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class UnreachableError(RuntimeError):
    """Error of connecting to `peers`; if these are empty, this process itself cannot connect."""

    def __init__(self, message: str, peers: Collection[Worker] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


@dataclass(frozen=True, slots=True)
class OutgoingTensor:
    """A tensor that is being sent, and is kept alive until the transfer ends."""

    work: Work | Future[Work]
    """Work of the transfer; a future if the tensor must first get into host memory."""
    payload: Tensor
    target: Worker

    def wait(self) -> None:
        """Wait until the sent tensor may be freed. Raises CommunicationError."""
        with one_line_errors(f"sending to worker {self.target}", (self.target,)):
            # The future ends when the tensor is in host memory and gloo has begun to send it.
            try:
                work = (
                    self.work.result(TRANSFER_TIMEOUT.total_seconds())
                    if isinstance(self.work, Future)
                    else self.work
                )
            except TimeoutError:
                raise RuntimeError(
                    f"not begun within {TRANSFER_TIMEOUT.total_seconds():.0f} s"
                ) from None
            work.wait()


@dataclass(frozen=True, slots=True)
class IncomingTensor:
    """A tensor that is being received."""

    work: Work
    payload: Tensor
    source: Worker
    device: torch.device

    def wait_for_tensor(self) -> Tensor:
        """Wait for the tensor, and return it on the device that computes.

        Over NCCL only the current stream waits, not the host. Raises CommunicationError.
        """
        with one_line_errors(f"receiving from worker {self.source}", (self.source,)):
            self.work.wait()
        return self.payload.to(self.device, non_blocking=True)


class PendingSum:
    """Numbers that are being summed over all processes."""

    def __init__(self, payload: Tensor) -> None:
        self.payload = payload
        self._ended = threading.Event()
        self._failure: str | None = None

    def set_outcome(self, failure: str | None) -> None:
        """End waits for the sums; `failure` says why they failed, None if they are complete."""
        self._failure = failure
        self._ended.set()

    def has_arrived(self) -> bool:
        """Return whether `wait_for_sums` would return at once."""
        return self._ended.is_set()

    def wait_for_sums(self) -> Sequence[float]:
        """Wait up to `TRANSFER_TIMEOUT` for the sums; return them. Raises CommunicationError."""
        with one_line_errors("summing over all workers"):
            if not self._ended.wait(TRANSFER_TIMEOUT.total_seconds()):
                raise RuntimeError(f"no answer within {TRANSFER_TIMEOUT.total_seconds():.0f} s")
            if self._failure is not None:
                raise RuntimeError(self._failure)
        sums: list[float] = self.payload.tolist()
        return sums


@contextmanager
def one_line_errors(what: str, peers: Collection[Worker] = ()) -> Iterator[None]:
    """Turn a RuntimeError within the context into a CommunicationError that names `what`.

    It has the peers of an inner CommunicationError or UnreachableError, else `peers`, for which the
    thread is registered as waiting. Raises AbandonedError if the thread was abandoned meanwhile.
    """
    OPEN_CALLS.enter_call(what, peers)
    try:
        yield
    except RuntimeError as error:
        # An inner call knows better than this one whom it could not reach.
        named = error.peers if isinstance(error, CommunicationError | UnreachableError) else peers
        raise CommunicationError(
            f"{what} failed: {_strip_gloo_place(first_line(error))}", named
        ) from error
    finally:
        OPEN_CALLS.leave_call()


def _strip_gloo_place(message: str) -> str:
    return _GLOO_PLACE.sub("", message).partition(". This is typically")[0]
