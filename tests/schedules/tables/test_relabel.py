"""Relabelling: valid for other failures, of the same period.

It is at the least cost, by enumeration.
"""

import subprocess
import sys
from itertools import permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.planner.plan import plan_job
from slipstream.schedules.check import check
from slipstream.schedules.schedule import (
    Grid,
    Memory,
    OpKind,
    ProgramOp,
    Schedule,
    Seat,
    Times,
    VirtualStage,
    Worker,
)
from slipstream.schedules.tables.pattern import dead_column, pattern_of, pipeline_classes
from slipstream.schedules.tables.relabel import (
    count_layers_to_load,
    missing_layers,
    relabel_schedule,
    solve_transport,
)
from tests.general import general_schedules
from tests.jobs import failures, grid, jobs
from tests.patience import SECONDS


def sets_of(workers, size):
    return st.sets(st.sampled_from(workers), min_size=size, max_size=size).map(sorted)


@settings(max_examples=150)
@given(
    st.data(),
    jobs(),
    st.sampled_from(["split", "fused"]),
    st.sampled_from(["staggered", "synchronous"]),
)
def test_relabelled_schedules_keep_every_rule(data, job, backward, optimizer):
    schedule = plan_job(
        job,
        data.draw(failures(job)),
        backward=backward,
        optimizer=optimizer,
        method="greedy",
        steps=4_000,
    ).schedule
    failed = data.draw(sets_of(list(schedule.grid.workers()), len(schedule.failed)))
    found = relabel_schedule(schedule, failed)
    if found is None:
        assert dead_column(failed, schedule.grid) is not None or schedule.times.slow
        return
    assert check(found) == []
    assert list(found.failed) == failed and found.period_ticks == schedule.period_ticks
    assert (
        found.rerouted == schedule.rerouted
        and found.lower_bound_ticks <= schedule.lower_bound_ticks
    )
    classes = pipeline_classes(schedule.grid, schedule.times, schedule.memory)
    if pattern_of(failed, classes) == pattern_of(schedule.failed, classes):
        assert found.moves == () and found.lower_bound_ticks == schedule.lower_bound_ticks


def price(schedule, players):
    """(layers to load, workers that change their role) of who plays what."""
    moved = [(worker, role) for role, worker in players.items() if role != worker]
    return sum(count_layers_to_load(schedule.grid, worker, role) for worker, role in moved), len(
        moved
    )


def cheapest(schedule, failed):
    """By trying every renumbering of equal pipelines and every way to deal the roles."""
    numbers = range(schedule.grid.pipelines)
    live = [worker for worker in schedule.grid.workers() if worker not in failed]
    best = None
    for renumbered in permutations(numbers):
        roles = [
            Worker(renumbered[seat.role.pipeline], seat.role.column) for seat in schedule.seats
        ]
        for dealt in permutations(roles):
            cost = price(schedule, dict(zip(dealt, live, strict=True)))
            best = cost if best is None else min(best, cost)
    return best


LAYERS = "[placement]\nlayers = [2, 1, 3]\n"


@pytest.mark.parametrize("job", [grid(2, 3, 2, more=LAYERS), grid(3, 2, 2)])
@pytest.mark.parametrize("empty", [[Worker(0, 1), Worker(1, 0)], [Worker(0, 0), Worker(0, 1)]])
def test_moves_are_the_cheapest(job, empty):
    schedule = plan_job(job, empty, method="greedy").schedule
    workers = list(schedule.grid.workers())
    for index, first in enumerate(workers):
        for second in workers[index + 1 :]:
            found = relabel_schedule(schedule, [first, second])
            if found is None:
                assert dead_column([first, second], schedule.grid) is not None
            else:
                assert price(schedule, found.player_of) == cheapest(schedule, {first, second})


def test_two_failures_of_a_stage_are_spread_by_one_load():
    schedule = plan_job(grid(3, 3, 3), [Worker(0, 1), Worker(1, 2)], method="greedy").schedule
    found = relabel_schedule(schedule, [Worker(0, 1), Worker(1, 1)])
    assert found is not None
    loads = [
        seat for seat in found.moves if count_layers_to_load(found.grid, seat.worker, seat.role)
    ]
    assert (
        len(loads) == len(found.moves) == 1
        and loads[0].worker.column == 2
        and loads[0].role.column == 1
    )


def test_slow_workers_are_replaced_by_others_but_never_replace_one():
    usual = "forward = 2\nbackward_input = 2\nbackward_weight = 2\n"
    job = grid(3, 2, 2, times=usual + "slow = {'0.0' = 1.5}\n")
    schedule = plan_job(job, [Worker(2, 1)], method="greedy").schedule
    found = relabel_schedule(schedule, [Worker(0, 0)])
    assert found is not None and check(found) == [] and found.moves[0].role == Worker(0, 0)
    assert found.lower_bound_ticks < schedule.lower_bound_ticks
    dead = plan_job(job, [Worker(0, 0)], method="greedy").schedule
    # The slow worker would have to take the place of 2.1.
    assert relabel_schedule(dead, [Worker(2, 1)]) is None


