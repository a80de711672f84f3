"""Times finer than a tick.

What is proven of times rounded down holds for schedules of times rounded up.
"""

from fractions import Fraction

import msgspec
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.job.file import JobError
from slipstream.planner.job.layers import exact_decimal, layer_costs
from slipstream.planner.model.bounds import layout_lower_bound
from slipstream.planner.model.from_job import MAX_TICKS, build_layered_problem, choose_tick
from slipstream.planner.model.problem import AllowedLayouts, NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import has_overlapping_reductions, without_reductions
from slipstream.planner.plan import plan_only
from slipstream.schedules.check import check
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.schedule import ProgramOp, Worker, compute_period_ticks
from tests.jobs import any_jobs, failures, grid

CLOSE = 1 + Fraction(1, 10**12)
"""Ticks are fractions of a second, told as floats."""
FINE = st.sampled_from([0.333333337, 1.00000051, 0.123456789, 2.718281828459])


@st.composite
def fine_jobs(draw):
    """Jobs whose times have more digits than ticks have.

    Both chains of a bidirectional job have the same; reductions over a network take what that says.
    """
    job = draw(any_jobs())
    keys = ["forward", "backward_input", "backward_weight", "optimizer"]
    keys += [] if job.network.bandwidth else ["all_reduce"]
    time = {}
    for key in keys:
        values = getattr(job.time, key)[: job.depth]
        time[key] = tuple(value * draw(FINE) for value in values) * job.chains
    time["transfer"] = job.time.transfer * draw(FINE)
    return msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, **time))


def shortened(schedule, below):
    """The same with the times of a problem of layers.

    Each op ends when it did; times are in ticks of that problem.
    """
    per_tick = Fraction(*schedule.times.of_layers.per_tick)
    assume(per_tick.denominator == 1)

    def of_slices(*names):
        return {name: below.costs.sum_over_slices(name, schedule.layers_by_slice) for name in names}

    times = msgspec.structs.replace(
        below.times,
        overlap=schedule.times.overlap,
        **of_slices("forward", "backward_input", "backward_weight", "all_reduce"),
    )
    memory = below.memory and msgspec.structs.replace(
        below.memory, **of_slices("activation", "weight_stash")
    )
    seats, programs = [], []
    for number, seat in enumerate(schedule.seats):
        seats.append(msgspec.structs.replace(seat, program=number))
        ops = []
        for op in schedule.ops(seat.worker):
            if op.slice is None:
                ticks = times.optimizer_ticks(seat)
            else:
                ticks = times.duration_ticks(op.kind, op.slice, op.worker)
            start = op.end_ticks * int(per_tick) - ticks
            ops.append(ProgramOp(op.kind, op.slice, op.microbatch, start, op.pipeline))
        # An op that has become shorter may start after a reduction that overlaps it.
        programs.append(tuple(sorted(ops, key=lambda op: op.start_ticks)))
    shorter = msgspec.structs.replace(
        schedule, times=times, memory=memory, seats=tuple(seats), programs=tuple(programs)
    )
    ops = list(shorter.all_ops())
    if shorter.optimizer == "staggered":
        period = compute_period_ticks(ops)
    else:
        end = max(op.end_ticks for op in ops)
        period = end - min(op.start_ticks for op in ops)
    return msgspec.structs.replace(
        shorter, period_ticks=period, lower_bound_ticks=0, status="feasible"
    ), schedule.period_ticks * per_tick


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.data(),
    fine_jobs(),
    st.sampled_from(["fixed", "move"]),
    st.sampled_from(["split", "fused"]),
    st.sampled_from(["staggered", "synchronous"]),
)
def test_a_schedule_stays_one_with_times_rounded_down(data, job, layers, backward, optimizer):
    down = data.draw(failures(job))
    asked = PlanOptions(
        method="greedy", steps=2_000, layers=layers, backward=backward, optimizer=optimizer
    )
    try:
        schedule = plan_only(asked, job, down).schedule
    except (NoPlanError, JobError):
        return
    assume(schedule.times.of_layers)
    below = build_layered_problem(
        job, down, AllowedLayouts(layers=layers), backward=backward, optimizer=optimizer, down=True
    )
    shorter, longest = shortened(schedule, below)
    assert check(shorter) == [] and shorter.period_ticks <= longest
    bounding = build_layered_problem(
        without_reductions(job) if has_overlapping_reductions(job) else job,
        down,
        AllowedLayouts(layers=layers),
        backward=backward,
        optimizer=optimizer,
        down=True,
    )
    assert (
        layout_lower_bound(bounding).ticks * exact_decimal(bounding.tick_seconds)
        <= longest * exact_decimal(below.tick_seconds) * CLOSE
    )
    claimed = decode(encode(schedule))
    assert claimed == schedule
    assert schedule.lower_bound_ticks <= proven_bound(claimed).ticks <= schedule.period_ticks


def test_nothing_is_rounded_below_the_times_of_the_job():
    # Halves of a time of ten digits, and its sum, are in ticks of a millionth of the longest op.
    job = grid(
        2,
        1,
        1,
        times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 1.00000051\n",
        more="[placement]\nlayers = [2]\n",
    )
    tick = choose_tick(job, layer_costs(job))
    assert tick == exact_decimal(1.00000051) / MAX_TICKS
    question = AllowedLayouts(layers="move")
    above, below = (
        build_layered_problem(job, [Worker(0, 0)], question, down=down) for down in (False, True)
    )
    assert (
        layout_lower_bound(below).ticks * tick
        <= 2 * 3 + exact_decimal(1.00000051)
        <= layout_lower_bound(above).ticks * tick
    )
    schedule = plan_only(PlanOptions(layers="move", steps=10_000), job, [Worker(0, 0)]).schedule
    assert (
        schedule.seconds(schedule.lower_bound_ticks)
        <= 7.00000051
        <= schedule.seconds(schedule.period_ticks)
    )
