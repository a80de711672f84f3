"""What each worker must know of a schedule."""

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import slipstream.schedules.library as library
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.crossings import (
    _is_in_program_order,
    _number_crossings,
    _order_by_graph,
    _places_by_op,
    crossings_by_worker,
)
from slipstream.schedules.program import build_program
from slipstream.schedules.schedule import Scope, Worker
from slipstream.schedules.shares import assemble_program, divide_schedule
from slipstream.schedules.tables.pattern import pipeline_classes
from slipstream.schedules.tables.relabel import relabel_schedule, renumber_pipelines
from slipstream.schedules.tables.table import Table
from tests.generate import BROKEN, HEALTHY, by_hand
from tests.generate import schedules as some_schedules

LIBRARY = sorted(Path(library.__path__[0]).iterdir())


def tables():
    return [folder for folder in LIBRARY if (folder / "index.json").exists()]


def parts_of(schedule, ties=(), alike=None):
    divided = divide_schedule(schedule, alike, ties=ties)
    return {
        worker: assemble_program(divided.failed, share, divided.contents)
        for worker, share in divided.shares.items()
    }


def require_parts(schedule, alike=None, ties=()):
    """Each worker gets the program that it would have of the whole schedule.

    Only the numbers of tensors may differ.
    """
    for worker, part in parts_of(schedule, ties, alike).items():
        whole = build_program(schedule, worker, ties)
        # Tensors that are planned for the same instant may have another order.
        if alike is not None:
            assert sorted(map(unnumbered, part.instructions)) == sorted(
                map(unnumbered, whole.instructions)
            )
            assert part.ops == whole.ops
            part, whole = replace(part, instructions=()), replace(whole, instructions=())
        assert part == whole


def unnumbered(instruction):
    return str(replace(instruction, number=0, frees=0))


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
        alike = [pipeline for pipeline, class_ in enumerate(classes) if class_ == kind]
        numbers |= zip(alike, random.sample(alike, len(alike)), strict=True)
    assume(all(seat.worker == seat.role for seat in schedule.seats))
    down = tuple(sorted(Worker(numbers[pipeline], column) for pipeline, column in schedule.failed))
    other, ties = relabel_schedule(schedule, down), [[Worker(0, 0), Worker(1, 0)]]
    before = divide_schedule(schedule, ties=ties), renumber_pipelines(schedule, down)
    require_parts(other, before)
    found = divide_schedule(other, before, ties=ties)
    plain = divide_schedule(other, ties=ties)
    assert found.failed == plain.failed
    for worker, share in plain.shares.items():
        assert (
            found.shares[worker].work in before[0].contents
            and share.sums == found.shares[worker].sums
        )


@pytest.mark.parametrize("folder", tables(), ids=lambda path: path.name)
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
        found = [
            crossing
            for worker, mine in crossings_by_worker(schedule, range(2)).items()
            for crossing in mine
            if crossing.source == worker
        ]
        assert _is_in_program_order(sorted(found, key=lambda crossing: crossing.number))
        places = _places_by_op(schedule, schedule.seats)
        assert len(
            _number_crossings(schedule, places, _order_by_graph(schedule, range(2), places))
        ) == len(found)
        swapped = _number_crossings(
            schedule, places, _order_by_graph(schedule, range(2), places)[::-1]
        )
        assert not _is_in_program_order(swapped)


def test_who_only_waits_for_a_failure_elsewhere_keeps_what_it_has():
    # Planned times are nobody's content: a plan with the same order of ops, later, changes nothing.
    schedule = by_hand(HEALTHY)
    programs = []
    for program in schedule.programs:
        programs.append(tuple(replace(op, start_ticks=3 * op.start_ticks + 100) for op in program))
    later = replace(schedule, programs=tuple(programs), bound_scope=Scope.STAGES)
    assert divide_schedule(later) == divide_schedule(schedule)


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
        assemble_program((), divided.shares[Worker(0, 0)], {})
