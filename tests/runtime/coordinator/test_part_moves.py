"""Which parts of layers move.

Everybody gets what it is to keep, and nothing twice, whoever has failed.
"""

import itertools

import pytest
from msgspec.structs import replace

from slipstream.planner.normalise import normal_form
from slipstream.planner.options import PlanOptions
from slipstream.runtime.coordinator.decisions.part_moves import PartitionPlanner
from slipstream.runtime.placement import place_layers
from slipstream.runtime.state.parts import (
    ElementCounts,
    StatePartition,
    build_partition,
    intersect,
    parts_of_worker,
    subtract,
)
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.relabel import relabel_schedule
from tests.jobs import grid
from tests.runtime.running import schedule_for

JOB = grid(4, 2, 2)
ELEMENTS = (ElementCounts(80, (15, 5)), ElementCounts(7), ElementCounts(0), ElementCounts(41))
"""In the first layer, two parameters are not cut."""
WHOLE = schedule_for(JOB)
PLACEMENT = place_layers(WHOLE.grid, len(ELEMENTS))


def partition(*, sharded=True):
    return PartitionPlanner(ELEMENTS, PLACEMENT, (), sharded)


def cuts_of(schedule, *, sharded=True):
    cuts = {}
    for layers, members in PLACEMENT.all_reductions(schedule).items():
        elements = sum(its.cut for its in ELEMENTS[slice(*layers)])
        cuts[layers] = build_partition(elements, members, (), sharded=sharded)
    return cuts


def keepers(schedule, after, *, sharded=True):
    return partition(sharded=sharded).find_held_states(schedule, after)


def spans_of(moves, target, layer, *, state):
    return [
        (move.start, move.stop)
        for move in moves
        if (move.target, move.layer, move.state) == (target, layer, state)
    ]


def workers(*names):
    return {Worker.parse(name) for name in names}


@pytest.mark.parametrize(
    "dead", [(), ("0.0",), ("0.0", "2.0"), ("1.0", "1.1"), ("0.0", "2.0", "1.1", "3.1")]
)
@pytest.mark.parametrize("undone", [(), ("3.0", "0.1")])
def test_all_get_what_they_are_to_keep_and_all_parameters(dead, undone):
    old = keepers(WHOLE, 5)
    states_left = {worker: kept for worker, kept in old.items() if worker not in workers(*dead)}
    for worker in workers(*undone) & states_left.keys():
        states_left[worker] = replace(states_left[worker], whole_after=None)
    assert partition().find_lost_layers(states_left) == []
    schedule = schedule_for(JOB, dead)
    moves, cuts = partition().plan_moves(schedule, states_left, 5), cuts_of(schedule)
    for worker, layers in PLACEMENT.held_layers_by_worker(schedule).items():
        needs = parts_of_worker(
            worker,
            {layer: its for layer, its in cuts.items() if worker in its.members},
            ELEMENTS.__getitem__,
        )
        mine = [move for move in moves if move.target == worker]
        for layer in layers:
            has = [
                (start, stop)
                for layer_, start, stop in states_left[worker].parts
                if layer_ == layer
            ]
            got = [(move.start, move.stop) for move in mine if move.layer == layer and move.state]
            for span in needs.get(layer, ()):
                assert subtract(span, [*has, *got]) == ()
            seen = [
                *got,
                *(
                    (move.start, move.stop)
                    for move in mine
                    if move.layer == layer and not move.state
                ),
            ]
            if str(worker) in undone:
                assert subtract((0, ELEMENTS[layer].total), [*has, *seen]) == ()
            else:
                assert seen == got, "parameters are there"
            for part, other in itertools.combinations([*has, *seen], 2):
                assert max(part[0], other[0]) >= min(part[1], other[1]), "nothing comes twice"
    for move in moves:
        assert any(
            layer == move.layer and start <= move.start and move.stop <= stop
            for layer, start, stop in states_left[move.source].parts
        )


BEFORE_AND_AFTER = {
    "one": (("2.1",), ()),
    "two": (("0.0", "2.0", "1.1"), ("2.0",)),
    "alone": (("1.0", "2.0", "3.0"), ()),
    "out": ((), ("3.0", "3.1")),
}


