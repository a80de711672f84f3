"""Where roles move, holders of a stage lie on as many machines as can be.

This costs nothing.
"""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.normalise import normal_form
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_job
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.relabel import missing_layers, relabel_schedule
from tests.general import general_schedules
from tests.jobs import failures, grid, jobs


def together(schedule, nodes):
    """Pairs of workers that hold the same layers on one machine."""
    node = {worker: number for number, workers in enumerate(nodes) for worker in workers}
    holders = Counter(
        (schedule.held_layers_of_seat(seat), node[seat.worker])
        for seat in schedule.seats
        if seat.worker in node
    )
    return sum(count * (count - 1) // 2 for count in holders.values())


def loaded(schedule):
    return sum(len(missing_layers(schedule, seat)) for seat in schedule.seats)


def own_roles(schedule):
    return all(seat.worker == seat.role for seat in schedule.seats)


def in_turns(schedule, machines):
    workers = list(schedule.grid.workers())
    return [workers[first::machines] for first in range(machines)]


@settings(max_examples=100)
@given(st.data(), jobs(max_pipelines=4), st.integers(1, 4))
def test_it_costs_nothing_and_is_never_worse(data, job, machines):
    schedule = plan_job(job, data.draw(failures(job)), method="greedy", steps=4_000).schedule
    failed = data.draw(
        st.sets(
            st.sampled_from(list(schedule.grid.workers())),
            min_size=len(schedule.failed),
            max_size=len(schedule.failed),
        )
    )
    nodes = in_turns(schedule, machines)
    usual, apart = (
        relabel_schedule(schedule, failed),
        relabel_schedule(schedule, failed, nodes=nodes),
    )
    assert (usual is None) == (apart is None)
    if usual is None or apart is None:
        return
    assert (
        check(apart) == []
        and apart.period_ticks == usual.period_ticks
        and loaded(apart) == loaded(usual)
    )
    assert apart.lower_bound_ticks == usual.lower_bound_ticks
    assert together(apart, nodes) <= together(usual, nodes)
    if not any(seat.worker.column != seat.role.column for seat in usual.seats):
        assert apart == usual


@settings(max_examples=50)
@given(st.data(), general_schedules().filter(own_roles), st.integers(1, 4))
def test_layers_that_have_moved_stay_within_the_room_of_a_worker(data, schedule, machines):
    failed = data.draw(
        st.sets(
            st.sampled_from(list(schedule.grid.workers())),
            min_size=len(schedule.failed),
            max_size=len(schedule.failed),
        )
    )
    apart = relabel_schedule(
        schedule, failed, held_elsewhere=True, nodes=in_turns(schedule, machines)
    )
    assert apart is None or check(apart) == []


@pytest.mark.parametrize("lost", range(4))
def test_holders_of_a_stage_share_no_machine_where_they_need_not(lost):
    """Each machine has a pipeline.

    Three workers of a stage are lost; the first that could take over are of one.
    """
    nodes = []
    for pipeline in range(4):
        nodes.append([Worker(pipeline, stage) for stage in range(4)])
    failed = [Worker(pipeline, lost) for pipeline in range(3)]
    schedule = normal_form(grid(4, 4, 4), 3, PlanOptions(method="greedy", steps=400_000)).schedule
    usual, apart = (
        relabel_schedule(schedule, failed),
        relabel_schedule(schedule, failed, nodes=nodes),
    )
    assert usual is not None and apart is not None
    assert together(usual, nodes) > together(apart, nodes) == least(schedule, failed, nodes) == 0


def least(schedule, failed, nodes):
    """The least over all ways to fill the vacant places of the lost stage.

    Live workers of stages with one to spare fill them.
    """
    vacant = Counter(role.column for role in schedule.failed)
    (column,) = {worker.column for worker in failed}
    gives = {stage: count for stage, count in vacant.items() if stage != column}
    live = [worker for worker in schedule.grid.workers() if worker not in failed]
    best = None
    for movers in combinations(
        [worker for worker in live if worker.column in gives], sum(gives.values())
    ):
        if Counter(worker.column for worker in movers) != gives:
            continue
        count = Counter()
        for worker in live:
            node = next(number for number, workers in enumerate(nodes) if worker in workers)
            count[column if worker in movers else worker.column, node] += 1
        pairs = sum(number * (number - 1) // 2 for number in count.values())
        best = pairs if best is None else min(best, pairs)
    return best
