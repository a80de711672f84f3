"""The answer of `slipstream plan --json`."""

from fractions import Fraction

from slipstream.planner.job.file import Job
from slipstream.planner.model.work_bounds import ticks_of_work
from slipstream.planner.plan import Plan
from slipstream.planner.recompute import Recomputation
from slipstream.planner.transition import BANDWIDTH, pays_after_iterations, transition
from slipstream.schedules.memory import memory_peaks
from slipstream.schedules.schedule import Schedule


def plan_report(plan: Plan, job: Job, bandwidth: float = BANDWIDTH,
                again: Recomputation | None = None) -> dict[str, object]:
    """Durations in seconds, memory in the job's unit, bandwidth in bytes a second for each rank.

    `again`: where the planner has chosen what is computed again.
    """
    schedule, moved = plan.schedule, transition(plan.schedule, job, bandwidth)
    return {
        "period": plan.period,
        "lower_bound": schedule.seconds(schedule.lower_bound_ticks),
        "gap": schedule.gap,
        "status": schedule.status,
        "bound_scope": schedule.scope,
        "solve_seconds": round(plan.solve_seconds, 3),
        "fault_free_period": plan.fault_free_period,
        "fault_free_bound": plan.fault_free.bound if plan.fault_free else None,
        "rerouted": schedule.rerouted,
        "shed": schedule.shed,
        "peak_memory": peak_memory(schedule),
        "evidence": plan.evidence,
        "interrupted": plan.interrupted,
        "moves": [{"worker": str(seat.worker), "role": str(seat.role)} for seat in schedule.moves],
        "work_bound": schedule.seconds(1) * float(shared_ticks(schedule)),
        "holds": {str(seat.worker): [list(layers) for layers in schedule.holds(seat.worker)]
                  for seat in schedule.seats},
        "layers_moved": moved.layers,
        "bytes_moved": moved.bytes,
        "seconds_to_move": moved.seconds,
        "fixed_period": plan.fixed_period or plan.period,
        "pays_after_iterations": pays_after_iterations(plan, moved),
        "recomputed_stages": None if again is None else list(again.stages),
        "quick_period": None if again is None else again.period,
        "quick_period_without_recomputation": None if again is None else again.without,
    }


def shared_ticks(schedule: Schedule) -> Fraction:
    """In how many ticks the live workers together do the work of an iteration, each at its speed."""
    grid, times = schedule.grid, schedule.times
    stages = range(grid.depth)  # those of the other chains are copies
    work = sum(times.forward[stage] + times.backward_input[stage] + times.backward_weight[stage] for stage in stages)
    return ticks_of_work(work * grid.total_microbatches,
                         [times.per_mille_of.get(seat.worker, 1000) for seat in schedule.seats])


def peak_memory(schedule: Schedule) -> float | None:
    """The most that any worker holds at any time, in the job's unit; None where the job gives no memory."""
    if schedule.memory is None:
        return None
    return max(memory_peaks(schedule).values(), default=0) * schedule.memory.unit
