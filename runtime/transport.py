"""Transport of tensors between workers: gloo, over host memory, or NCCL, between GPUs."""

import os
import socket
from typing import Literal

from slipstream.runtime.config_errors import ConfigError

Transport = Literal["gloo", "nccl"]


def choose_transport(wanted: str, device: str, processes: int, cards: int, *, shared: bool) -> Transport:
    """Return "nccl" if the `device` is "cuda", and either each of a machine's `processes` can have one of its `cards`
    GPUs for itself, or processes may share GPUs (`shared`); else "gloo".

    The configured backend `wanted`, if not "auto", prevails. Raises ConfigError if it is "nccl" and that cannot work:
    by itself, NCCL refuses two processes on one GPU.
    """
    able = device == "cuda" and cards > 0 and (processes <= cards or shared)
    if wanted == "nccl" and not able:
        needs = "training.backend is 'nccl', which needs a GPU for each worker process"
        if device != "cuda":
            raise ConfigError(f"{needs}; this run is on {device!r}; expected training.device = 'cuda', or "
                              "training.backend = 'gloo'")
        raise ConfigError(f"{needs}; this machine has {cards} for {processes} processes"
                          + ("; training.share_devices = true lets them share" if cards else ""))
    return "nccl" if able and wanted != "gloo" else "gloo"


def set_own_nccl_host(process: str) -> None:
    """Make NCCL treat this process as the only one on its host, so that it may share a GPU with others.

    The name `process` must be unique on this machine. NCCL refuses two ranks with the same host and GPU, and takes the
    host's name from NCCL_HOSTID (NCCL's init.cc and utils.cc). Must be called before the first communicator is created.
    """
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()} {process}"
