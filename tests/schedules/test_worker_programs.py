"""What each worker must know of a schedule."""

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import slipstream.schedules.library as library
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.graph import order_transfers, pipeline_groups, programs_of
from slipstream.schedules.schedule import OpKind, Scope, Worker
from slipstream.schedules.tables.pattern import pipeline_classes
from slipstream.schedules.tables.relabel import relabel_schedule, renumber_pipelines
from slipstream.schedules.tables.table import Table
from slipstream.schedules.worker_programs import (
    _is_in_program_order,
    _number_crossings,
    _order_by_graph,
    _places_by_op,
    assemble_worker_schedule,
    crossings_by_worker,
    divide_schedule,
)
from tests.generate import BROKEN, HEALTHY, by_hand
from tests.generate import schedules as some_schedules

LIBRARY = sorted(Path(library.__path__[0]).iterdir())


def tables():
    return [folder for folder in LIBRARY if (folder / "index.json").exists()]


def parts_of(schedule, ties=(), alike=None):
    divided = divide_schedule(schedule, alike, ties=ties)
    return {worker: assemble_worker_schedule(divided.failed, share, divided.contents) for worker,
            share in divided.shares.items()}


def untimed(op):
    """An op, and how long it takes."""
    return replace(op, start_ticks=0, end_ticks=op.end_ticks - op.start_ticks)


def require_parts(schedule, alike=None):
    """Each worker knows of itself what the schedule says, and tensors are the same at both ends, in an order that all
    can follow."""
    parts, everyone = parts_of(schedule, alike=alike), [seat.worker for seat in schedule.seats]
    sent, taken = {}, {}
    for worker, part in parts.items():
        assert list(part.members) == everyone
        assert list(map(untimed, part.ops(worker))) == list(map(untimed, schedule.ops(worker)))
        assert part.held_layers(worker) == schedule.held_layers(worker)
        assert part.layers_by_slice == schedule.layers_by_slice
        for op in part.ops(worker):
            if op.microbatch is not None:
                assert tuple(part.route_of(op.pipeline, op.microbatch)) == tuple(schedule.route_of(op.pipeline,
                                                                                               op.microbatch))
        for one in part.crossings:
            (sent if one.source == worker else taken)[one.source, one.target, one.number] = one
            assert worker in (one.source, one.target)
    assert sent == taken
    for group in pipeline_groups(schedule):
        mine = [one for one in sent.values() if schedule.seat_of[one.source].role.pipeline in group]
        assert sorted(one.number for one in mine) == list(range(len(mine)))
        assert _is_in_program_order(sorted(mine, key=lambda one: one.number))
    programs = programs_of(schedule)
    whole = order_transfers(schedule, programs)
    assert {one[:6] for one in whole} == {(one.tensor, one.slice, one.pipeline, one.microbatch, one.source, one.target)
                                          for one in sent.values()}
    for one in sent.values():
        makes, takes = programs[one.source][one.made], programs[one.target][one.taken]
        assert takes.slice == one.slice and (makes.pipeline, makes.microbatch) == (takes.pipeline, takes.microbatch)
        assert (makes.kind is OpKind.F) == (takes.kind is OpKind.F) == (one.tensor == "activation")
    for layers in {schedule.layers_of(op.slice) for op in schedule.all_ops() if op.kind is OpKind.A}:
        holders = {op.worker for op in schedule.all_ops()
                   if op.kind is OpKind.A and schedule.layers_of(op.slice) == layers}
        assert all(dict(parts[worker].sums)[layers] == tuple(sorted(holders)) for worker in holders)


@given(some_schedules())
@settings(max_examples=60, deadline=None)
def test_parts_say_what_the_schedule_says(schedule):
    require_parts(schedule)


