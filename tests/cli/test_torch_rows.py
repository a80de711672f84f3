"""Rows of all pipelines for torch have each op and each crossing once.

There is no deadlock even if each send waits.
"""

import random
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.cli.exporters.torch_rows import write_rows
from slipstream.planner.plan import plan_job
from slipstream.schedules.check import check
from slipstream.schedules.precedence import consumers_with_rules, op_key
from slipstream.schedules.schedule import COMPUTE_KINDS, OpKind, Schedule, Worker
from slipstream.schedules.whole_stages import with_whole_stages
from tests.cli.test_export import V, with_merged_stages
from tests.generate import SHED, by_chance, by_hand, planned
from tests.jobs import grid


class Cell(NamedTuple):
    """Stage, action and number of the micro-batch, which reductions do not have."""

    stage: int
    action: str
    number: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.action}{'' if self.number is None else self.number}"

    @property
    def other_end(self) -> "Cell":
        """The receive that takes what this sends, or the send that it takes."""
        forward = self.action.endswith("F")
        sends = self.action.startswith("SEND")
        kind, other = ("SEND", "RECV") if sends else ("RECV", "SEND")
        action = self.action.replace(kind, other)
        return Cell(self.stage + (1 if forward == sends else -1), action, self.number)


def read_cell(stage: str, action: str, number: str) -> Cell:
    return Cell(int(stage), action, int(number) if number else None)


def read_cells(text: str) -> list[list[Cell]]:
    """The cells of each row."""
    rows = []
    for line in text.splitlines():
        cells = re.findall(r"(\d+)([A-Z_]+)(\d*)", line)
        rows.append([read_cell(*parts) for parts in cells])
    return rows


class Blocking:
    """Ranks that run their rows, blocked by sends and reductions.

    A send blocks until it is received, a reduction until all are there.

    The class knows nothing but the rows. It looks for the other end of a transfer among all of
    them.
    """

    def __init__(self, rows: list[list[Cell]], last_stage: int) -> None:
        self.rows, self.last_stage = rows, last_stage
        self.places = [0] * len(rows)
        self.row_of = {
            cell: index
            for index, row in enumerate(rows)
            for cell in row
            if "_" in cell.action and cell.number is not None
        }
        self.reducing: dict[int, set[int]] = defaultdict(set)
        for index, row in enumerate(rows):
            for cell in row:
                if cell.action == "REDUCE_GRAD":
                    self.reducing[cell.stage].add(index)
        self.done: list[set[Cell]] = [set() for _ in rows]

    def run(self) -> None:
        """Run all rows to their ends. A deadlock is an assertion that names where each rank is."""
        while any(self.next_cell(index) for index in range(len(self.rows))):
            moved = [index for index in range(len(self.rows)) if self.try_next(index)]
            assert moved, [self.next_cell(index) for index in range(len(self.rows))]

    def next_cell(self, index: int) -> Cell | None:
        row = self.rows[index]
        return row[self.places[index]] if self.places[index] < len(row) else None

    def try_next(self, index: int) -> bool:
        """Run the next cell of a row, with its other ends, if all are there."""
        cell = self.next_cell(index)
        if cell is None:
            return False
        if cell.action == "REDUCE_GRAD":
            together = self.reducing[cell.stage]
        elif cell.number is not None and "_" in cell.action:
            together = {index, self.row_of[cell.other_end]}
            assert len(together) == 2, f"{cell} is sent to its own row"
            if self.next_cell(max(together - {index})) != cell.other_end:
                return False
        else:
            self.require_inputs(index, cell)
            together = {index}
        if cell.action == "REDUCE_GRAD" and any(
            self.next_cell(worker) != cell for worker in together
        ):
            return False
        for worker in together:
            self.done[worker].add(self.rows[worker][self.places[worker]])
            self.places[worker] += 1
        return True

    def require_inputs(self, index: int, cell: Cell) -> None:
        """An op has its inputs: received, or left there by the stage next to it."""
        done, (stage, action, number) = self.done[index], cell
        if action == "F":
            inputs = {Cell(stage, "RECV_F", number), Cell(stage - 1, "F", number)}
            assert stage == 0 or inputs & done
        elif action == "W":
            assert Cell(stage, "I", number) in done
        else:
            assert Cell(stage, "F", number) in done
            inputs = {Cell(stage, "RECV_B", number), Cell(stage + 1, action, number)}
            assert stage == self.last_stage or inputs & done


