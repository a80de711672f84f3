"""A process that stands for several ranks has what they have, together."""

import pytest
import torch

from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.model.computing.forms import forms
from slipstream.runtime.model.layers.layered_model import model_for
from slipstream.runtime.model.layers.shards import shards_of, state_of_rank
from slipstream.runtime.model.layers.worker_group import standing_in, worker_group
from slipstream.runtime.model.passed import TensorForm, TupleForm
from slipstream.runtime.model.ranks.degraded import require_degradable
from slipstream.runtime.model.ranks.own_ranks import carried, carriers, cut_dims, joined_state
from slipstream.runtime.model.ranks.rank_holding import RankHolding
from slipstream.runtime.model.ranks.rank_parts import RankParts
from slipstream.runtime.model.state.holding import build_holding, built
from slipstream.runtime.model.state.part_state import elements_of, whole
from slipstream.runtime.model.state.parts import cut
from slipstream.schedules.schedule import Worker

CPU = torch.device("cpu")
GPT = {"blocks": 1, "width": 16, "heads": 4, "context": 16}


def config(**more):
    return parse_run_config(GPT, {"dtype": "float64", "device": "cpu", "tensor_parallel": 4, **more})


SHARDED = config(shard_optimizer=True)


def holding(rank, size, stands_for=1):
    """All layers, after a step by gradients that depend on each parameter's place in the whole."""
    with standing_in(size, rank, stands_for):
        found = build_holding(model_for(config().model, 0, torch.float64, CPU), range(3), config().training)
        for layer, module in found.modules.items():
            for name, parameter in module.named_parameters():
                parameter.grad.copy_(gradient(layer, name, module, parameter.shape, worker_group()))
        found.optimizer.step(0)
        found.optimizer.commit()
        return found


def gradient(layer, name, module, shape, group):
    shard, whole = shards_of(module).get(name), list(shape)
    if shard is None:
        return torch.randn(whole, generator=torch.Generator().manual_seed(layer))
    whole[shard.dim] *= group.size()
    return shard.cut(torch.randn(whole, generator=torch.Generator().manual_seed(layer)), group.rank(), group.size())


def test_it_has_what_its_ranks_have():
    both, ranks = holding(1, 2, stands_for=2), [holding(rank, 4) for rank in (2, 3)]
    for layer, module in both.modules.items():
        state, *theirs = [whole(one.modules[layer], one.optimizer.own_states(layer)) for one in (both, *ranks)]
        shards = shards_of(module)
        for rank, other in enumerate(theirs):
            mine = state_of_rank(state, shards, rank, 2)
            assert mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)
        joined = joined_state(theirs, shards)
        assert all(torch.equal(joined[key], state[key]) for key in state)


def test_what_passes_is_cut_where_ranks_have_parts_of_it():
    part = TupleForm((TensorForm((2, 3), torch.float64), TensorForm((4,), torch.int64)), ("x", "mask"))
    whole = TupleForm((TensorForm((2, 6), torch.float64), TensorForm((4,), torch.int64)), ("x", "mask"))
    value = torch.arange(12.0, dtype=torch.float64).view(2, 6), torch.arange(4)
    found = carried(carriers(value, whole, part, 2), whole, part)
    assert cut_dims(whole, part, 2) == [1, None]
    assert all(torch.equal(mine, given) for mine, given in zip(found, value, strict=True))
    with pytest.raises(ValueError, match=r"\[2, 3\] is no equal part of \[2, 5\]"):
        cut_dims(TensorForm((2, 5), torch.float64), part.tensors[0], 2)


def test_models_whose_layers_do_not_allow_it_are_refused():
    by_torch = {"name": "tests.runtime.parallelized:Parallelized", "blocks": 1, "width": 8, "context": 8}
    one = parse_run_config(by_torch, {"device": "cpu", "tensor_parallel": 2, "degraded_ranks": True})
    with standing_in(2), pytest.raises(ConfigError, match="layer 1 is cut by torch's parallelize_module; expected"):
        model = model_for(one.model, 0, torch.float32, CPU)
        require_degradable(model, one, forms(model, one))
    with pytest.raises(ConfigError, match="tensor_parallel 3; expected an even number of processes"):
        parse_run_config({}, {"tensor_parallel": 3, "degraded_ranks": True})


def parted(rank, size):
    """The holding of a rank, which keeps all parts."""
    with standing_in(size, rank):
        found = build_holding(model_for(config().model, 0, torch.float64, CPU), range(3), SHARDED.training, RankParts)
        total = sum(elements_of(module).cut for module in found.modules.values())
        cuts = {(0, 3): cut(total, [Worker(0, 0), Worker(1, 0)], (), sharded=True)}
        found.keep(found.modules, cuts, Worker(0, 0), [], -1)
        return found


def test_its_ranks_step_their_parts_of_what_it_computes():
    ranks, alone = [parted(rank, 4) for rank in (2, 3)], [holding(rank, 4) for rank in (2, 3)]
    with standing_in(2, 1, stands_for=2):
        model = model_for(config().model, 0, torch.float64, CPU)
        both = RankHolding(SHARDED.training, ranks)
        both.join({layer: built(model, layer) for layer in range(3)})
        for layer, module in both.modules.items():
            for name, parameter in module.named_parameters():
                parameter.grad.copy_(gradient(layer, name, module, parameter.shape, worker_group()))
        by_rank = both.summed((0, 3))
        for (flat,), other in zip(by_rank, alone, strict=True):
            theirs = torch.cat([one.flatten() for one in other.gradients()])
            assert torch.equal(flat[:len(theirs)], theirs)
        for (flat,), rank in zip(by_rank, both.by_rank, strict=True):
            for span, sums in rank.copies((0, 3)).items():
                sums.copy_(flat[slice(*span)])
        both.step(0)
        both.go_back(0)
        both.give_parameters()  # nothing is gathered: what its buddy keeps are copies
        both.arrived()
    for mine, other in zip(both.parameters_by_rank(), alone, strict=True):
        parameters = other.parameters()
        assert mine.keys() == parameters.keys() and all(torch.equal(mine[name], parameters[name]) for name in mine)
    assert both.squares() == pytest.approx(sum(sum(one.optimizer.squares().values()) for one in ranks))
    both.go_back(-1)
    assert all(one.optimizer.whole_after is None for one in ranks)