def test_only_as_many_failures_fit():
    schedule = plan_job(grid(3, 2, 2), [Worker(0, 0)], method="greedy").schedule
    with pytest.raises(
        ValueError, match="2 failed workers for a schedule with 1 roles without a worker"
    ):
        relabel_schedule(schedule, [Worker(0, 0), Worker(0, 1)])
    moved = relabel_schedule(schedule, [Worker(1, 1)])
    assert moved is not None
    with pytest.raises(ValueError, match="another order of its interchangeable pipelines"):
        relabel_schedule(moved, [Worker(0, 0)])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.data())
def test_transport_is_as_cheap_as_any_assignment(supply, data):
    units = [kind for kind, count in enumerate(supply) for _ in range(count)]
    assume(len(units) <= 6)
    wanted = data.draw(st.lists(st.integers(0, 2), min_size=len(units), max_size=len(units)))
    prices = data.draw(
        st.lists(st.lists(st.integers(-5, 5), min_size=3, max_size=3), min_size=4, max_size=4)
    )
    demand = {kind: wanted.count(kind) for kind in range(3)}
    plan = solve_transport(dict(enumerate(supply)), demand, lambda have, want: prices[have][want])
    costs = []
    for order in permutations(wanted):
        costs.append(sum(prices[a][b] for a, b in zip(units, order, strict=True)))
    best = min(costs)
    assert plan is not None and sum(prices[a][b] * count for a, b, count in plan) == best


def test_networkx_is_imported_with_a_table_and_not_for_a_plan():
    # It takes a tenth of a second, which a plan need not wait for and the first lookup of a
    # recovery must not.
    script = """if True:
        import sys
        from slipstream.planner.job.file import parse_job
        from slipstream.planner.plan import plan_job
        from slipstream.schedules.tables.table import Table, library
        plan_job(parse_job("pipelines = 2\\nstages = 2\\nmicrobatches = 2\\n[time]\\nforward = 1\\n"
                           "backward_input = [0, 1]\\nbackward_weight = 1"), method="greedy")
        assert "networkx" not in sys.modules
        Table.load(library("gpt-1.5b"))
        assert "networkx" in sys.modules
        """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=SECONDS)


# --- Layers held by whoever has room --------------------------------------------------------------


def own_roles(schedule):
    return all(seat.worker == seat.role for seat in schedule.seats)


@settings(max_examples=150)
@given(st.data(), general_schedules().filter(own_roles))
def test_relabelled_schedules_keep_every_rule_with_layers_anywhere(data, schedule):
    failed = data.draw(sets_of(list(schedule.grid.workers()), len(schedule.failed)))
    found = relabel_schedule(schedule, failed, held_elsewhere=data.draw(st.booleans()))
    if found is None:
        assert (
            dead_column(failed, schedule.grid) is not None or schedule.times.slow or schedule.memory
        )
        return
    assert check(found) == []
    assert list(found.failed) == failed and found.period_ticks == schedule.period_ticks
    holdings = sorted(schedule.held_layers_of_seat(seat) for seat in schedule.seats)
    assert sorted(found.held_layers_of_seat(seat) for seat in found.seats) == holdings


def test_layers_go_only_where_there_is_room():
    # Worker 0.1 is down and 0.0 holds all layers; where 0.0 is down, 0.1 must hold them, if it has
    # room.
    for room, possible in ((9, True), (8, False)):
        schedule = one_for_both(room)
        assert check(schedule) == []
        found = relabel_schedule(schedule, [Worker(0, 0)], held_elsewhere=True)
        assert (found is not None) == possible
        if found is not None:
            assert found.held_layers(Worker(0, 1)) == ((0, 2),) and check(found) == []
            assert [sorted(missing_layers(found, seat)) for seat in found.seats] == [[0]]


def one_for_both(room):
    """One pipeline of two stages, of which worker 0.0 is left.

    `room` is that of 0.1 beside its own layer, which weighs 5.
    """
    grid = Grid(
        pipelines=1,
        columns=2,
        microbatches=(1,),
        stages=(VirtualStage(column=0), VirtualStage(column=1)),
    )
    ops = [
        ("F", 0, 0, 0),
        ("F", 1, 0, 1),
        ("I", 1, 0, 2),
        ("I", 0, 0, 3),
        ("W", 1, 0, 4),
        ("W", 0, 0, 5),
        ("A", 0, None, 6),
        ("A", 1, None, 7),
        ("O", None, None, 8),
    ]
    return Schedule(
        job="one for both",
        tick_seconds=1.0,
        grid=grid,
        failed=(Worker(0, 1),),
        backward="split",
        times=Times(
            forward=(1, 1),
            backward_input=(1, 1),
            backward_weight=(1, 1),
            all_reduce=(1, 1),
            optimizer=(1, 1),
            transfer=0,
            optimizer_of_layer=(1, 1),
        ),
        optimizer="staggered",
        memory=Memory(
            unit=1.0, capacity=(9, room), activation=(2, 2), weight_stash=(1, 1), weights=(5, 5)
        ),
        seats=(Seat(Worker(0, 0), Worker(0, 0), 0, ((0, 2),)),),
        programs=(
            tuple(
                ProgramOp(OpKind(kind), slice, number, start) for kind, slice, number, start in ops
            ),
        ),
        period_ticks=10,
        lower_bound_ticks=10,
        status="optimal",
        method="hand",
    )
