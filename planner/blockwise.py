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
"""Function that returns the compute ops to plan for a job; equal subproblems count once."""

PlanBlock = Callable[[Job, float], Schedule]
"""Function that plans a job in place, without cuts, within seconds; returns a checked schedule."""


class TooLargeError(JobError):
    """Error for a job too large for its time limit. The message says what would do."""


class Pace(NamedTuple):
    """Processor seconds per compute op that planning and joining blocks take on this machine."""

    plan: float
    """Processor seconds for each compute op to plan first, assemble and check."""
    join: float
    """Seconds for each compute op to join the plans of blocks and check the whole."""


class Speed:
    """Meter of the planning `Pace`, measured once, and of a plan's processor time left."""

    def __init__(self, seconds: float, clock: Clock, params: BlockParams = DEFAULTS.blocks) -> None:
        self._pace: Pace | None = None
        self.clock, self.params = clock, params
        self._end = clock.process_seconds() + seconds

    @property
    def processor_seconds_left(self) -> float:
        """Processor seconds that a plan may still use; negative if it has used more."""
        return self._end - self.clock.process_seconds()

    def pace_for(self, job: Job, ops_of: OpsOf, plan_block: PlanBlock) -> Pace:
        """Return the pace at which this machine plans and joins the plans of blocks.

        It is measured at the first call only: `plan_block` plans a small sample (`sample_of`) of
        that call's job, and `ops_of` counts compute ops.
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


def choose_blocks(job: Job, ops_of: OpsOf, seconds: float, plan_block: PlanBlock, speed: Speed, *,
                  grace: bool = True) -> Blocks | None:
    """Choose the blocks of a job so that it is planned within `seconds`.

    None: the whole job can be planned at once. With `grace`, the plan may take somewhat longer. The
    function `ops_of` counts the compute ops of a job, and `plan_block` plans a sample to measure
    the pace. Raises TooLargeError if joining and checking the blocks' plans alone would take too
    long.
    """
    ops, params = ops_of(job), speed.params
    if ops <= (params.certain if grace else params.quick):
        return None
    began = speed.clock.thread_seconds()
    pace = speed.pace_for(job, ops_of, plan_block)
    left = seconds - (speed.clock.thread_seconds() - began)
    if pace.plan * ops * params.whole_margin < left:
        return None
    joining = pace.join * ops
    allowed = left - pace.plan * params.sample
    if grace:
        allowed += max(params.grace_seconds, params.grace_share * seconds) + max(0.0,
                                                                                 speed.processor_seconds_left - left)
    planning = max(0.0, left - joining)
    size = max(params.sample, params.share * planning / pace.plan / 2)  # nearly equal blocks are of two sizes
    number = _even_block_count(max(2, min(round(ops / size), min(job.microbatches) // job.chains)), job)
    if min(job.microbatches) // number < 2 * job.depth:  # each pipeline would hardly be full before it drains
        if pace.plan * ops < allowed:
            return None
        joining = pace.plan * ops
    if joining * params.margin > allowed:
        raise TooLargeError(_too_large_message(job, ops, ops * allowed / (joining * params.margin),
                                               joining * params.margin))
    return Blocks(number, planning)


def _even_block_count(number: int, job: Job) -> int:
    """Return a number near `number` that divides the micro-batches evenly, if there is one."""
    common = math.gcd(*(total // job.chains for total in job.microbatches))
    near = range(max(2, math.ceil(0.8 * number)), math.floor(1.25 * number) + 1)
    return min((count for count in near if common % count == 0), key=lambda count: abs(count - number), default=number)


def sample_of(job: Job, ops_of: OpsOf, size: int) -> Job:
    """Return a copy of a job with fewer micro-batches, to measure the planner's pace.

    It has about `size` compute ops, as counted by `ops_of`, if possible; with fewer, other things
    than ops would take most of the time. As fewer pipelines may then share the work of failed
    workers, 1/n of the micro-batches may have fewer than 1/n of the ops; then a larger copy is
    returned.
    """
    blocks = max(1, min(ops_of(job) // size, min(job.microbatches) // job.chains))
    sample = next(blocks_of(job, blocks))
    ops = ops_of(sample)
    return sample if 2 * ops >= size or blocks <= 2 else next(blocks_of(job, max(2, blocks * ops // size)))


def measure_pace(sample: Job, ops: int, plan_block: PlanBlock, clock: Clock) -> Pace:
    """Return the `Pace` of planning `sample`, of `ops` compute ops, in thread seconds by
    `clock`."""
    if not is_plain_python():
        load_kernel()
    began = clock.thread_seconds()
    schedule = plan_block(sample, 0.0)
    planned = clock.thread_seconds()
    join_blocks(sample, [schedule], Bound(0, schedule.scope))
    return Pace((planned - began) / ops, (clock.thread_seconds() - planned) / ops)


def blocks_of(job: Job, count: int) -> Iterator[Job]:
    """Divide a job's micro-batches into `count` nearly equal blocks; yield each one's job.

    If their number is not a multiple of `count`, the first blocks have one micro-batch more. In a
    bidirectional pipeline they have one more in each direction; if the number is odd, the last
    micro-batch is in the last block.
    """
    whole = [divmod(total // job.chains, count) for total in job.microbatches]
    for block in range(count):
        sizes = [job.chains * (size + (block < more)) for size, more in whole]
        if block == count - 1:
            sizes = [size + total % job.chains for size, total in zip(sizes, job.microbatches, strict=True)]
        yield msgspec.structs.replace(job, microbatches=tuple(sizes))


def plan_in_blocks(job: Job, how: Blocks, bound: Bound, plan_block: PlanBlock) -> Schedule:
    """Return a job's checked schedule, planned block by block; `bound` is that of the whole."""
    blocks = list(blocks_of(job, how.number))
    different = {block.microbatches: block for block in blocks}
    plans = {counts: plan_block(block, how.seconds / len(different)) for counts, block in different.items()}
    return join_blocks(job, [plans[block.microbatches] for block in blocks], bound)


