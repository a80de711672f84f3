"""One rank of PyTorch's own pipeline runtime that runs rows of all pipelines, around a dead worker.

    python -m tests.interop.rerouted_ranks RANK FOLDER

FOLDER holds the rows of plans, NAME.csv, all with as many workers alive as there are ranks. Exits 0
when all gradients, summed over the holders of each stage, agree with those of one process.

What the runtime lacks is added here by overriding it: the peer of a transfer is found by stage and
micro-batch; a stage runs some of the micro-batches; a tensor stays on a rank only if the row has no
transfer for it; losses are kept by micro-batch.
"""

import csv
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.pipelining.schedules import _ComputationType as Kind

WIDTH, BATCH = 8, 2


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def text(microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    size = (microbatches * BATCH, WIDTH)
    return torch.randn(size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)


def expected(count: int, microbatches: int) -> list[list[Tensor]]:
    """Gradients of every layer, by one plain backward."""
    model, (value, target) = nn.Sequential(*layers(count)), text(microbatches)
    nn.functional.mse_loss(model(value), target).backward()
    return [[parameter.grad for parameter in layer.parameters()] for layer in model]


class Rows:
    """The actions of all rows, and who has which. Ranks are the rows that are not empty, in order."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="") as file:
            rows = [[_Action.from_str(cell) for cell in row] for row in csv.reader(file)]
        self.by_rank = [row for row in rows if row]
        self.rank_of = {action: rank for rank, row in enumerate(self.by_rank) for action in row}
        self.stages = 1 + max(action.stage_index for action in self.rank_of)
        self.microbatches = 1 + max(action.microbatch_index or 0 for action in self.rank_of)

    def peer(self, stage: int, kind: Kind, microbatch: int) -> int:
        return self.rank_of[_Action(stage, kind, microbatch)]

    def holders(self, stage: int) -> list[int]:
        reduced = _Action(stage, Kind.REDUCE_GRAD)
        return [rank for rank, row in enumerate(self.by_rank) if reduced in row]


class ReroutedStage(PipelineStage):
    """A stage whose peers follow from the micro-batch, too."""

    def __init__(self, module: nn.Module, index: int, rows: Rows,
                 alone: dist.ProcessGroup) -> None:
        value = torch.zeros(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
        super().__init__(module, index, rows.stages, torch.device("cpu"), input_args=value,
                         output_args=value, group=alone)
        self.group, self.group_rank, self.group_size = None, dist.get_rank(), dist.get_world_size()
        self.rows, self.peer_rank = rows, -1
        self.arriving: list[dict[tuple[int, int], list[dist.Work]]] = []

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        return self.peer_rank

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.peer_rank = self.rows.peer(self.stage_index - 1, Kind.SEND_F, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.peer_rank = self.rows.peer(self.stage_index + 1, Kind.RECV_F, fwd_chunk_id)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.peer_rank = self.rows.peer(self.stage_index + 1, Kind.SEND_B, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.peer_rank = self.rows.peer(self.stage_index - 1, Kind.RECV_B, bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Leave the gradient where the row sends it to another rank."""
        if _Action(self.stage_index, Kind.SEND_B, mb_index) in self.rows.rank_of:
            return self.bwd_cache[mb_index]
        return super().get_local_bwd_output(mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **how):
        self.wait_for(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **how)

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **how):
        self.wait_for(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **how)

    def wait_for(self, microbatch: int) -> None:
        """Wait for a tensor that the runtime does not await, because this rank has the next stage."""
        for works in self.arriving:
            for work in works.pop((self.stage_index, microbatch), ()):
                work.wait()


class ReroutedSchedule(_PipelineScheduleRuntime):
    """Torch's runtime with the rows of one rank."""

    def __init__(self, stages: list[ReroutedStage], rows: Rows,
                 groups: dict[int, dist.ProcessGroup]) -> None:
        super().__init__(stages, rows.microbatches, loss_fn=nn.functional.mse_loss)
        self.pipeline_order_with_comms = dict(enumerate(rows.by_rank))
        self.groups, self.loss_of = groups, {}
        for stage in stages:
            stage.arriving = [self.fwd_recv_ops, self.bwd_recv_ops]
        self.register_custom_function(Kind.REDUCE_GRAD, self.reduce)

    def _warmup_p2p(self, stages, has_backward, p2p_done) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def _maybe_compute_loss(self, stage, output, target_mbs, mb_index, loss_kwargs=None) -> None:
        if stage.is_last:
            self.loss_of[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage, mb_index):
        return self.loss_of[mb_index] if stage.is_last else None

    def reduce(self, action: _Action, ctx: object) -> None:
        """Sum the gradients of a stage over its holders; those of a stage that ran nothing are 0."""
        stage = next(one for one in self._stages if one.stage_index == action.stage_index)
        for parameter in stage.submod.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= self._n_microbatches
            dist.all_reduce(parameter.grad, group=self.groups[action.stage_index])


def run(path: Path, alone: dist.ProcessGroup) -> None:
    rows = Rows(path)
    groups = {stage: dist.new_group(rows.holders(stage)) for stage in range(rows.stages)}
    mine = sorted({action.stage_index for action in rows.by_rank[dist.get_rank()]})
    model = layers(rows.stages)
    held = [ReroutedStage(model[index], index, rows, alone) for index in mine]
    value, target = text(rows.microbatches)
    ReroutedSchedule(held, rows, groups).step(value, target=target, return_outputs=False)
    for stage in held:
        found = [parameter.grad for parameter in stage.submod.parameters()]
        wanted = expected(rows.stages, rows.microbatches)[stage.stage_index]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    paths = sorted(folder.glob("*.csv"))
    size = len(Rows(paths[0]).by_rank)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank,
                            world_size=size)
    alone = [dist.new_group([other]) for other in range(size)][rank]
    for path in paths:
        run(path, alone)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
