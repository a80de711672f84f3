"""The list scheduler is never better than the optimum.

Interpreted it is as compiled, and never stuck where a plan exists.
"""

import itertools
from collections import Counter
from typing import get_args
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner import loops
from slipstream.planner.job.file import parse_job
from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.memory import activation_memory, stash_memory
from slipstream.planner.model.problem import Bound, NoPlanError, Problem
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.search.list_scheduler import (
    ASSIGNMENT_RULES,
    DispatchRule,
    ListScheduler,
    PlaceChange,
    ReroutedTurn,
    assign_hosts,
)
from slipstream.schedules.check import check
from slipstream.schedules.schedule import OpKind, Worker
from tests.jobs import failures, grid, jobs
from tests.planner.search.brute_force import optimal_period
from tests.planner.search.test_optimal import SHARED, tiny

MODES = st.tuples(
    st.sampled_from(["split", "fused"]), st.sampled_from(["staggered", "synchronous"])
)
SHARES = st.sampled_from([0.0, 0.5, 1.0])


def places(problem: Problem):
    """Any places of single micro-batches, most often none."""
    counts = problem.grid.microbatches
    place = st.integers(0, len(counts) - 1).flatmap(
        lambda pipeline: st.builds(
            PlaceChange,
            st.just(pipeline),
            st.integers(0, counts[pipeline] - 1),
            st.sampled_from([-2.0, 0.5, 3.0]),
        )
    )
    return st.just(()) | st.lists(place, max_size=3).map(tuple)


def rules(problem: Problem):
    """Any dispatch rule for a problem."""
    return st.builds(
        DispatchRule,
        lookahead=SHARES,
        forward_lookahead=SHARES,
        load_share=SHARES,
        forward_order=st.sampled_from(["deepest", "oldest"]),
        in_flight=st.none() | st.tuples(*[st.integers(1, 4)] * len(problem.grid.stages)),
        fill_wait=st.none() | st.tuples(*[st.integers(0, 9)] * len(problem.grid.stages)),
        places=places(problem),
        gradient_places=places(problem),
        ignore_transfers=st.booleans(),
        make_room=st.booleans(),
        rerouted=st.sampled_from(get_args(ReroutedTurn)),
        eager_weights=st.booleans() if problem.backward == "split" else st.just(False),
    )


def listed(problem: Problem, assignment, rule: DispatchRule):
    scheduler = ListScheduler(ProblemArrays(problem, assign_hosts(problem, assignment)))
    return scheduler.evaluate_rule(rule), scheduler.last_solution()


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    jobs(max_pipelines=3, max_stages=3, max_microbatches=4),
    MODES,
    st.sampled_from(ASSIGNMENT_RULES),
)
def test_interpreted_and_compiled_make_the_same_schedules(data, job, modes, assignment):
    problem = build_problem(job, data.draw(failures(job)), backward=modes[0], optimizer=modes[1])
    rule = data.draw(rules(problem))
    compiled = listed(problem, assignment, rule)
    with mock.patch.object(loops, "is_plain_python", lambda: True):
        plain = listed(problem, assignment, rule)
    assert compiled[0] == plain[0] and compiled[1].hosts == plain[1].hosts
    assert list(compiled[1].start_by_key.items()) == list(plain[1].start_by_key.items())


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(ASSIGNMENT_RULES))
def test_interpreted_it_keeps_every_rule_and_never_beats_the_optimum(data, assignment):
    # With all choices of hosts, only the smallest can be enumerated.
    sharing = assignment == "by-speed"
    job, failed, backward, optimizer = data.draw(tiny(SHARED) if sharing else tiny())
    problem = build_problem(job, failed, backward=backward, optimizer=optimizer, sharing=sharing)
    with mock.patch.object(loops, "is_plain_python", lambda: True):
        period, solution = listed(problem, assignment, data.draw(rules(problem)))
    optimum = optimal_period(problem)
    assert (
        check(
            build_schedule(
                problem, solution, bound=Bound(optimum, problem.bound_scope), method="greedy"
            )
        )
        == []
    )
    assert period == solution_period(solution) >= optimum


@pytest.mark.parametrize(("places", "turn"), [(-3.5, 7), (-1.5, 5), (0.5, 4), (2.5, 2)])
def test_a_micro_batch_goes_as_many_places_before_its_turn(places, turn):
    """Places alone decide who is first on the first stage.

    Half a place is between two.
    """
    problem = build_problem(
        parse_job(
            "pipelines = 1\nstages = 2\nmicrobatches = 8\n[time]\nforward = 1\n"
            "backward_input = 1\nbackward_weight = 1\n"
        )
    )
    _, solution = listed(problem, "round-robin", DispatchRule(places=(PlaceChange(0, 4, places),)))
    starts = {
        microbatch: start
        for (kind, slice_, _, microbatch), start in solution.start_by_key.items()
        if kind == OpKind.F and slice_ == 0
    }
    expected = [0, 1, 2, 3, 5, 6, 7]
    expected.insert(turn, 4)
    assert sorted(starts, key=starts.__getitem__) == expected


