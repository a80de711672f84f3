"""The kind of device that a run computes on."""

from functools import cache
from typing import Literal

import torch

from slipstream.runtime.config import ConfigError, DeviceName


def choose_device(wanted: DeviceName) -> Literal["cpu", "cuda"]:
    """What `[training] device` means on this machine. Raises ConfigError when it asks for a GPU and none is here."""
    has_cards = torch.cuda.is_available()
    if wanted == "cuda" and not has_cards:
        raise ConfigError("training.device is 'cuda', but torch finds no GPU here")
    return "cuda" if has_cards and wanted != "cpu" else "cpu"


def gpu_count(device: Literal["cpu", "cuda"]) -> int:
    """The GPUs of this machine that a run on such a device uses."""
    return torch.cuda.device_count() if device == "cuda" else 0


@cache
def own_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:  # noqa: ARG001
    """Return this process's stream of a GPU for one purpose.

    Torch gives 32 of them, in turn: what took another one for each order would sooner or later have one in which
    something else waits.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def gpu_name() -> str:
    """What the driver calls the first GPU of this machine."""
    return torch.cuda.get_device_name()
