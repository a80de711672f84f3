"""What carries tensors between workers: gloo, over host memory, or NCCL, from card to card."""

import os
import socket
from typing import Literal

from slipstream.runtime.config import ConfigError

Transport = Literal["gloo", "nccl"]


def choose_transport(wanted: str, device: str, workers: int, cards: int, *, shared: bool) -> Transport:
    """Return NCCL where each of a machine's workers computes on a card of its own, or may share one; else gloo.

    Raises ConfigError when NCCL is asked for where it cannot work: by itself, it refuses two workers on one card.
    """
    able = device == "cuda" and cards > 0 and (workers <= cards or shared)
    if wanted == "nccl" and not able:
        raise ConfigError(f"training.backend is 'nccl', which needs a GPU for each worker; here are {cards} for "
                         f"{workers} workers" + ("; training.share_devices = true lets them share"
                                                 if cards and device == "cuda" else ""))
    return "nccl" if able and wanted != "gloo" else "gloo"


def claim_own_host(process: str) -> None:
    """Let NCCL take this process for the only one on its host, so that it may share a card with others.

    NCCL refuses two ranks whose host and card are the same, and takes NCCL_HOSTID for what the host is called (NCCL's
    init.cc and utils.cc). To be called before the first communicator is made.
    """
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()} {process}"