@st.composite
def scarce(draw):
    """A job whose workers have about the least memory with which there is a plan.

    That least is by column.
    """
    pipelines, stages, chunks = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )
    order = draw(
        st.sampled_from(["linear", "interleaved", "v", *([] if stages % 2 else ["bidirectional"])])
    )
    depth = stages if order == "bidirectional" else stages * chunks
    amounts = st.lists(st.integers(0, 4), min_size=depth, max_size=depth)
    activation, stash = draw(amounts), draw(amounts)
    lines = [
        f"pipelines = {pipelines}",
        f"stages = {stages}",
        f"microbatches = {draw(st.integers(1, 5))}",
        "[placement]",
        f"order = '{order}'",
        *([] if order == "bidirectional" else [f"chunks = {chunks}"]),
        "[time]",
        f"forward = {draw(st.integers(1, 3))}",
        f"backward_input = {draw(st.integers(1, 3))}",
        f"backward_weight = {draw(st.integers(1, 3))}",
        f"transfer = {draw(st.integers(0, 2))}",
        "[memory]",
        f"activation = {activation}",
        f"weight_stash = {stash}",
    ]
    backward = draw(st.sampled_from(["split", "fused"]))
    ample = build_problem(parse_job("\n".join([*lines, "capacity = 1000"])), backward=backward)
    least = [
        round(least_by_enumeration(ample, column) * ample.memory.unit) for column in range(stages)
    ]
    capacity = [max(0, need + draw(st.sampled_from([-1, 0, 0, 0, 1, 2]))) for need in least]
    return parse_job("\n".join([*lines, f"capacity = {capacity}"])), backward, capacity, least


def least_by_enumeration(problem: Problem, column: int) -> int:
    """The least room with which a worker can run one micro-batch.

    It is in memory units, over every order of its ops.
    """
    grid = problem.grid
    needs = []
    for number in range(min(grid.chains, grid.microbatches[0])):
        stages = grid.stages_of_microbatch(number)
        own_stages = [stage for stage in stages if grid.stages[stage].column == column]
        needs.append(least_of_chain(problem, own_stages))
    return max(needs)


def least_of_chain(problem: Problem, stages) -> int:
    """The least room for the forwards and gradients of one micro-batch in their order.

    Weight gradients may come at any time after.
    """
    forwards = [(OpKind.F, stage) for stage in stages]
    flow = forwards + [(problem.gradient_kind, stage) for stage in reversed(stages)]
    if problem.backward == "fused" or not stages:
        return most_held(problem, flow)
    found = []
    for places in itertools.product(range(len(flow) + 1), repeat=len(stages)):
        ops = [[] for _ in range(len(flow) + 1)]
        for place, stage in zip(places, stages, strict=True):
            ops[place].append((OpKind.W, stage))
        order = [
            op for index, behind in enumerate(ops) for op in [*behind, *flow[index : index + 1]]
        ]
        if all(order.index((OpKind.I, stage)) < order.index((OpKind.W, stage)) for stage in stages):
            found.append(most_held(problem, order))
    return min(found)


def most_held(problem: Problem, order) -> int:
    memory = peak = 0
    for kind, stage in order:
        if kind is OpKind.F:
            memory += activation_memory(problem, stage)
        elif kind is OpKind.W:
            memory -= stash_memory(problem, stage)
        else:
            memory += stash_memory(problem, stage) - activation_memory(problem, stage)
        peak = max(peak, memory)
    return peak


INTERLEAVED = """
pipelines = 1
stages = 2
microbatches = 4
[placement]
order = "interleaved"
chunks = 2
[time]
forward = 1
backward_input = 1
backward_weight = 1
[memory]
capacity = 4
activation = 1
weight_stash = 3
"""


@settings(max_examples=300, deadline=None)
@given(st.data(), scarce(), st.sampled_from(["staggered", "synchronous"]))
def test_wherever_there_is_room_for_one_microbatch_there_is_a_plan(data, case, optimizer):
    job, backward, capacity, least = case
    down = data.draw(failures(job))
    try:
        problem = build_problem(job, down, backward=backward, optimizer=optimizer)
    except NoPlanError as refusal:
        assert "no schedule can run it" in str(refusal)
        assert any(room < need for room, need in zip(capacity, least, strict=True))
        return
    if any(room < need for room, need in zip(capacity, least, strict=True)):
        # Several holders may take turns: one runs a virtual stage that another has no room for
        # beside its own.
        assert problem.sharing and any(len(holders) > 1 for holders in problem.holders_by_slice)
        assert len(job.columns) > job.stages
        return
    _, solution = listed(
        problem, data.draw(st.sampled_from(ASSIGNMENT_RULES)), data.draw(rules(problem))
    )
    assert check(build_schedule(problem, solution, method="greedy")) == []


def test_a_stash_larger_than_the_activation_waits_for_weight_gradients():
    """Both micro-batches of a worker overlap only just.

    It has room for the stash of one stage beside one activation.
    """
    problem = build_problem(parse_job(INTERLEAVED))
    _, solution = listed(problem, "least-loaded", DispatchRule())
    assert check(build_schedule(problem, solution, method="greedy")) == []
    with pytest.raises(NoPlanError, match=r"has room for 3, but one micro-batch needs 4 there"):
        build_problem(parse_job(INTERLEAVED.replace("capacity = 4", "capacity = 3")))


@pytest.mark.parametrize(
    ("order", "down"), list(itertools.product(("interleaved", "v", "bidirectional"), (1, 2, 3)))
)
def test_the_least_loaded_share_what_dead_workers_ran_at_all_stages(order, down):
    """No worker runs more than the mean of its holders, rounded up.

    Those hold the same layers.
    """
    chunks = "" if order == "bidirectional" else "chunks = 2\n"
    job = grid(4, 4, 16, more=f"[placement]\norder = '{order}'\n{chunks}")
    failed = [Worker(pipeline, pipeline + 1) for pipeline in range(down)]
    problem = build_problem(job, failed)
    hosts = assign_hosts(problem, "least-loaded")
    loads = Counter(hosts.values())
    for root in set(problem.reduction_root):
        holders = [
            worker
            for worker in problem.live_workers
            if problem.reduction_root[worker.column] == root
        ]
        total = sum(loads[worker] for worker in holders)
        assert max(loads[worker] for worker in holders) == -(-total // len(holders))