@given(some_schedules(), st.randoms())
@settings(max_examples=30, deadline=None)
def test_what_was_divided_before_pipelines_got_other_numbers_need_not_be_again(schedule, random):
    classes = pipeline_classes(schedule.grid, schedule.times, schedule.memory)
    numbers = {}
    for kind in set(classes):
        alike = [pipeline for pipeline, one in enumerate(classes) if one == kind]
        numbers |= zip(alike, random.sample(alike, len(alike)), strict=True)
    assume(all(seat.worker == seat.role for seat in schedule.seats))
    down = tuple(sorted(Worker(numbers[pipeline], column) for pipeline, column in schedule.failed))
    other, ties = relabel_schedule(schedule, down), [[Worker(0, 0), Worker(1, 0)]]
    before = divide_schedule(schedule, ties=ties), renumber_pipelines(schedule, down)
    require_parts(other, before)
    plain, found = divide_schedule(other, ties=ties), divide_schedule(other, before, ties=ties)
    assert found.failed == plain.failed
    for worker, share in plain.shares.items():
        mine, its = (assemble_worker_schedule(one.failed, one.shares[worker], one.contents) for one in (found, plain))
        assert replace(mine, crossings=()) == replace(its, crossings=())
        assert {replace(one, number=0) for one in mine.crossings} == {replace(one, number=0) for one in its.crossings}
        assert found.shares[worker].work in before[0].contents and share.sums == found.shares[worker].sums


@pytest.mark.parametrize("folder", tables(), ids=lambda one: one.name)
def test_of_tables_with_failures_and_moved_layers(folder):
    table = Table.load(folder)
    whole = table.lookup(()).schedule
    last = Worker(whole.grid.pipelines - 1, whole.grid.columns - 1)
    for settled in (False, True):
        found = table.lookup((last,), settled=settled)
        if found is not None:
            require_parts(found.schedule)


def test_numbers_put_no_circle_into_what_workers_wait_for():
    for programs in (HEALTHY, BROKEN):
        schedule = by_hand(programs)
        found = [one for worker, mine in crossings_by_worker(schedule, range(2)).items() for one in mine
                 if one.source == worker]
        assert _is_in_program_order(sorted(found, key=lambda one: one.number))
        places = _places_by_op(schedule, schedule.seats)
        assert len(_number_crossings(schedule, places, _order_by_graph(schedule, range(2), places),
                                     range(2))) == len(found)
        swapped = _number_crossings(schedule, places, _order_by_graph(schedule, range(2), places)[::-1], range(2))
        assert not _is_in_program_order(swapped)


def test_who_only_waits_for_a_failure_elsewhere_keeps_what_it_has():
    """Planned times are nobody's content: a plan with the same order of ops, later, changes nothing."""
    schedule = by_hand(HEALTHY)
    programs = tuple(tuple(replace(op, start_ticks=3 * op.start_ticks + 100) for op in program)
                     for program in schedule.programs)
    assert divide_schedule(replace(schedule, programs=programs, bound_scope=Scope.STAGES)) == divide_schedule(schedule)


def test_healthy_pipelines_share_their_contents():
    """A failure changes what its pipelines run; all else keeps its content."""
    schedule = by_hand(HEALTHY)
    divided = divide_schedule(schedule)
    assert divided.shares[Worker(0, 0)][1:] == ((0,), *divided.shares[Worker(1, 0)][2:])
    assert divided.shares[Worker(1, 0)].pipelines == (1,)
    assert len(divided.contents) == 1 + 2 * len({seat.worker.column for seat in schedule.seats})


def test_a_failure_changes_no_sums_of_those_who_are_left():
    whole, left = divide_schedule(by_hand(HEALTHY)), divide_schedule(by_hand(BROKEN))
    assert left.failed
    assert all(share.sums == whole.shares[worker].sums for worker, share in left.shares.items())


def test_who_shares_parameters_with_other_layers_is_told():
    schedule = by_hand(HEALTHY)
    tied = [Worker(0, 0), Worker(1, 0), Worker(1, 1)]
    parts = parts_of(schedule, [tied])
    assert parts[Worker(1, 1)].ties == parts[Worker(0, 0)].ties == ((0, tuple(tied)),)
    assert parts[Worker(0, 1)].ties == ()


def test_what_cannot_be_read_again_is_not_guessed():
    schedule = decode(encode(by_hand(HEALTHY)))
    divided = divide_schedule(schedule)
    with pytest.raises(KeyError):
        assemble_worker_schedule((), divided.shares[Worker(0, 0)], {})
