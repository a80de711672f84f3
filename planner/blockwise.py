"""Plan jobs with too many micro-batches to plan at once: repeat a plan of fewer.

The micro-batches of an iteration are divided into nearly equal blocks. Each different block is
planned like a job of its own, and the blocks follow each other on every worker. That keeps every
rule: a micro-batch lies within one block; a worker begins a block when it has run all of the one
before, and holds no activation then. The cost is that the pipeline fills and drains once in every
block.

How much fits into the time is measured: a small part of the job is planned first, and timed. Its
processor time counts, so that a busy machine refuses nothing that an idle one plans.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from slipstream.planner.budget import Clock
from slipstream.planner.compiled import load_kernel
from slipstream.planner.job.file import Job, JobError
from slipstream.planner.loops import is_plain_python
from slipstream.planner.model.problem import Bound
from slipstream.planner.params import DEFAULTS, BlockParams
from slipstream.schedules.check import check
from slipstream.schedules.schedule import (
    COMPUTE_KINDS,
    Program,
    ProgramOp,
    Schedule,
    Seat,
    Worker,
    compute_period_ticks,
    place_ops,
)

OpsOf = Callable[[Job], int]
"""Function that counts the compute ops to plan for a job; equal subproblems count once."""

PlanBlock = Callable[[Job, float], Schedule]
"""Function that returns a checked schedule of a job, planned within the given seconds.

