"""Transport of tensors between workers: gloo, over host memory, or NCCL, between GPUs."""

import os
import socket
from typing import Literal

TransportName = Literal["gloo", "nccl"]


def set_own_nccl_host(process: str) -> None:
    """Make NCCL treat this process as alone on its machine.

    It may then share a GPU with other processes. The name `process` must be unique on this machine.
    Must be called before the first communicator is created.
    """
    # NCCL refuses two ranks with the same host and GPU, and takes the host's name from this
    # variable (NCCL's init.cc and utils.cc).
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()} {process}"
