from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from slipstream.runtime.replay.torch_groups import HashStore
from slipstream.runtime.torch_pipelining import agreement, place, watch
from tests.runtime.torch_pipelining.threads import AllWatches, take_turns


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's default group, of this process alone, in which workers are threads."""
    watches = AllWatches()
    monkeypatch.setattr(place, "Watch", watches.make)
    monkeypatch.setattr(watch, "connect", watches.connect)
    monkeypatch.setattr(agreement, "connect", watches.connect)
    get_state, set_state = take_turns([torch.get_rng_state, torch.set_rng_state])
    monkeypatch.setattr(torch, "get_rng_state", get_state)
    monkeypatch.setattr(torch, "set_rng_state", set_state)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
