"""One rank of AMD Primus' pipeline runner, with its own handlers and Megatron Core's steps, on a CPU.

    python -m tests.interop.primus_ranks RANK FOLDER

FOLDER holds table.json and plan.json. Primus takes CUDA and Megatron-LM's arguments for granted: both are played. It
takes one rank for the last stage: here each is told whether it has it. Its launcher's own code (process groups of
Megatron-LM, its models, data and gradient sums) does not run. Exits 0 when gradients, summed over a stage's ranks, are
those of one process.
"""

import json
import re
import sys
import types
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from slipstream.schedules import codec

ROOT = Path(__file__).parents[2]
WIDTH, ROWS = 8, 2


def play() -> None:
    training, names = types.ModuleType("megatron.training"), types.ModuleType("megatron.training.global_vars")
    arguments = types.SimpleNamespace(overlap_moe_expert_parallel_comm=False, dump_pp_data=False,
                                      communication_method="batch_p2p")
    training.get_args = names.get_args = lambda: arguments
    sys.modules |= {training.__name__: training, names.__name__: names}
    torch.cuda.Stream = torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: "cpu"
    make = torch.tensor
    torch.tensor = lambda *given, **how: make(*given, **{key: value for key, value in how.items() if key != "device"})


class Product(torch.autograd.Function):
    """A linear layer, whose weight's gradient is computed when the table has its W, as Primus' own layers do."""

    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(value, weight)
        return value @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        from primus.core.pipeline_parallel.handler.wgrad_handler import WGRAD_RUNNING_CACHE

        value, weight = ctx.saved_tensors

        def add():
            weight.grad = gradient.T @ value + (0 if weight.grad is None else weight.grad)

        WGRAD_RUNNING_CACHE.append(add)
        return gradient @ weight, None


class Stage(nn.Module):
    def __init__(self, index, config):
        super().__init__()
        torch.manual_seed(index)
        self.weight, self.config = nn.Parameter(torch.randn(WIDTH, WIDTH).double() / 3), config

    def set_input_tensor(self, given):
        self.given = given[0]

    def forward(self, value):
        return Product.apply(value if self.given is None else self.given, self.weight).tanh()


def samples(count):
    torch.manual_seed(-1)
    return torch.randn(2, count, ROWS, WIDTH, dtype=torch.float64).unbind(1)


def expected(stages, count):
    modules = [Stage(index, None) for index in range(stages)]
    for value, target in samples(count):
        for module in modules:
            value = torch.tanh(value @ module.weight.T)
        ((value - target).square().mean() / count).backward()
    return [module.weight.grad for module in modules]


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    import megatron.core.model_parallel_config as megatron

    play()
    from megatron.core.enums import ModelType
    from primus.backends.megatron.core.pipeline_parallel.primuspipe.handlers import megatron_primuspipe_handler_dict
    from primus.core.pipeline_parallel.handler.wgrad_handler import WGradRunningCache
    from primus.core.pipeline_parallel.scheduler.scheduler import ScheduleRunner
    from primus.core.pipeline_parallel.scheduler.scheduler_node import FuncType

    schedule, content = codec.read(folder / "plan.json"), json.loads((folder / "table.json").read_text())
    ranks, count = content["pp_size"], content["micro_batches"]
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=ranks)
    shown = re.search(r"```python\n(.*?class Planned.*?)```", (ROOT / "docs" / "neighbours.md").read_text(), re.DOTALL)
    names = {"Path": Path}
    exec(shown[1].replace('Path("table.json")', f"Path({str(folder / 'table.json')!r})"), names)
    table = names["planned"].generate_schedule_table()
    columns = [stage.column for stage in schedule.grid.stages]
    mine = [stage for stage, column in enumerate(columns) if column == rank % schedule.grid.columns]
    config = megatron.ModelParallelConfig(pipeline_dtype=torch.float64, deallocate_pipeline_outputs=False)
    config.calculate_per_token_loss, config.num_moe_experts, config.mtp_num_layers = False, None, None
    models, data, losses = [Stage(stage, config) for stage in mine], samples(count), []
    forwards = [node for node in table[rank] if node.func_type == FuncType.F]
    here = [iter([data[node.mini_batch] for node in forwards if node.chunk == chunk]) for chunk in range(len(mine))]

    def forward_step(iterator, model):
        value, target = next(iterator)
        return model(value), partial(lambda output, target: ((output - target).square().mean(), {}), target=target)

    shapes, total = [(ROWS, WIDTH)], torch.zeros([], dtype=torch.int)
    for node in table[rank]:
        node.meta = {"pp_rank": rank, "vpp_size": content["vpp_size"],
                     "last_pp_stage_rank": rank if len(columns) - 1 in mine else -1}
        node.args.update(
            config=config, forward_step_func=forward_step, data_iterator=here, models=models, num_microbatches=count,
            forward_data_store=losses, cp_group_size=1, collect_non_loss_data=False, is_last_stage=len(columns) - 1 in
            mine, total_num_tokens=total, recv_tensor_shapes=shapes, send_tensor_shapes=shapes, dtype=torch.float64,
            model_type=ModelType.encoder_or_decoder, pp_group=dist.group.WORLD)
    ScheduleRunner(megatron_primuspipe_handler_dict).run(table, rank)
    assert WGradRunningCache.is_empty()
    wanted = expected(len(columns), count)
    for stage in range(len(columns)):
        model = models[mine.index(stage)] if stage in mine else None
        found = torch.zeros(WIDTH, WIDTH, dtype=torch.float64) if model is None or model.weight.grad is None \
            else model.weight.grad
        dist.all_reduce(found)
        torch.testing.assert_close(found, wanted[stage], rtol=0, atol=1e-12)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
