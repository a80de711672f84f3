"""What a process holds that stands for two ranks, measured: not more than plans know."""

import gc

import pytest
import torch

from slipstream.planner.degraded import degradable, with_degraded
from slipstream.planner.job.file import parse_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.model.layers.layered_model import model_for, parameter_dtype
from slipstream.runtime.model.layers.sharing import sharing_of
from slipstream.runtime.model.layers.worker_group import standing_in
from slipstream.runtime.model.ranks.rank_holding import RankHolding
from slipstream.runtime.model.ranks.rank_parts import RankParts
from slipstream.runtime.model.state.holding import Holding, build_holding, built
from slipstream.runtime.model.state.part_state import elements_of
from slipstream.runtime.model.state.parts import cut
from slipstream.runtime.torch_private import LivingStorages, TensorWatch
from slipstream.schedules.schedule import Worker

LAYERS, HOLDERS = 3, 3
MEMBERS = [Worker(pipeline, 0) for pipeline in range(HOLDERS)]
GPT = {"blocks": 1, "width": 64, "heads": 4, "context": 16}


class Ranks:
    """The holdings of a worker's second half: of one of its ranks, or of the process that stands for both of them."""

    def __init__(self, training, stands_for):
        self.config = parse_run_config(GPT, {"device": "cpu", "tensor_parallel": 4, "learning_rate": 0.1, **training})
        self.living, self.most = LivingStorages([]), 0
        with TensorWatch(self.living):
            self.holding = self.build(stands_for)
            for iteration in range(2):
                self.step(iteration)
            gc.collect()
            self.always = self.living.bytes()

    def build(self, stands_for):
        training = self.config.training
        ranks = [self.built(rank, 4, 1, RankParts if stands_for == 2 else Holding) for rank in range(2, 2 + stands_for)]
        for rank, one in enumerate(ranks):
            with standing_in(4, 2 + rank):
                total = sum(elements_of(module).cut for module in one.modules.values())
                whole = cut(total, MEMBERS, (), sharded=training.shard_optimizer)
                one.keep(one.modules, {(0, LAYERS): whole}, MEMBERS[0], [], -1)
        if stands_for == 1:
            return ranks[0]
        with standing_in(2, 1, stands_for=2):
            model = self.model()
            both = RankHolding(training, ranks, sharing_of(model))
            both.join({layer: built(model, layer) for layer in range(LAYERS)})
            return both

    def built(self, rank, size, stands_for, kind):
        with standing_in(size, rank, stands_for):
            return build_holding(self.model(), range(LAYERS), self.config.training, kind)

    def model(self):
        return model_for(self.config.model, 0, parameter_dtype(self.config.training), torch.device("cpu"))

    def step(self, iteration):
        """As the executor's A and O do, but that nothing passes between workers."""
        holding = self.holding
        for parameter in holding.parameters().values():
            parameter.grad.fill_(1.0)
        with standing_in(2, 1, stands_for=2 if isinstance(holding, RankHolding) else 1):
            by_rank = holding.summed((0, LAYERS))
            self.watch()
        del by_rank
        holding.step(iteration)
        self.watch()
        for rank in holding.by_rank:
            rank.flat_parameters()
            self.watch()
        for optimizer in holding.part_optimizers:
            optimizer.kept_states()  # has copies stepped in this thread, which is watched
        holding.arrived()
        holding.zero_gradients()

    def watch(self):
        self.most = max(self.most, self.living.bytes())


def state_bytes(rank):
    """Of a rank that keeps parts: as `profile` counts what all holders share."""
    optimizer = rank.holding.optimizer
    kept, stepped = optimizer.state_bytes() + optimizer.undo_bytes(), sum(
        stop - start for spans in optimizer.kept.values() for start, stop in spans)
    return kept * sum(elements_of(module).cut for module in rank.holding.modules.values()) // stepped


@pytest.mark.slow
@pytest.mark.parametrize("training", [
    {"shard_optimizer": True}, {"shard_optimizer": True, "optimizer": "sgd"},
    {"shard_optimizer": True, "dtype": "bf16", "master_weights": True},
    {"shard_optimizer": True, "dtype": "bf16", "master_weights": True, "reduce_dtype": "bf16"},
    {"dtype": "bf16", "master_weights": True}, {}], ids=lambda one: "-".join(one) or "whole")
def test_plans_know_what_a_process_holds_that_stands_for_two_ranks(training):
    """Within 2 %: always, and while it reduces and steps."""
    alone, both = Ranks(training, 1), Ranks(training, 2)
    shared = f"state = {state_bytes(alone)}\n" if training.get("shard_optimizer") else ""
    options = "".join(f"{key} = {str(value).lower() if value is True else repr(value)}\n"
                      for key, value in training.items())
    text = (f"pipelines = {HOLDERS}\nstages = 1\nmicrobatches = 1\n[time]\nforward = 1\nbackward_input = 1\n"
            f"backward_weight = 1\n[memory]\nweights = {alone.always}\n{shared}capacity = %d\n"
            f"[training]\ntensor_parallel = 4\n{options}")
    capacity = 10 * alone.always
    ((_, room),) = with_degraded(parse_job(text % capacity), [MEMBERS[0]]).memory.capacity_of
    taken = 2 * ((capacity + alone.always) / 2 - room)
    assert both.always == pytest.approx(taken, rel=0.02)
    gradients = sum(flat.nbytes for flat in alone.holding.gradients())
    assert both.most - both.always <= 2.04 * gradients, "what is on its way"
    for share, columns in ((0.98, set()), (1.02, {0})):
        assert degradable(parse_job(text % (taken + 2 * share * gradients - alone.always))) == columns