@pytest.mark.parametrize(("down", "then"), BEFORE_AND_AFTER.values(), ids=BEFORE_AND_AFTER)
@pytest.mark.parametrize("sharded", [True, False])
def test_while_all_train_whole_parts_are_fetched_and_nothing_is_left_to_move(down, then, sharded):
    # Steps of other spans than those of who sends them would not end in the same bits.
    present, schedule = schedule_for(JOB, down), schedule_for(JOB, then)
    cut, layers = partition(sharded=sharded), PLACEMENT.held_layers_by_worker(present)
    moves, old, new = (
        cut.plan_fetches(schedule, present, layers),
        cut.find_held_states(present, 5),
        cut.find_held_states(schedule, 5),
    )
    for move in moves:
        whole = (move.layer, move.start, move.stop) in old[move.source].parts
        assert move.source != move.target and (whole or not move.state)
    assert len({(move.target, move.layer, move.start, move.state) for move in moves}) == len(
        moves
    ), "nothing twice"
    for worker, kept in new.items():
        for layer in PLACEMENT.held_layers_by_worker(schedule)[worker]:
            parts = old[worker].parts if worker in old else ()
            had = [its[1:] for its in parts if its[0] == layer]
            got = spans_of(moves, worker, layer, state=True)
            for span in (its[1:] for its in kept.parts if its[0] == layer):
                assert subtract(span, [*had, *got]) == ()
            if worker not in old:
                assert (
                    subtract(
                        (0, ELEMENTS[layer].total),
                        [*got, *spans_of(moves, worker, layer, state=False)],
                    )
                    == ()
                )
    assert cut.plan_moves(schedule, old, 5, moves) == ()
    back = next(iter(sorted(old.keys() & new.keys())))
    undone = {**old, back: replace(old[back], whole_after=None)}
    assert {(move.target, move.state) for move in cut.plan_moves(schedule, undone, 5, moves)} <= {
        (back, False)
    }


def test_buddies_lost_together_are_noticed_and_layers_read_anew():
    states_left = {
        worker: kept
        for worker, kept in keepers(WHOLE, 5).items()
        if worker not in workers("0.0", "1.0")
    }
    assert partition().find_lost_layers(states_left) == [
        0
    ]  # half of its elements, and none of layer 1
    schedule = schedule_for(JOB, ("0.0", "1.0"))
    reads = {
        worker: tuple(layers)
        for worker, layers in PLACEMENT.held_layers_by_worker(schedule).items()
        if worker.pipeline > 2
    }
    kept = {reader: partition().build_restored_state(layers, 4) for reader, layers in reads.items()}
    moves = partition().plan_moves(schedule, kept, 3)
    survivors = {seat.worker for seat in schedule.seats}
    assert {move.target for move in moves} == survivors - reads.keys()
    assert {move.source for move in moves} <= reads.keys()


@pytest.mark.parametrize("out", [["2.0"], ["1.0", "2.0"]])
def test_who_is_left_out_gives_only_what_nobody_else_has(out):
    # It lives, but takes no part any more: it is slow, or has nothing to do.
    old, schedule = keepers(WHOLE, 5), schedule_for(JOB, out)
    moves = partition().plan_moves(schedule, old, 5)
    assert bool({move.source for move in moves} & workers(*out)) == (len(out) == 2)


def test_writers_get_all_that_they_lack():
    old = keepers(WHOLE, 5)
    writers = {0: Worker(0, 0), 1: Worker(0, 0), 2: Worker(0, 1), 3: Worker(0, 1)}
    moves = partition().plan_writer_moves(writers, old)
    for layer, writer in writers.items():
        has = [(start, stop) for layer_, start, stop in old[writer].parts if layer_ == layer]
        got = [
            (move.start, move.stop)
            for move in moves
            if (move.target, move.layer) == (writer, layer)
        ]
        assert subtract((0, ELEMENTS[layer].total), [*has, *got]) == () and all(
            move.state for move in moves
        )


def test_where_all_keep_everything_only_who_comes_gets_something():
    old = keepers(schedule_for(JOB, ["2.1"]), 5, sharded=False)
    assert partition(sharded=False).plan_writer_moves({0: Worker(3, 0)}, old) == ()
    moves = partition(sharded=False).plan_moves(WHOLE, old, 5)
    assert {move.target for move in moves} == {Worker(2, 1)}
    elements = sum(its.total for its in ELEMENTS[2:])
    assert sum(move.stop - move.start for move in moves) == elements


