from collections import defaultdict
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings

from slipstream.schedules.graph import (
    Transfer,
    order_transfers,
    pipeline_groups,
    programs_of,
    require_acyclic,
    topological_order,
)
from slipstream.schedules.precedence import op_key, producers_with_rules
from slipstream.schedules.schedule import Op, Worker
from slipstream.schedules.symmetry import find_equal_pipelines
from tests.generate import BROKEN, HEALTHY, by_hand, op_graph, schedules


def full_graph(schedule, programs):
    """The op graph with transfers between the ops they join.

    They are in order along each pair of workers.
    """
    graph = op_graph(schedule, programs)
    by_pair = defaultdict(list)
    for transfer in order_transfers(schedule, programs):
        by_pair[frozenset((transfer.source, transfer.target))].append(transfer)
        kinds = ("F",) if transfer.kind == "activation" else ("I", "B")
        key = transfer.pipeline, transfer.microbatch
        step = -1 if transfer.kind == "activation" else 1
        ends = []
        for worker, stage in (
            (transfer.source, transfer.slice + step),
            (transfer.target, transfer.slice),
        ):
            unit = (stage, *key)
            ops = [op for op in programs[worker] if (op.slice, op.pipeline, op.microbatch) == unit]
            ends.append(next(op for op in ops if op.kind in kinds))
        producer, consumer = ends
        graph.remove_edge(producer, consumer)
        nx.add_path(graph, (producer, transfer, consumer))
    for sequence in by_pair.values():
        nx.add_path(graph, sequence)
    return graph


def test_transfers_by_hand():
    """1.0's micro-batches cross to pipeline 0, whose last worker runs them too."""
    found = order_transfers(by_hand(BROKEN), programs_of(by_hand(BROKEN)))
    assert len(found) == 8
    assert found[1] == Transfer("activation", 1, 1, 0, Worker(1, 0), Worker(0, 1))
    assert str(found[1]) == "activation of micro-batch 1.0 to slice 1, 1.0 -> 0.1"
    assert [transfer[2:4] for transfer in found if transfer.kind == "gradient"] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


def test_groups():
    assert pipeline_groups(by_hand(HEALTHY)) == [(0,), (1,)]
    assert pipeline_groups(by_hand(BROKEN)) == [(0, 1)]
    assert find_equal_pipelines(by_hand(HEALTHY)) == [(0, 1)]
    assert find_equal_pipelines(by_hand(BROKEN)) == [(0,), (1,)]
    late = {**HEALTHY, "1.1": HEALTHY["1.1"].replace("F0@1", "F0@2")}
    assert find_equal_pipelines(by_hand(late)) == [(0,), (1,)]


def test_deadlock_names_the_circle():
    schedule = by_hand(
        {**HEALTHY, "0.0": HEALTHY["0.0"].replace("F0@0 F1@1 I0@3", "I0@0 F0@1 F1@2")}
    )
    with pytest.raises(ValueError, match="deadlock: ") as caught:
        topological_order(schedule, programs_of(schedule))
    with pytest.raises(ValueError, match="deadlock: ") as caught_cheaply:
        require_acyclic(schedule, programs_of(schedule))
    ring = [
        "F(micro-batch 0.0, stage 0) on 0.0",
        "I(micro-batch 0.0, stage 0) on 0.0",
        "I(micro-batch 0.0, stage 1) on 0.1",
        "F(micro-batch 0.0, stage 1) on 0.1",
    ]
    for error in (caught, caught_cheaply):
        circle = str(error.value).removeprefix("deadlock: ").split(" waits for ")
        begin = ring.index(circle[0])
        assert circle == [*ring[begin:], *ring[:begin], ring[begin]], "each waits for the next one"


@settings(max_examples=40)
@given(schedules())
def test_workers_can_follow_the_order_of_transfers(schedule):
    programs = programs_of(schedule)
    found = order_transfers(schedule, programs)
    graph = full_graph(schedule, programs)
    require_acyclic(schedule, programs)
    assert nx.is_directed_acyclic_graph(graph)
    crossings = []
    for before, after in op_graph(schedule, programs).edges:
        if not isinstance(before, Op) or not isinstance(after, Op) or before.worker == after.worker:
            continue
        rules = producers_with_rules(
            op_key(after), schedule.route_of(after.pipeline, after.microbatch)
        )
        if any(rule.tensor for key, rule in rules if key == op_key(before)):
            crossings.append((before, after))
    assert len(found) == len(set(found)) == len(crossings)
    pairs = defaultdict(list)
    for transfer in found:
        pairs[frozenset((transfer.source, transfer.target))].append(transfer)
    for sequence in pairs.values():
        assert all(graph.has_edge(before, after) for before, after in pairwise(sequence))
    assert topological_order(schedule, programs) == list(
        nx.lexicographical_topological_sort(
            op_graph(schedule, programs),
            key=lambda node: (
                getattr(node, "start_ticks", 0),
                str(node) * (not isinstance(node, Op)),
            ),
        )
    )


@settings(max_examples=40)
@given(schedules(max_microbatches=3))
def test_pipelines_in_sets_are_alike(schedule):
    sets = find_equal_pipelines(schedule)
    assert sorted(pipeline for equal in sets for pipeline in equal) == list(
        range(schedule.grid.pipelines)
    )
    for equal in sets:
        timings = set()
        for pipeline in equal:
            workers = [Worker(pipeline, column) for column in range(schedule.grid.columns)]
            live = [worker for worker in workers if worker in schedule.seat_of]
            timings.add(
                tuple(
                    (op.kind, op.slice, op.microbatch, op.start_ticks, op.end_ticks)
                    for worker in live
                    for op in schedule.ops(worker)
                )
            )
        assert len(timings) == 1
    graph = op_graph(schedule, programs_of(schedule))
    assert nx.is_directed_acyclic_graph(graph)
