"""What docs/neighbours.md says that PyTorch's pipeline runtime refuses.

When this fails, that page is to be changed.
"""

import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.cli.exporters.torch_rows import write_rows
from slipstream.schedules.schedule import Worker
from tests.generate import planned
from tests.jobs import grid

WHOLE = ["0F0,0B0", "1F0,1B0"]
DEAD = ["0F0,0B0", ""]
"""A peer in another replica runs the only micro-batch of stage 1."""
SHED = ["0F0,0F1,0B0,0B1", "1F0,1B0"]
"""It runs the second of two."""


@pytest.fixture
def load(tmp_path):
    """Has rank 0 of two read an order of some micro-batches.

    The other rank says nothing.
    """
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())

    def read(order, microbatches):
        (tmp_path / "order.csv").write_text("\n".join(order) + "\n")
        stage = PipelineStage(nn.Linear(1, 1), 0, 2, torch.device("cpu"))
        schedules._PipelineScheduleRuntime(
            [stage], microbatches, loss_fn=nn.functional.mse_loss
        )._load_csv(str(tmp_path / "order.csv"))

    yield read
    dist.destroy_process_group()


@pytest.mark.parametrize(("order", "microbatches"), [(DEAD, 1), (SHED, 2)])
def test_a_stage_that_runs_some_of_the_microbatches_is_refused(
    load, monkeypatch, order, microbatches
):
    load(WHOLE, 1)
    with pytest.raises(
        AssertionError,
        match=rf"Got {microbatches - 1} .*FORWARD microbatches for stage 1, expected "
        rf"{microbatches}$",
    ) as refused:
        load(order, microbatches)
    assert traceback.extract_tb(refused.tb)[-1].name == "_validate_schedule"
    monkeypatch.setattr(schedules, "_validate_schedule", lambda *_: {0: 0, 1: 1})
    with pytest.raises(AssertionError) as stuck:
        load(order, microbatches)
    assert traceback.extract_tb(stuck.tb)[-1].name == "_add_send_recv"


def test_its_reader_takes_the_cells_of_our_rows_and_its_validation_refuses_them(
    tmp_path, monkeypatch
):
    """A stage is on three ranks, which `_validate_schedule` does not know.

    Of all 9 workers, two are down.
    """
    rows = write_rows(planned(grid(3, 3, [2, 3, 2]), [Worker(0, 1), Worker(2, 2)]))
    (tmp_path / "rows.csv").write_text(rows)
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        stage = PipelineStage(nn.Linear(1, 1), 0, 3, torch.device("cpu"))
        runtime = schedules._PipelineScheduleRuntime([stage], 7, loss_fn=nn.functional.mse_loss)
        with pytest.raises(
            AssertionError, match="incorrect number of ranks - expected 3, actual 9"
        ):
            runtime._load_csv(str(tmp_path / "rows.csv"), format="compute_comms")
        monkeypatch.setattr(schedules, "_validate_schedule", lambda *_: {0: 0, 1: 1, 2: 2})
        runtime._load_csv(str(tmp_path / "rows.csv"), format="compute_comms")
    finally:
        dist.destroy_process_group()
    read = [",".join(map(str, runtime.pipeline_order_with_comms[rank])) for rank in range(9)]
    assert read == rows.splitlines() and read[1] == read[8] == ""
