"""One rank of PyTorch's own pipeline runtime.

It runs given orders, and compares gradients with one process.

    python -m tests.interop.ranks RANK FOLDER

FOLDER holds linear.csv and linear-comms.csv for 3 ranks of one stage, and v.csv and v-comms.csv for
2 ranks of two. Each rank leaves a profile of the first run there. Exits 0 when all gradients agree.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.profiler import ProfilerActivity, profile

WIDTH = 8
MICROBATCHES = 4
BATCH = 2
"""Samples of a micro-batch."""


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def text() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    rows = MICROBATCHES * BATCH
    return torch.randn(rows, WIDTH, dtype=torch.float64), torch.randn(
        rows, WIDTH, dtype=torch.float64
    )


def expected(count: int) -> list[torch.Tensor]:
    """Gradients of every layer's weight, by one plain backward."""
    model, (value, target) = nn.Sequential(*layers(count)), text()
    nn.functional.mse_loss(model(value), target).backward()
    return [layer[0].weight.grad for layer in model]


def stages(mine: list[int], count: int, group: dist.ProcessGroup) -> list[PipelineStage]:
    model = layers(count)
    return [
        PipelineStage(model[index], index, count, torch.device("cpu"), group=group)
        for index in mine
    ]


def check_step(schedule, pipeline_stages: list[PipelineStage], mine: list[int], count: int) -> None:
    """Run a step by a schedule of torch's. Its gradients are those of one process."""
    value, target = text()
    schedule.step(
        *([value] if 0 in mine else []), **({"target": target} if count - 1 in mine else {})
    )
    for stage in pipeline_stages:
        torch.testing.assert_close(
            stage.submod[0].weight.grad, expected(count)[stage.stage_index], rtol=0, atol=1e-12
        )


def run(path: Path, form: str, mine: list[int], count: int, group: dist.ProcessGroup) -> None:
    pipeline_stages = stages(mine, count, group)
    schedule = _PipelineScheduleRuntime(
        pipeline_stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    schedule._load_csv(str(path), format=form)
    check_step(schedule, pipeline_stages, mine, count)


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=3
    )
    everyone, two = dist.group.WORLD, dist.new_group([0, 1])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run(folder / "linear.csv", "compute_only", [rank], 3, everyone)
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    run(folder / "linear-comms.csv", "compute_comms", [rank], 3, everyone)
    if rank < 2:
        for form, name in (("compute_only", "v"), ("compute_comms", "v-comms")):
            run(folder / f"{name}.csv", form, [rank, 3 - rank], 4, two)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