def join_blocks(job: Job, blocks: Sequence[Schedule], bound: Bound) -> Schedule:
    """Join the schedules of consecutive blocks to one. Raises AssertionError if it breaks a
    rule."""
    shifts = _block_shifts(blocks)
    before = [list(accumulate((block.grid.microbatches[pipeline] for block in blocks), initial=0))
              for pipeline in range(job.pipelines)]
    numbers: dict[tuple[object, ...], int] = {}
    programs: list[Program] = []
    seats: list[Seat] = []
    for row, seat in enumerate(blocks[0].seats):
        own = [block.programs[block.seats[row].program] for block in blocks]
        key = (*map(id, own), *before[seat.role.pipeline])
        if key not in numbers:
            numbers[key] = len(programs)
            programs.append(_join_programs(own, shifts, before, seat.role.pipeline))
        seats.append(msgspec.structs.replace(seat, program=numbers[key]))
    whole = msgspec.structs.replace(
        blocks[0], grid=msgspec.structs.replace(blocks[0].grid, microbatches=job.microbatches), seats=tuple(seats),
        programs=tuple(programs))
    period = compute_period_ticks(op for seat in seats
                                  for op in place_ops(_boundary_ops(programs[seat.program]), seat, whole.times))
    whole = msgspec.structs.replace(whole, period_ticks=period).with_bound(bound.ticks, bound.scope)
    violations = check(whole)
    if violations:
        raise AssertionError(f"a repeated schedule breaks a rule: {violations[0]}")
    return whole


def _block_shifts(blocks: Sequence[Schedule]) -> list[int]:
    """Return the ticks by which to shift each block, to follow those before it."""
    spans = {id(block): _worker_spans(block) for block in blocks}
    free: dict[Worker, int] = {}
    shifts = []
    for block in blocks:
        span = spans[id(block)]
        shift = max((free[worker] - first for worker, (first, _) in span.items() if worker in free), default=0)
        free |= {worker: shift + last for worker, (_, last) in span.items() if last is not None}
        shifts.append(shift)
    return shifts


def _worker_spans(block: Schedule) -> dict[Worker, tuple[int, int | None]]:
    """Return, by worker, the ticks of its first start and its last compute end."""
    spans: dict[Worker, tuple[int, int | None]] = {}
    for seat in block.seats:
        program = block.programs[seat.program]
        compute = [op for op in place_ops(_boundary_ops(program), seat, block.times) if op.kind in COMPUTE_KINDS]
        spans[seat.worker] = program[0].start_ticks, compute[-1].end_ticks if compute else None
    return spans


def _boundary_ops(program: Program) -> Program:
    """Return the first op, the last compute op and the last op of a program."""
    last = next((op for op in reversed(program) if op.kind in COMPUTE_KINDS), program[-1])
    return program[0], last, program[-1]


def _join_programs(blocks: Sequence[Program], shifts: Sequence[int], before: Sequence[Sequence[int]],
                   pipeline: int) -> Program:
    """Return one worker's ops of all blocks, each `shifts[block]` ticks later."""
    ops: list[ProgramOp] = []
    for block, (program, shift) in enumerate(zip(blocks, shifts, strict=True)):
        own, closing = before[pipeline][block], block == len(blocks) - 1
        for op in program:
            if op.microbatch is not None:
                first = own if op.pipeline is None else before[op.pipeline][block]
                ops.append(ProgramOp(op.kind, op.slice, op.microbatch + first, op.start_ticks + shift, op.pipeline))
            elif closing:
                ops.append(ProgramOp(op.kind, op.slice, None, op.start_ticks + shift))
    return tuple(ops)


def _too_large_message(job: Job, ops: int, fitting: float, seconds: float) -> str:
    most = max(job.microbatches)
    fits = int(fitting / ops * most)
    less = f"about {fits:,} micro-batches a pipeline fit into the time limit" if fits > 0 else "use fewer"
    return (f"{job.pipelines} x {job.stages} workers with {most:,} micro-batches a pipeline are {ops:,} ops to place. "
            f"This machine takes about {seconds:.1f} s to put such a schedule together and check it: {less}, or "
            f"--time-limit {math.ceil(2 * seconds) + 1} is enough")
