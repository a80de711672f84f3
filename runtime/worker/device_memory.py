"""What a worker does when its device has no room: an iteration is tried once more, with what was cached given back.

A death would give its peers more to do in as little room, and they would follow. So a second time ends the run, with a
line that says what was held.

Of the host's memory, what a worker has freed goes back to the system when an order has ended. Each order has a thread
of its own, and its process groups have some. glibc gives threads heaps, of which there are many, and keeps in each what
is freed there: without this, a worker takes more and more memory, while it uses no more.
"""

import ctypes
import gc
import sys

import torch

from slipstream.runtime.model.state.holding import Holding
from slipstream.schedules.schedule import Worker

MEBIBYTE = 2**20
_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


class NoRoomError(RuntimeError):
    """An iteration does not fit into the memory of a device."""


class DeviceMemory:
    """Of one process, from order to order."""

    def __init__(self, worker: Worker, device: torch.device) -> None:
        self._worker = worker
        self._device = device
        self._tried: int | None = None

    def ran_out(self, iteration: int, holding: Holding) -> str:
        """An iteration has found no room; why the order ends. Raises NoRoomError where it had been tried again."""
        if self._tried == iteration:
            raise NoRoomError(
                f"worker {self._worker} ran out of memory in iteration {iteration} twice, {self._held(holding)}; "
                "plan with a smaller [memory] capacity, or set training.recompute, a smaller training.batch, or "
                "training.shard_optimizer")
        self._tried = iteration
        return f"out of memory in iteration {iteration}, {self._held(holding)}: tried once more"

    def give_back(self) -> None:
        """Give what is cached, and nobody uses, back to the device."""
        gc.collect()  # what an error has held may lie in circles
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _held(self, holding: Holding) -> str:
        parameters = sum(one.nbytes for one in holding.parameters().values())
        gradients = sum(one.nbytes for one in holding.gradients())
        states = holding.optimizer.state_bytes() + holding.optimizer.undo_bytes()
        text = (f"while it held {_text(parameters)} of parameters, {_text(gradients)} of gradients and "
                f"{_text(states)} of optimizer states with copies to undo a step")
        if self._device.type != "cuda":
            return text
        free, total = torch.cuda.mem_get_info(self._device)
        return (f"{text}; torch has allocated {_text(torch.cuda.memory_allocated(self._device))} in all, and "
                f"{_text(free)} of the device's {_text(total)} are free")


def trim() -> None:
    """Return to the system what nobody uses of the host's. Nothing happens where the C library is not glibc."""
    malloc_trim = getattr(_LIBRARY, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _text(size: int) -> str:
    return f"{size / MEBIBYTE:,.1f} MiB"
