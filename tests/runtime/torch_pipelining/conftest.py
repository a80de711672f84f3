from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from slipstream.runtime.replay.torch_groups import HashStore


@pytest.fixture
def one_process() -> Iterator[None]:
    """Torch's default group, of this process alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
