"""The norm of gradients that FSDP and tensor parallelism have cut."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.runtime.torch_pipelining import schedule


@pytest.fixture
def four_ranks():
    """Torch's default group, of four ranks of which this process is one.

    The others do nothing.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_each_rank_counts_what_only_it_has(four_ranks):
    """FSDP cuts what tensor parallelism has cut, along the same dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    cut = parallelize_module(nn.Linear(4, 8, bias=False), mesh["parts"], ColwiseParallel())
    weight = fully_shard(cut, mesh=mesh["shards"]).weight
    weight.grad = torch.ones_like(weight)
    assert weight.to_local().numel() == 8
    assert schedule._square(weight, 4) == pytest.approx(8)
