"""Kind of device that a run computes on."""

from functools import cache
from typing import TYPE_CHECKING, Literal

import torch

from slipstream.runtime.config_errors import ConfigError

if TYPE_CHECKING:
    from slipstream.runtime.config import DeviceName


def choose_device(wanted: "DeviceName") -> Literal["cpu", "cuda"]:
    """Return the device that `[training] device` selects on this machine.

    Raises ConfigError if it is "cuda" and torch finds no GPU.
    """
    has_cards = torch.cuda.is_available()
    if wanted == "cuda" and not has_cards:
        raise ConfigError("training.device is 'cuda', but torch finds no GPU here")
    return "cuda" if has_cards and wanted != "cpu" else "cpu"


def gpu_count(device: Literal["cpu", "cuda"]) -> int:
    """Return the number of GPUs of this machine for a run on `device`: 0 for "cpu", all that torch finds for "cuda"."""
    return torch.cuda.device_count() if device == "cuda" else 0


@cache
def get_stream_for(device: torch.device, purpose: str) -> torch.cuda.Stream:  # noqa: ARG001
    """Return this process's CUDA stream on a GPU for one purpose, the same at each call.

    Torch hands out 32 streams in turn. If a component took a new one in each generation, it would eventually get a
    stream in which another component waits.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def gpu_name() -> str:
    """Return the driver's name of the first GPU of this machine."""
    return torch.cuda.get_device_name()
