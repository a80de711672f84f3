"""Handle a device out of memory: run the iteration once more, with cached memory released.

If the worker died instead, its peers would have more to do in as little memory, and would fail as
well. So a second failure ends the run, with a line that says what was held.
"""

import ctypes
import gc
import sys

import torch

from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.schedules.schedule import Worker

MEBIBYTE = 2**20
_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


class NoRoomError(RuntimeError):
    """Error, in one line, for an iteration that does not fit into a device's memory."""


class DeviceMemory:
    """Handler of out-of-memory errors of one process's device, kept from order to order."""

    def __init__(self, worker: Worker, device: torch.device) -> None:
        self._worker = worker
        self._device = device
        self._tried: int | None = None

    def handle_out_of_memory(self, iteration: int, holding: HeldLayers) -> str:
        """Record that an iteration ran out of memory; return the reason why the order ends.

        The reason says how large the layers in `holding` are. Raises NoRoomError if the same
        iteration ran out of memory the last time as well.
        """
        if self._tried == iteration:
            raise NoRoomError(
                f"worker {self._worker} ran out of memory in iteration {iteration} twice, "
                f"{self._describe_held(holding)}; "
                "plan with a smaller [memory] capacity, or set training.recompute, "
                "a smaller training.batch, or training.shard_optimizer"
            )
        self._tried = iteration
        return (
            f"out of memory in iteration {iteration}, {self._describe_held(holding)}: "
            "the iteration is run once more"
        )

    def release_cached_memory(self) -> None:
        """Release device memory that torch caches and does not use."""
        gc.collect()  # objects that an error has referred to may form cycles
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _describe_held(self, holding: HeldLayers) -> str:
        parameters = sum(tensor.nbytes for tensor in holding.parameters_by_name().values())
        gradients = sum(tensor.nbytes for tensor in holding.flat_gradients())
        states = holding.optimizer.state_bytes() + holding.optimizer.undo_bytes()
        text = (
            f"while it held {_format_size(parameters)} of parameters, "
            f"{_format_size(gradients)} of gradients and "
            f"{_format_size(states)} of optimizer states with copies to undo a step"
        )
        if self._device.type != "cuda":
            return text
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        return (
            f"{text}; torch has allocated {_format_size(allocated)} in all, and "
            f"{_format_size(free)} of the device's {_format_size(total)} are free"
        )


def trim_host_memory() -> None:
    """Return unused host memory to the system, if the C library is glibc."""
    # Each order has a thread of its own, and its process groups have several. glibc gives threads
    # their own heaps, of which there are many, and keeps freed memory in each. Without this, the
    # worker's process would grow with every order, while it uses no more memory.
    malloc_trim = getattr(_LIBRARY, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _format_size(size: int) -> str:
    return f"{size / MEBIBYTE:,.1f} MiB"
