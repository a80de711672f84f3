"""What carries tensors in tests of sessions.

It is each kind that this machine has, and the double of NCCL.
"""

from functools import partial

import pytest
import torch

from benchmarks.conformance import GLOO, NCCL, STAGED
from slipstream.runtime.replay import group_cache
from slipstream.runtime.replay.nccl import NcclBackend
from tests.runtime.replay.double import Double

DOUBLE = "double of NCCL"
TRANSPORTS = [GLOO, STAGED, NCCL, DOUBLE]


def require(transport: str, workers: int) -> None:
    """Skip a test where this machine lacks what it needs."""
    cards = torch.cuda.device_count()
    if transport == STAGED and not cards:
        pytest.skip("needs a GPU")
    if transport == NCCL and cards < workers:
        pytest.skip(f"needs {workers} GPUs, as NCCL refuses two workers on one; here are {cards}")


def use(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is the double, sessions of this process use it for NCCL."""
    if transport == DOUBLE:
        monkeypatch.setattr(group_cache, "NcclBackend", partial(NcclBackend, Double))