Layers stay in place, and no micro-batch is cut.
"""


class TooLargeError(JobError):
    """Error for a job too large for its time limit. The message says what to change."""


class Pace(NamedTuple):
    """Processor seconds that this machine takes per compute op to plan and to join blocks."""

    plan: float
    """Processor seconds for each compute op to make a first plan and check it."""
    join: float
    """Processor seconds for each compute op to join plans of blocks and check the whole."""


class Speed:
    """Measure of how fast this machine plans (`Pace`), and of the processor time left.

    A plan may use `seconds` of processor time from now on.
    """

    def __init__(self, seconds: float, clock: Clock, params: BlockParams = DEFAULTS.blocks) -> None:
        self._pace: Pace | None = None
        self.clock, self.params = clock, params
        self._end = clock.process_seconds() + seconds

    @property
    def processor_seconds_left(self) -> float:
        """Processor seconds that a plan may still use; negative if it has used more."""
        return self._end - self.clock.process_seconds()

    def pace_for(self, job: Job, ops_of: OpsOf, plan_block: PlanBlock) -> Pace:
        """Return the pace at which this machine plans blocks and joins their plans.

        The first call measures the pace on a small copy (`sample_of`) of its job: `plan_block`
        plans the copy, and `ops_of` counts its compute ops. Later calls return the same pace.
        """
        if self._pace is None:
            sample = sample_of(job, ops_of, self.params.sample)
            self._pace = measure_pace(sample, ops_of(sample), plan_block, self.clock)
        return self._pace


class Blocks(NamedTuple):
    """Number of blocks of micro-batches, and the seconds to plan all of them."""

    number: int
    seconds: float
    """Seconds to plan all different blocks; joining takes the rest of the limit."""


def choose_blocks(
    job: Job,
    ops_of: OpsOf,
    seconds: float,
    plan_block: PlanBlock,
    speed: Speed,
    *,
    grace: bool = True,
) -> Blocks | None:
    """Choose the number of blocks of a job so that it is planned within `seconds`.

    Return None if the job is planned whole: it fits into the time, or blocks would be too short to
    fill the pipelines. Raises TooLargeError if even to join and check the plans takes too long, or
    a whole plan where blocks are too short. Errors of `plan_block` pass.

    Parameters
    ----------
    job
        Job to divide.
    ops_of
        Counts the compute ops of a job.
    seconds
        Time limit of the plan.
    plan_block
        Plans a sample, to measure the pace.
    speed
        Pace of this machine, and processor time left.
    grace
        Whether the plan may exceed `seconds` by the grace in `BlockParams`.
    """
    # So few ops are in time on any machine, and need no measurement.
    ops, params = ops_of(job), speed.params
    if ops <= (params.certain if grace else params.quick):
        return None
    # Does the whole fit into the time?
    began = speed.clock.thread_seconds()
    pace = speed.pace_for(job, ops_of, plan_block)
    left = seconds - (speed.clock.thread_seconds() - began)
    if pace.plan * ops * params.whole_margin < left:
        return None
    # Joining takes as long for any number of blocks. It may also use the grace, and the processor
    # time that a busy machine has not given yet.
    joining = pace.join * ops
    allowed = left - pace.plan * params.sample
    if grace:
        allowed += max(params.grace_seconds, params.grace_share * seconds) + max(
            0.0, speed.processor_seconds_left - left
        )
    planning = max(0.0, left - joining)
    # Nearly equal blocks are of two sizes, so that two plans share the time.
    size = max(params.sample, params.share * planning / pace.plan / 2)
    number = _even_block_count(
        max(2, min(round(ops / size), min(job.microbatches) // job.chains)), job
    )
    # In shorter blocks, pipelines would hardly be full before they drain: the job is planned whole,
    # if the grace is long enough.
    if min(job.microbatches) // number < 2 * job.depth:
        if pace.plan * ops < allowed:
            return None
        joining = pace.plan * ops
    joining *= params.margin
    if joining > allowed:
        raise TooLargeError(_too_large_message(job, ops, ops * allowed / joining, joining))
    return Blocks(number, planning)


def _even_block_count(number: int, job: Job) -> int:
    """Return a number near `number` that divides the micro-batches evenly, or else `number`."""
    common = math.gcd(*(total // job.chains for total in job.microbatches))
    near = range(max(2, math.ceil(0.8 * number)), math.floor(1.25 * number) + 1)
    return min(
        (count for count in near if common % count == 0),
        key=lambda count: abs(count - number),
        default=number,
    )


def sample_of(job: Job, ops_of: OpsOf, size: int) -> Job:
    """Return a copy of a job with fewer micro-batches, to measure the planner's pace.

    The copy has about `size` compute ops, as counted by `ops_of`, or more; all of a smaller job.
    """
    blocks = max(1, min(ops_of(job) // size, min(job.microbatches) // job.chains))
    sample = next(blocks_of(job, blocks))
    ops = ops_of(sample)
    if 2 * ops >= size or blocks <= 2:
        return sample
    # With fewer micro-batches, fewer pipelines may share the work of failed workers, so that 1/n of
    # the micro-batches may have far fewer than 1/n of the ops. Of a copy with too few ops, other
    # things would take most of the time.
    return next(blocks_of(job, max(2, blocks * ops // size)))


def measure_pace(sample: Job, ops: int, plan_block: PlanBlock, clock: Clock) -> Pace:
    """Return the `Pace` at which `plan_block` plans `sample`, a job with `ops` compute ops."""
    # Loading the machine code happens once and is no part of the pace.
    if not is_plain_python():
        load_kernel()
    began = clock.thread_seconds()
    schedule = plan_block(sample, 0.0)
    planned = clock.thread_seconds()
    join_blocks(sample, [schedule], Bound(0, schedule.scope))
    return Pace((planned - began) / ops, (clock.thread_seconds() - planned) / ops)


def blocks_of(job: Job, count: int) -> Iterator[Job]:
    """Divide a job's micro-batches into `count` nearly equal blocks; yield a job for each block.

    If `count` does not divide the micro-batches of a pipeline, its first blocks have one more. In a
    bidirectional pipeline, these blocks have one more in each direction, and the last micro-batch
    of an odd number is in the last block.
    """
    # In bidirectional pipelines, micro-batches go by pairs, one in each direction.
    whole = [divmod(total // job.chains, count) for total in job.microbatches]
    for block in range(count):
        sizes = [job.chains * (size + (block < more)) for size, more in whole]
        if block == count - 1:
            sizes = [
                size + total % job.chains
                for size, total in zip(sizes, job.microbatches, strict=True)
            ]
        yield msgspec.structs.replace(job, microbatches=tuple(sizes))


def plan_in_blocks(job: Job, how: Blocks, bound: Bound, plan_block: PlanBlock) -> Schedule:
    """Plan a job in the blocks that `how` says; return their joined, checked schedule.

    The schedule records `bound`, the lower bound of the whole job. Errors of `plan_block` pass.
    """
    # Equal blocks are planned once.
    blocks = list(blocks_of(job, how.number))
    different = {block.microbatches: block for block in blocks}
    plans = {
        counts: plan_block(block, how.seconds / len(different))
        for counts, block in different.items()
    }
    return join_blocks(job, [plans[block.microbatches] for block in blocks], bound)


def join_blocks(job: Job, blocks: Sequence[Schedule], bound: Bound) -> Schedule:
    """Join the schedules of consecutive blocks of micro-batches to one schedule.

    The result records `bound`. Raises AssertionError if the result breaks a rule.
    """
    shifts = _block_shifts(blocks)
    # The number of micro-batches before each block, by pipeline.
    before = []
    for pipeline in range(job.pipelines):
        counts = [block.grid.microbatches[pipeline] for block in blocks]
        before.append(list(accumulate(counts, initial=0)))
    # Workers with the same programs in all blocks share the joined one, too.
    numbers: dict[tuple[object, ...], int] = {}
    programs: list[Program] = []
    seats: list[Seat] = []
    for row, seat in enumerate(blocks[0].seats):
        parts = [block.programs[block.seats[row].program] for block in blocks]
        key = (*map(id, parts), *before[seat.role.pipeline])
        if key not in numbers:
            numbers[key] = len(programs)
            programs.append(_join_programs(parts, shifts, before, seat.role.pipeline))
        seats.append(msgspec.structs.replace(seat, program=numbers[key]))
    whole = msgspec.structs.replace(
        blocks[0],
        grid=msgspec.structs.replace(blocks[0].grid, microbatches=job.microbatches),
        seats=tuple(seats),
        programs=tuple(programs),
    )
    # Ops at both ends of the programs are enough for the period.
    period = compute_period_ticks(
        op
        for seat in seats
        for op in place_ops(_boundary_ops(programs[seat.program]), seat, whole.times)
    )
    whole = msgspec.structs.replace(whole, period_ticks=period).with_bound(bound.ticks, bound.scope)
    violations = check(whole)
    if violations:
        raise AssertionError(f"a repeated schedule breaks a rule: {violations[0]}")
    return whole


def _block_shifts(blocks: Sequence[Schedule]) -> list[int]:
    """Return by how many ticks each block must be delayed to follow those before."""
    # A block is delayed as a whole, by what the last of its workers to be free needs.
    spans = {id(block): _worker_spans(block) for block in blocks}
    free: dict[Worker, int] = {}
    shifts = []
    for block in blocks:
        span = spans[id(block)]
        shift = max(
            (free[worker] - first for worker, (first, _) in span.items() if worker in free),
            default=0,
        )
        free |= {worker: shift + last for worker, (_, last) in span.items() if last is not None}
        shifts.append(shift)
    return shifts


def _worker_spans(block: Schedule) -> dict[Worker, tuple[int, int | None]]:
    """Return each worker's first start and last compute op's end (None without one), in ticks."""
    spans: dict[Worker, tuple[int, int | None]] = {}
    for seat in block.seats:
        program = block.programs[seat.program]
        compute = [
            op
            for op in place_ops(_boundary_ops(program), seat, block.times)
            if op.kind in COMPUTE_KINDS
        ]
        spans[seat.worker] = program[0].start_ticks, compute[-1].end_ticks if compute else None
    return spans


def _boundary_ops(program: Program) -> Program:
    # The first op, the last compute op and the last op; a program may have many thousands.
    last = next((op for op in reversed(program) if op.kind in COMPUTE_KINDS), program[-1])
    return program[0], last, program[-1]


def _join_programs(
    blocks: Sequence[Program], shifts: Sequence[int], before: Sequence[Sequence[int]], pipeline: int
) -> Program:
    """Join the programs that a worker of `pipeline` has in consecutive `blocks`.

    `shifts` has the ticks by which each block's starts grow, and `before` [pipeline][block] the
    numbers of earlier micro-batches.
    """
    ops: list[ProgramOp] = []
    for block, (program, shift) in enumerate(zip(blocks, shifts, strict=True)):
        is_last = block == len(blocks) - 1
        for op in program:
            # Micro-batches are numbered through all blocks, by the pipeline that reads them.
            if op.microbatch is not None:
                owner = pipeline if op.pipeline is None else op.pipeline
                first = before[owner][block]
                ops.append(
                    ProgramOp(
                        op.kind,
                        op.slice,
                        op.microbatch + first,
                        op.start_ticks + shift,
                        op.pipeline,
                    )
                )
            # Gradients are reduced, and the optimizer steps, once after all blocks.
            elif is_last:
                ops.append(ProgramOp(op.kind, op.slice, None, op.start_ticks + shift))
    return tuple(ops)


def _too_large_message(job: Job, ops: int, fitting: float, seconds: float) -> str:
    count = max(job.microbatches)
    fits = int(fitting / ops * count)
    less = (
        f"about {fits:,} micro-batches a pipeline fit into the time limit"
        if fits > 0
        else "use fewer"
    )
    return (
        f"{job.pipelines} x {job.stages} workers with {count:,} micro-batches a pipeline are "
        f"{ops:,} ops to place. This machine takes about {seconds:.1f} s to put such a schedule "
        f"together and check it: {less}, or --time-limit {math.ceil(2 * seconds) + 1} is enough"
    )