def test_buddies_are_on_different_machines_where_roles_have_moved():
    """Members of a stage are who plays its roles, wherever they come from."""
    machines = [[Worker(pipeline, 0), Worker(pipeline, 1)] for pipeline in range(4)]
    schedule = relabel_schedule(
        normal_form(JOB, 2, PlanOptions(method="greedy", time_limit=1.0)).schedule,
        sorted(workers("0.0", "1.0")),
        nodes=machines,
    )
    assert schedule is not None and any(
        seat.role.column != seat.worker.column for seat in schedule.moves
    )
    for layers, members in PLACEMENT.all_reductions(schedule).items():
        partition_ = build_partition(
            sum(its.cut for its in ELEMENTS[slice(*layers)]), members, machines, sharded=True
        )
        assert len(members) == 3 and all(
            buddy is not None
            and partition_.members[owner].pipeline != partition_.members[buddy].pipeline
            for owner, buddy in zip(partition_.owners, partition_.buddies, strict=True)
        )


@pytest.mark.parametrize("deaths", [("0.0",), ("0.0", "2.0"), ("1.1", "3.0")])
def test_who_is_left_goes_on_with_what_it_keeps_and_then_all_is_cut_anew(deaths):
    """Workers that are left go on with their parts, then all is cut anew.

    One after the other dies before that: no state moves, and none is lost.
    """
    cut, present, stay, kept = partition(), WHOLE, {}, keepers(WHOLE, 5)
    for number in range(len(deaths)):
        schedule = schedule_for(JOB, deaths[: number + 1])
        layers = PLACEMENT.held_layers_by_worker(schedule)
        kept = {worker: its for worker, its in kept.items() if worker in layers}
        stay = cut.find_preserved_ranges(schedule, present, stay, kept)
        changed = {Worker.parse(name).column for name in deaths[: number + 1]}
        preserved = {}
        for column in changed:
            range_ = PLACEMENT.model_range(schedule.grid.layers_of(column))
            preserved[range_] = tuple(Worker(pipeline, column) for pipeline in range(4))
        assert stay == preserved
        undone = min(layers)
        assert cut.plan_moves(schedule, kept, 5, cut_for=stay) == ()
        lacking = cut.plan_moves(
            schedule, {**kept, undone: replace(kept[undone], whole_after=None)}, 5, cut_for=stay
        )
        assert lacking and {(move.target, move.state) for move in lacking} == {(undone, False)}
        then = cut.find_held_states(schedule, 5, stay)
        parts = {worker: {*its.parts} for worker, its in kept.items()}
        assert {worker: {*its.parts} for worker, its in then.items()} == parts
        present = schedule
    moves = cut.plan_fetches(schedule, schedule, layers, stay)
    steppers = cut.find_held_states(schedule, 5, stay, StatePartition.stepped_parts)
    assert moves and all(
        (move.layer, move.start, move.stop) in steppers[move.source].parts
        for move in moves
        if move.state
    ), "buddies are behind"
    assert cut.plan_moves(schedule, kept, 5, moves) == ()


def test_all_is_cut_anew_at_once_where_some_part_has_no_keeper_left_or_nothing_would_move():
    cut = partition()
    # Buddies: what one of them kept comes from elsewhere.
    schedule = schedule_for(JOB, ("0.0", "1.0"))
    states_left = {
        worker: kept for worker, kept in keepers(WHOLE, 5).items() if worker in schedule.seat_of
    }
    assert cut.find_preserved_ranges(schedule, WHOLE, {}, states_left) == {}
    alone = schedule_for(JOB, ("0.0", "1.0", "2.0"))
    everything = {
        worker: partition().build_restored_state(layers, 6)
        for worker, layers in PLACEMENT.held_layers_by_worker(alone).items()
    }
    assert cut.find_preserved_ranges(alone, schedule, {}, everything) == {}
    assert partition(sharded=False).find_preserved_ranges(schedule, WHOLE, {}, states_left) == {}


@pytest.mark.parametrize("count", range(3, 17))
def test_what_is_followed_is_no_more_than_what_is_kept(count):
    """After a death, until parts have been cut anew: in host memory."""
    members, total = [Worker(pipeline, 0) for pipeline in range(count)], 5040 * 143
    before = build_partition(total, members, (), sharded=True)
    for dead in members:
        survivors = [worker for worker in members if worker != dead]
        old = before.after_losses(survivors)
        new = build_partition(total, survivors, (), sharded=True)
        for worker in survivors:
            lacking = [
                rest
                for span in new.stored_parts(worker)
                for rest in subtract(span, old.stored_parts(worker))
            ]
            followed = {
                span
                for span in old.spans
                for span_lacking in lacking
                if intersect(span, span_lacking)
            }
            elements = sum(stop - start for start, stop in old.stored_parts(worker))
            assert (
                sum(stop - start for start, stop in followed) <= elements <= 2 * -(-total // count)
            )
