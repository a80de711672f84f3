"""From a job and its failures to a checked schedule."""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from planner.interrupt import interruptible
from planner.job.file import Job, require_known
from planner.model.assemble import build_schedule, period
from planner.model.problem import Problem, build_problem
from planner.progress import Report
from planner.search.solve import Method, Solved, solve
from schedules.check import check
from schedules.memory import memory_peaks
from schedules.schedule import BackwardMode, OptimizerMode, Schedule, Worker

FAULT_FREE_SHARE = 0.15
"""Share of the time limit that the fault-free plan, needed for comparison, may take."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that passed the checker, and how it came about."""

    schedule: Schedule
    fault_free_period: float
    """Seconds, by the same method with no worker down."""
    solve_seconds: float
    evidence: str | None = None
    """Where the period is above the bound: which of the two is likely to blame, and why."""
    interrupted: bool = False
    """The search was stopped by Ctrl-C; the schedule is the best one found until then."""

    def report(self) -> dict[str, object]:
        """The answer of `slipstream plan --json`; durations in seconds, memory in the job's unit."""
        schedule = self.schedule
        return {
            "period": schedule.seconds(schedule.period_ticks),
            "lower_bound": schedule.seconds(schedule.lower_bound_ticks),
            "gap": schedule.gap,
            "status": schedule.status,
            "solve_seconds": round(self.solve_seconds, 3),
            "fault_free_period": self.fault_free_period,
            "rerouted": schedule.rerouted,
            "peak_memory": peak_memory(schedule),
            "evidence": self.evidence,
            "interrupted": self.interrupted,
            "moves": [{"worker": str(seat.worker), "role": str(seat.role)} for seat in schedule.moves],
        }


def plan_job(job: Job, failed: Sequence[Worker] = (), *, backward: BackwardMode | None = None,
             optimizer: OptimizerMode | None = None, method: Method = "cp-sat", time_limit: float = 10.0,
             roles: Mapping[Worker, Worker] | None = None, seed: int = 0, report: Report | None = None) -> Plan:
    """Plan one schedule within about `time_limit` seconds.

    `roles` maps live workers that take over another role to it. `backward` and `optimizer` are split and staggered
    unless given; fused and synchronous for 1f1b, which is defined so. Raises JobError when a failed worker is not in
    the job, NoPlanError when no schedule can exist.
    """
    began = time.monotonic()
    require_known(failed, job)
    tell = report or (lambda _: None)
    with collector_at_rest(), interruptible() as stop:
        problem = problem_for(job, failed, method, backward, optimizer, roles)
        share = time_limit * FAULT_FREE_SHARE if failed else 0.0
        solved = solve(problem, method, began + time_limit - share, seed, tell, stop)
        fault_free = None
        if failed:
            whole = problem_for(job, (), method, backward, optimizer)
            healthy = solve(whole, method, time.monotonic() + share, seed, lambda _: None, stop)
            fault_free = period(whole, healthy.pieces, healthy.deadlines)
        interrupted = stop.is_set()
        schedule = checked(problem, solved, method)
    return Plan(schedule=schedule, solve_seconds=time.monotonic() - began, interrupted=interrupted,
                evidence=None if schedule.status == "optimal" else solved.evidence or None,
                fault_free_period=schedule.seconds(fault_free or schedule.period_ticks))


def problem_for(job: Job, failed: Sequence[Worker], method: Method, backward: BackwardMode | None,
                optimizer: OptimizerMode | None, roles: Mapping[Worker, Worker] | None = None) -> Problem:
    """The problem that a method is to solve, in its usual modes unless others are given. Raises NoPlanError."""
    usual = method == "1f1b"
    return build_problem(job, failed, backward=backward or ("fused" if usual else "split"),
                         optimizer=optimizer or ("synchronous" if usual else "staggered"), roles=roles)


def checked(problem: Problem, solved: Solved, method: Method) -> Schedule:
    """The schedule of what was solved. That it passes the checker is made sure."""
    schedule = build_schedule(problem, solved.pieces, lower_bound=solved.lower_bound_ticks, method=method,
                              deadlines=solved.deadlines)
    violations = check(schedule)
    if violations:
        raise AssertionError(f"the planner made a schedule that breaks a rule: {violations[0]}")
    return schedule


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """A large plan is millions of small objects without a cycle; looking for one takes a quarter of the time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def peak_memory(schedule: Schedule) -> float | None:
    """The most that any worker holds at any time, in the job's unit; None where the job gives no memory."""
    if schedule.memory is None:
        return None
    return max(memory_peaks(schedule).values(), default=0) * schedule.memory.unit
