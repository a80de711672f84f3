"""One rank of NeMo Automodel's pipelines.

Its own function builds the schedule from our order, as `pp_schedule_csv`.

    python -m tests.interop.nemo_ranks RANK FOLDER

FOLDER holds linear.csv for 3 ranks of one stage, and v.csv for 2 ranks of two. Exits 0 when all
gradients agree with those of one process.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.pipelining.functional import build_pipeline_schedule
from torch import nn

from tests.interop.ranks import BATCH, MICROBATCHES, check_step, stages


def run(path: Path, mine: list[int], count: int, group: dist.ProcessGroup) -> None:
    pipeline_stages = stages(mine, count, group)
    schedule = build_pipeline_schedule(
        str(path),
        None,
        BATCH,
        MICROBATCHES * BATCH,
        pipeline_stages,
        nn.functional.mse_loss,
        scale_grads=True,
    )
    check_step(schedule, pipeline_stages, mine, count)


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=3
    )
    two = dist.new_group([0, 1])
    run(folder / "linear.csv", [rank], 3, dist.group.WORLD)
    if rank < 2:
        run(folder / "v.csv", [rank, 3 - rank], 4, two)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
