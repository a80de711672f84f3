"""From a job and its failures to a checked schedule."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from planner.baselines import one_f_one_b
from planner.bounds import lower_bound
from planner.cpsat.model import improve
from planner.dealing import deal
from planner.decompose import collapse
from planner.greedy import Policy, list_schedule
from planner.job import Job, require_known
from planner.problem import Problem, build_problem
from planner.retime import pull_late
from planner.solution import Solution, build_schedule, solution_period
from schedules.check import check
from schedules.memory import memory_peaks
from schedules.schedule import BackwardMode, OptimizerMode, Schedule, Worker

Method = Literal["cp-sat", "greedy", "1f1b"]
LARGEST_MODEL = 20_000
"""Compute ops, counted once per possible host, up to which CP-SAT is given the whole problem."""
FAULT_FREE_SHARE = 0.25
"""Share of the time limit that the fault-free plan, needed for comparison, may take."""

POLICIES = tuple(Policy(patience=patience, forward_order=order)
                 for patience in (0.0, 0.5, 1.0) for order in ("deepest", "oldest"))

Report = Callable[[str], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that passed the checker, and how it came about."""

    schedule: Schedule
    fault_free_period: float
    """Seconds, by the same method with no worker down."""
    solve_seconds: float
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
            "interrupted": self.interrupted,
            "moves": [{"worker": str(seat.worker), "role": str(seat.role)} for seat in schedule.moves],
        }


class _Search(msgspec.Struct, frozen=True):
    """A solution with the bound proven on the way."""

    solution: Solution
    lower_bound_ticks: int
    interrupted: bool = False


def plan_job(job: Job, failed: Sequence[Worker] = (), *, backward: BackwardMode | None = None,
             optimizer: OptimizerMode | None = None, method: Method = "cp-sat", time_limit: float = 10.0,
             roles: Mapping[Worker, Worker] | None = None, seed: int = 0, report: Report | None = None) -> Plan:
    """Plan one schedule within about `time_limit` seconds.

    `roles` maps live workers that take over another role to it. `backward` and `optimizer` are split and staggered
    unless given; fused and synchronous for 1f1b, which is defined so. Raises JobError when a failed worker is not in
    the job, NoPlanError when no schedule can exist.
    """
    began = time.monotonic()
    backward = backward or ("fused" if method == "1f1b" else "split")
    optimizer = optimizer or ("synchronous" if method == "1f1b" else "staggered")
    require_known(failed, job)
    tell = report or (lambda _: None)
    problem = build_problem(job, failed, backward=backward, optimizer=optimizer, roles=roles)
    share = time_limit * FAULT_FREE_SHARE if failed else 0.0
    search = _search(problem, method, began + time_limit - share, seed, tell)
    interrupted, fault_free = search.interrupted, None
    if failed:
        whole = build_problem(job, backward=backward, optimizer=optimizer)
        brief: Method = "greedy" if interrupted and method == "cp-sat" else method
        healthy = _search(whole, brief, time.monotonic() + share, seed, lambda _: None)
        interrupted = interrupted or healthy.interrupted
        fault_free = solution_period(whole, healthy.solution)
    schedule = build_schedule(problem, search.solution, lower_bound=search.lower_bound_ticks, method=method)
    violations = check(schedule)
    if violations:
        raise AssertionError(f"the planner made a schedule that breaks a rule: {violations[0]}")
    return Plan(schedule=schedule, solve_seconds=time.monotonic() - began, interrupted=interrupted,
                fault_free_period=schedule.seconds(schedule.period_ticks if fault_free is None else fault_free))


def _search(problem: Problem, method: Method, deadline: float, seed: int, tell: Report) -> _Search:
    """The best solution that the method finds until the deadline (a time.monotonic())."""
    collapsed = collapse(problem)
    if collapsed is not None:
        search = _search(collapsed.problem, method, deadline, seed, tell)
        return _Search(collapsed.expand(search.solution), search.lower_bound_ticks, search.interrupted)
    bound = lower_bound(problem)
    if method == "1f1b":
        return _Search(one_f_one_b(problem), bound)
    best, interrupted = _best_list_schedule(problem, bound, deadline, tell)
    if method == "cp-sat" and not interrupted:
        return _improved(problem, best, bound, deadline, seed, tell)
    return _Search(best, bound, interrupted)


def _candidates(problem: Problem) -> Iterator[Solution]:
    """The plans of all list schedulers, each also with its early ops pulled late."""
    for policy in POLICIES:
        plan = list_schedule(problem, policy, deal(problem, policy.dealing))
        yield plan
        if problem.optimizer == "staggered":
            yield pull_late(problem, plan)
    yield one_f_one_b(problem)


def _best_list_schedule(problem: Problem, bound: int, deadline: float, tell: Report) -> tuple[Solution, bool]:
    """The shortest of several list schedules, and whether Ctrl-C cut the choice short."""
    best: Solution | None = None
    shortest = 0
    longest_step = 0.0
    try:
        began = time.monotonic()
        for plan in _candidates(problem):
            period = solution_period(problem, plan)
            if best is None or period < shortest:
                best, shortest = plan, period
                tell(f"list scheduler: period {shortest * problem.tick_seconds:g} s, "
                     f"bound {bound * problem.tick_seconds:g} s")
            longest_step = max(longest_step, time.monotonic() - began)
            began = time.monotonic()
            if shortest <= bound or began + longest_step > deadline:
                break
    except KeyboardInterrupt:
        if best is None:
            raise
        return best, True
    assert best is not None
    return best, False


def _improved(problem: Problem, best: Solution, bound: int, deadline: float, seed: int, tell: Report) -> _Search:
    """Let CP-SAT work on the plan, unless it is optimal already or the model would be too large."""
    options = sum(len(problem.hosts(unit.stage, unit.pipeline)) for unit in problem.units()) * len(problem.kinds)
    period = solution_period(problem, best)
    if period <= bound or options > LARGEST_MODEL:
        return _Search(best, bound)
    try:
        result = improve(problem, best, lower_bound=bound, deadline=deadline, seed=seed,
                         report=lambda ticks: tell(f"CP-SAT: period {ticks * problem.tick_seconds:g} s"))
    except KeyboardInterrupt:
        return _Search(best, bound, interrupted=True)
    return _Search(result.solution, result.lower_bound_ticks, result.interrupted)


def peak_memory(schedule: Schedule) -> float | None:
    """The most that any worker holds at any time, in the job's unit; None where the job gives no memory."""
    if schedule.memory is None:
        return None
    return max(memory_peaks(schedule).values(), default=0) * schedule.memory.unit
