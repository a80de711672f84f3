"""Choose the kind of device that a run computes on, and how its processes communicate."""

from typing import TYPE_CHECKING, Literal

import torch

from slipstream.runtime.errors import ConfigError
from slipstream.runtime.replay.transport import TransportName

if TYPE_CHECKING:
    from slipstream.runtime.config import DeviceName


def choose_device(wanted: "DeviceName") -> Literal["cpu", "cuda"]:
    """Return the kind of device that `wanted`, the job file's `device`, selects here.

    Raises ConfigError if `wanted` is "cuda" and torch finds no GPU.
    """
    has_cards = torch.cuda.is_available()
    if wanted == "cuda" and not has_cards:
        raise ConfigError("training.device is 'cuda', but torch finds no GPU here")
    return "cuda" if has_cards and wanted != "cpu" else "cpu"


def gpu_count(device: Literal["cpu", "cuda"]) -> int:
    """Return how many GPUs a run may use here: all for "cuda", else 0."""
    return torch.cuda.device_count() if device == "cuda" else 0


def gpu_name() -> str:
    """Return the driver's name for the current GPU. Raises torch's error without a GPU."""
    return torch.cuda.get_device_name()


def choose_transport(
    wanted: str, device: str, processes: int, cards: int, *, shared: bool
) -> TransportName:
    """Return the transport of a run: "nccl" if `device` allows it, else "gloo".

    A machine has `processes` worker processes and `cards` GPUs; NCCL needs a GPU for each process,
    unless GPUs are `shared`. The configured backend `wanted` prevails unless it is "auto". Raises
    ConfigError if `wanted` is "nccl", and NCCL cannot be used.
    """
    # By itself, NCCL refuses two processes on one GPU.
    able = device == "cuda" and cards > 0 and (processes <= cards or shared)
    if wanted == "nccl" and not able:
        needs = "training.backend is 'nccl', which needs a GPU for each worker process"
        if device != "cuda":
            raise ConfigError(
                f"{needs}; this run is on {device!r}; expected training.device = 'cuda', or "
                "training.backend = 'gloo'"
            )
        raise ConfigError(
            f"{needs}; this machine has {cards} for {processes} processes"
            + ("; training.share_devices = true lets them share" if cards else "")
        )
    return "nccl" if able and wanted != "gloo" else "gloo"
