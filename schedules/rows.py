"""Build rows for torch.distributed.pipelining, including re-routed micro-batches.

A row is what a worker does in an iteration, cell by cell: `0F1` runs F of micro-batch 1 at stage 0,
`0SEND_F1` sends what it made, `1RECV_F1` receives it, `1REDUCE_GRAD` sums the gradients of stage 1.
Micro-batches are numbered over all pipelines. Peers are not stored: the other end of `1SEND_F4` is
the row that has `2RECV_F4`, and a gradient is reduced over the rows that have the same
`1REDUCE_GRAD`. A row that runs two successive stages for a micro-batch needs no transfer between
them.

All rows are derived from one order of all ops, in which a tensor is sent and received directly
after the op that makes it, as torch orders its own. So the rows end even if every send waits for
its receive.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slipstream.schedules.graph import Collective, Node, programs_of, topological_order
from slipstream.schedules.layers import LayerRange, prefix_sums
from slipstream.schedules.precedence import OpKey, consumers_with_rules, op_key
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind, Schedule, Worker
from slipstream.schedules.whole_stages import require_whole_stages


class Cell(NamedTuple):
    """Action of a worker at a stage, for a micro-batch unless it is REDUCE_GRAD."""

    stage: int
    action: str
    """One of F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B or REDUCE_GRAD."""
    microbatch: int | None = None
    """Number of the micro-batch over all pipelines; None for REDUCE_GRAD."""

    def __str__(self) -> str:
        number = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.action}{number}"


Rows = Mapping[Worker, tuple[Cell, ...]]
"""Cells of each live worker, in the order in which it runs them."""


def build_rows(schedule: Schedule) -> Rows:
    """Return each live worker's cells. Raises NotWholeError unless stages are whole, in place.

    Raises ValueError if ops wait for each other in a circle.
    """
    rows = _RowWriter(require_whole_stages(schedule)).write_cells()
    return {worker: tuple(cells) for worker, cells in rows.items()}


class _RowWriter:
    """Writer of the cells of all workers, for a schedule of whole stages."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._programs = programs_of(schedule)
        self._first_number = prefix_sums(schedule.grid.microbatches)
        ops = [op for program in self._programs.values() for op in program]
        self._worker_of = {op_key(op): op.worker for op in ops if op.kind in COMPUTE_KINDS}
        self._reducers = _reducers_by_layers(schedule, ops)
        self._cells: dict[Worker, list[Cell]] = {worker: [] for worker in self._programs}

    def write_cells(self) -> Mapping[Worker, list[Cell]]:
        """Return the cells of each worker, in the order in which it runs them."""
        for node in topological_order(self._schedule, self._programs):
            self._write_node(node)
        return self._cells

    def _write_node(self, node: Node) -> None:
        """Add the cells of an op and its transfers, or of an all-reduce."""
        if isinstance(node, Collective):
            for worker, stage in self._reducers[node.layers].items():
                self._cells[worker].append(Cell(stage, "REDUCE_GRAD"))
        elif isinstance(node, Op) and node.kind in COMPUTE_KINDS:
            key = op_key(node)
            self._cells[node.worker].append(self._cell(str(node.kind), key))
            path = self._schedule.route_of(key.pipeline, key.microbatch)
            # Send and receive follow the op at once on both rows, so neither can wait for the other
            # in a circle.
            for consumer, rule in consumers_with_rules(key, path):
                target = self._worker_of.get(consumer, node.worker)
                if rule.tensor is not None and target != node.worker:
                    letter = "F" if rule.tensor == "activation" else "B"
                    self._cells[node.worker].append(self._cell(f"SEND_{letter}", key))
                    self._cells[target].append(self._cell(f"RECV_{letter}", consumer))

    def _cell(self, action: str, key: OpKey) -> Cell:
        """Return the cell of an action, with the stage and micro-batch of an op."""
        # Copies of a stage in two directions are one stage for torch.
        number = self._first_number[key.pipeline] + key.microbatch
        return Cell(self._schedule.grid.original_stage(key.slice), action, number)


def _reducers_by_layers(
    schedule: Schedule, ops: Iterable[Op]
) -> Mapping[LayerRange, Mapping[Worker, int]]:
    """Return the workers that reduce each range of layers, each with its stage."""
    reducers: dict[LayerRange, dict[Worker, int]] = defaultdict(dict)
    for op in ops:
        if op.kind is OpKind.A and op.slice is not None:
            stage = schedule.grid.original_stage(op.slice)
            reducers[schedule.layers_of(op.slice)][op.worker] = stage
    return reducers
