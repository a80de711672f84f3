"""What torch is told before it makes a communicator.

Its own answers to errors would end processes of ours.
"""

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.distributed import DebugLevel, distributed_c10d

from slipstream.runtime.protocol.store import host_store
from slipstream.runtime.replay.torch_groups import (
    BLOCKING_VARIABLE,
    NCCL_ENVIRONMENT,
    create_nccl_group,
)


@pytest.fixture
def seen(monkeypatch):
    """What torch would read when groups were made."""
    found = []

    class ProcessGroupNCCL:
        Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))

        def __init__(self, store, rank, size, options):
            found.append((dict(os.environ), distributed.get_debug_level(), options))

    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield found
    distributed.set_debug_level_from_env()


@pytest.mark.parametrize("level", DebugLevel.__members__.values(), ids=str)
def test_whatever_the_user_has_set_torch_ends_no_process(level, seen):
    # At the level of DETAIL, torch debugs what is out of step, and for that turns its handling of
    # errors on.
    os.environ.update(dict.fromkeys(NCCL_ENVIRONMENT, "1"))
    distributed.set_debug_level(level)
    store, _ = host_store()
    create_nccl_group(store, "some/", 0, 1, timedelta(seconds=7), False)
    ((environment, debugs, options),) = seen
    assert NCCL_ENVIRONMENT.items() <= environment.items()
    assert debugs == (DebugLevel.INFO if level == DebugLevel.DETAIL else level)
    assert (
        environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "30.0" and options.config.blocking is True
    )


@pytest.mark.parametrize("directed", [False, True])
def test_who_is_one_of_two_takes_few_channels(directed, seen, monkeypatch):
    """Each channel takes memory of the device."""
    monkeypatch.setitem(os.environ, BLOCKING_VARIABLE, "0")
    store, _ = host_store()
    create_nccl_group(store, "some/", 0, 2, timedelta(seconds=7), directed)
    ((_, _, options),) = seen
    assert options.config.blocking is False and hasattr(options.config, "max_ctas") is directed


def test_torch_knows_each_of_these_variables():
    header = (
        Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    )
    names = header.read_text()
    assert [name for name in NCCL_ENVIRONMENT if f'"{name}"' not in names] == []
