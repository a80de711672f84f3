"""What a rank has of a layer's parameters, and the whole of it."""

import pytest
import torch
from torch import distributed
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

from slipstream.runtime.ranks.shards import Shard, cut_parameters, cut_state, gather_state
from slipstream.runtime.ranks.worker_group import WorkerGroup, simulating_rank, worker_group
from slipstream.runtime.replay.torch_groups import HashStore


def test_blocks_are_cut_each_by_itself():
    rows = torch.arange(12.0).view(12, 1)
    assert Shard(0, blocks=3).cut(rows, 1, 2).flatten().tolist() == [2, 3, 6, 7, 10, 11]
    assert Shard(0).cut(rows, 1, 4).flatten().tolist() == [3, 4, 5]


@pytest.mark.parametrize("shard", [Shard(0), Shard(1), Shard(1, blocks=2), Shard(2, blocks=3)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_whole(shard, ranks):
    whole = torch.randn(8, 16, 24)
    parts = torch.stack([shard.cut(whole, rank, ranks) for rank in range(ranks)])
    assert torch.equal(shard.join(parts), whole)


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_is_trained_after_it_is_cut_if_it_was_before(trained):
    layer = torch.nn.Linear(2, 4).requires_grad_(trained)
    cut_parameters(layer, {"weight": Shard(0)}, WorkerGroup(1, 2))
    assert layer.weight.shape == (2, 2)
    assert layer.weight.requires_grad == layer.bias.requires_grad == trained


def test_state_is_cut_as_the_parameter_is_and_counters_are_not():
    group, whole = WorkerGroup(1, 2), torch.arange(4.0)
    state = {
        "model.a.weight": whole,
        "optimizer.exp_avg.a.weight": 10 * whole,
        "optimizer.step.a.weight": torch.tensor(3.0),
        "model.b": whole,
    }
    cut = cut_state(state, {"a.weight": Shard(0)}, group)
    assert {key: tensor.tolist() for key, tensor in cut.items()} == {
        "model.a.weight": [2, 3],
        "optimizer.exp_avg.a.weight": [20, 30],
        "optimizer.step.a.weight": 3.0,
        "model.b": [0, 1, 2, 3],
    }
    assert cut_state(state, {}, None) == state


def test_all_ranks_gather_in_the_same_order_whatever_that_of_their_states(monkeypatch):
    """An optimizer's slots are as they were made, or as they came from another worker."""
    gathered, group = [], WorkerGroup(0, 2)
    gather = group.all_gather_single
    monkeypatch.setattr(
        group,
        "all_gather_single",
        lambda output, given, opts=None: (
            gathered.append(given.flatten()[0].item()),
            gather(output, given, opts),
        )[1],
    )
    state = {f"optimizer.{slot}.a": torch.full((2,), float(slot)) for slot in (2, 0, 1)}
    for state_ in (state, dict(reversed(state.items()))):
        assert gather_state(state_, {"a": Shard(0)}, group).keys() == state.keys()
    assert gathered[:3] == gathered[3:] and sorted(gathered[:3]) == [0, 1, 2]


def test_a_rank_that_stands_for_all_gives_the_shapes_of_all():
    assert worker_group() is None
    with simulating_rank(4):
        group = worker_group()
        whole = gather_state({"model.a": torch.ones(2, 3)}, {"a": Shard(1)}, group)
        scattered = torch.empty(2)
        distributed.reduce_scatter_single(scattered, torch.arange(8.0), group=group)
    assert (
        whole["model.a"].shape == (2, 12)
        and scattered.tolist() == [0, 1]
        and worker_group() is None
    )


def test_a_thread_stands_for_ranks_also_where_the_program_has_process_groups_of_its_own():
    distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        theirs, mesh = distributed.new_group([0]), init_device_mesh("cpu", (1,))
        for _ in range(2):
            with simulating_rank(2):
                assert init_device_mesh("cpu", (2,)).size() == distributed.get_world_size() == 2
        assert distributed.get_world_size() == 1 and distributed.get_backend() == "gloo"
        for group in (None, theirs, mesh.get_group(), distributed.new_group([0])):
            distributed.all_reduce(torch.ones(1), group=group)
        assert all_reduce(torch.ones(1), "sum", mesh).item() == 1
    finally:
        distributed.destroy_process_group()