def require_exact(schedule: Schedule, text: str) -> None:
    """The rows have each op, crossing and reduction of the schedule once, and run through."""
    rows, shape = read_cells(text), schedule.grid
    assert "".join(",".join(map(str, row)) + "\n" for row in rows) == text
    first = [sum(shape.microbatches[:pipeline]) for pipeline in range(shape.pipelines)]
    expected: dict[Worker, Counter[Cell]] = defaultdict(Counter)
    ops = [op for op in schedule.all_ops() if op.kind in COMPUTE_KINDS]
    worker_of = {op_key(op): op.worker for op in ops}
    for op in ops:
        kind, stage, pipeline, microbatch = key = op_key(op)
        number = first[pipeline] + microbatch
        expected[op.worker][Cell(stage % shape.depth, str(kind), number)] += 1
        for consumer, rule in consumers_with_rules(key, schedule.route_of(pipeline, microbatch)):
            if rule.tensor and worker_of.get(consumer, op.worker) != op.worker:
                action = "SEND_F" if rule.tensor == "activation" else "SEND_B"
                sent = Cell(stage % shape.depth, action, number)
                expected[op.worker][sent] += 1
                expected[worker_of[consumer]][sent.other_end] += 1
    for op in schedule.all_ops():
        if op.kind is OpKind.A and op.slice is not None:
            expected[op.worker][Cell(op.slice % shape.depth, "REDUCE_GRAD")] += 1
    for row, role in zip(rows, shape.workers(), strict=True):
        worker = schedule.player_of.get(role)
        assert Counter(row) == (expected[worker] if worker else Counter())
        if worker and not schedule.has_overlap:
            planned_ops = [op_key(op) for op in schedule.ops(worker) if op.kind in COMPUTE_KINDS]
            planned_cells = [
                Cell(stage % shape.depth, str(kind), first[pipeline] + microbatch)
                for kind, stage, pipeline, microbatch in planned_ops
            ]
            assert [cell for cell in row if "_" not in cell.action] == planned_cells
    Blocking(rows, shape.depth - 1).run()


PLACEMENTS = (
    "",
    "chunks = 2\n",
    "order = 'v'\nchunks = 2\n",
    "order = 'interleaved'\nchunks = 2\n",
)
LONGER = "forward = 2\nbackward_input = 3\nbackward_weight = 1\ntransfer = 1\n"


@st.composite
def plans(draw: st.DrawFn) -> Schedule:
    """Plans of 3 x 3 workers with nobody, one or two dead.

    The planner or chance says who runs a stage of a micro-batch.
    """
    microbatches = draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))
    job = grid(
        3,
        3,
        microbatches,
        times=draw(st.sampled_from(["", LONGER])),
        more=f"[placement]\n{draw(st.sampled_from(PLACEMENTS))}",
    )
    worker = st.builds(Worker, st.integers(0, 2), st.integers(0, 2))
    failed = sorted(draw(st.lists(worker, max_size=2, unique=True)))
    how = {
        "backward": draw(st.sampled_from(["split", "fused"])),
        "optimizer": draw(st.sampled_from(["staggered", "synchronous"])),
    }
    schedule = (
        by_chance(job, failed, random.Random(draw(st.integers(0, 2**32))), **how)
        if draw(st.booleans())
        else planned(job, failed, **how)
    )
    assert not check(schedule)
    return schedule


@settings(max_examples=60)
@given(plans())
def test_rows_have_all_ops_and_crossings_and_run_through(schedule):
    require_exact(schedule, write_rows(schedule))


def test_shed_and_bidirectional_plans_have_rows():
    job = grid(2, 4, 4, more="[placement]\norder = 'bidirectional'\n")
    for schedule in (by_hand(SHED), planned(job, [Worker(1, 2)])):
        assert schedule.shed or schedule.grid.chains == 2
        require_exact(schedule, write_rows(schedule))


def test_a_slice_of_two_stages_is_written_as_these():
    job = replace(V, time=replace(V.time, slow=()))
    merged = with_merged_stages(plan_job(job, method="greedy").schedule)
    require_exact(with_whole_stages(merged), write_rows(merged))


def test_the_simulation_finds_a_deadlock():
    """Rows that both send before they receive are a deadlock.

    Torch's `isend` allows that and a blocking send does not.
    """
    rows = read_cells(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1\n"
    )
    with pytest.raises(AssertionError, match=r"SEND_F.*SEND_B"):
        Blocking(rows, 1).run()
