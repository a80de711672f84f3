"""Schedules as AMD Primus' pipeline runner reads them: for each rank a list of nodes, with sends and receives.

What `PipelineScheduleAlgo.generate_schedule_table` returns (github.com/AMD-AGI/Primus, primus/core/pipeline_parallel/
scheduler, as of August 2026). A node has a kind, a micro-batch, a chunk, and arguments; those of a send or a receive
name both ranks. So a micro-batch may go to any rank, as a re-routed one does. Nodes of communication that follow each
other on a rank are begun together. `chunk` counts the stages of a rank.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from slipstream.schedules.graph import Transfer, programs_of, transfers, with_transfers
from slipstream.schedules.layers import short
from slipstream.schedules.precedence import Tensor, consumers, op_key
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, Schedule, Worker

KINDS = {"F": "F", "I": "B", "W": "W", "B": "BW"}
"""Our letters of ops, and theirs: names of `FuncType`."""


class PrimusError(ValueError):
    """A schedule that a table cannot hold. The message is one line."""


class Node(NamedTuple):
    """A `SchedulerNode`."""

    func_type: str
    mini_batch: int
    chunk: int
    args: dict[str, int] | None = None


class _Numbers:
    """Ranks, micro-batches and chunks. Raises PrimusError."""

    def __init__(self, schedule: Schedule) -> None:
        grid = schedule.grid
        for seat in schedule.seats:
            if schedule.holds_others(seat):
                raise PrimusError(f"worker {seat.worker} holds layers of its own choice "
                                  f"({short(schedule.holds_of(seat)) or 'none'}), and in Primus all ranks of a stage "
                                  "hold the same: export a plan with layers in place")
        if grid.chains > 1:
            raise PrimusError("a bidirectional schedule has stages on two ranks each, which Primus has not: plan with "
                              "[placement] order = 'v' or 'interleaved'")
        self.rank = {Worker(pipeline, column): pipeline * grid.columns + column
                     for pipeline in range(grid.pipelines) for column in range(grid.columns)}
        self._stages = [stage.column for stage in grid.stages]
        self._first = [sum(grid.microbatches[:pipeline]) for pipeline in range(grid.pipelines)]
        self.chunks = max(map(self.chunk, range(len(self._stages)))) + 1

    def chunk(self, stage: int) -> int:
        """Which of its rank's stages this is."""
        if stage >= len(self._stages):
            raise PrimusError("micro-batches are cut at other layers than stages, and Primus has chunks: export a plan "
                              "without slices")
        return self._stages[:stage].count(self._stages[stage])

    def mini_batch(self, pipeline: int, microbatch: int) -> int:
        """Counted over all pipelines."""
        return self._first[pipeline] + microbatch


def primus_table(schedule: Schedule) -> dict[str, Any]:
    """The table of all pipelines, with what `PipelineScheduleAlgo` is made with; a dead worker's list is empty.

    Ranks are workers, pipeline by pipeline. Raises PrimusError.
    """
    numbers, programs = _Numbers(schedule), programs_of(schedule)
    crossing, table = transfers(schedule, programs), [list[Node]() for _ in numbers.rank]
    for worker, ops in programs.items():
        sent = {one[:4] for one in crossing if one.source == worker}
        for step in with_transfers(ops, crossing, worker, schedule.path):
            if isinstance(step, Transfer):
                table[numbers.rank[worker]].append(_crossing(step, step.source == worker, numbers))
            elif step.kind in COMPUTE_KINDS:
                table[numbers.rank[worker]] += _computed(step, schedule, numbers, sent)
    return {"pp_size": len(table), "vpp_size": numbers.chunks, "micro_batches": sum(schedule.grid.microbatches),
            "table": [[node._asdict() for node in nodes] for nodes in table]}


def _computed(op: Op, schedule: Schedule, numbers: _Numbers, sent: set[tuple[Tensor, int, int, int]]) -> Iterator[Node]:
    """An op, and what it hands to another stage of its rank, which sends it to itself."""
    kind, stage, pipeline, microbatch = key = op_key(op)
    yield Node(KINDS[kind], numbers.mini_batch(pipeline, microbatch), numbers.chunk(stage))
    for (_, target, *_), rule in consumers(key, schedule.path(pipeline, microbatch)):
        if rule.tensor is not None and target != stage and (rule.tensor, target, pipeline, microbatch) not in sent:
            own = Transfer(rule.tensor, target, pipeline, microbatch, op.worker, op.worker)
            yield from (_crossing(own, sends, numbers) for sends in (True, False))


def _crossing(transfer: Transfer, sends: bool, numbers: _Numbers) -> Node:
    """A send, which is of the chunk that made the tensor, or a receive, of the chunk that takes it."""
    forward = transfer.kind == "activation"
    taken, made = numbers.chunk(transfer.slice), numbers.chunk(transfer.slice + (-1 if forward else 1))
    ends = {"from_pp_rank": numbers.rank[transfer.source], "to_pp_rank": numbers.rank[transfer.target]}
    return Node(("S" if sends else "R") + ("F" if forward else "B"),
                numbers.mini_batch(transfer.pipeline, transfer.microbatch), made if sends else taken,
                {**ends, **({"send_to_chunk": taken} if sends else {"recv_from_chunk": made})})
