"""The orders that PyTorch's own schedules make, as CSV: what `plan --from torch-csv` is to read.

    python -m tests.interop.torch_orders FOLDER

writes CLASS-RANKS-STAGES-MICROBATCHES-FORMAT.csv for each class and some sizes, with and without communication. It
takes one process: torch's backend "fake" stands for the other ranks, which say nothing while a schedule is made.
"""

import csv
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

SIZES = {Schedule1F1B: [(2, 1, 4), (4, 1, 8)],
         ScheduleInterleaved1F1B: [(2, 1, 4), (2, 2, 4), (4, 2, 8), (2, 3, 6)],
         ScheduleInterleavedZeroBubble: [(2, 2, 4), (4, 2, 8)],
         ScheduleZBVZeroBubble: [(2, 2, 4), (4, 2, 8)],
         ScheduleDualPipeV: [(2, 2, 4), (4, 2, 8)]}
"""Ranks, stages a rank and micro-batches."""


def main() -> None:
    folder = Path(sys.argv[1])
    for kind, sizes in SIZES.items():
        for ranks, chunks, microbatches in sizes:
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            held = [PipelineStage(nn.Linear(1, 1), index, ranks * chunks, torch.device("cpu"))
                    for index in range(0, ranks * chunks, ranks)]
            name = f"{kind.__name__}-{ranks}-{chunks}-{microbatches}"
            if kind is Schedule1F1B:  # it has an order, and no method that dumps it
                order = kind(held[0], microbatches)._get_pipeline_order()
                with (folder / f"{name}-comms.csv").open("w", newline="") as file:
                    csv.writer(file).writerows(order.values())
            else:
                schedule = kind(held, microbatches)
                schedule._dump_csv(folder / f"{name}-compute.csv", format="compute_only")
                schedule._dump_csv(folder / f"{name}-comms.csv", format="compute_comms")
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
