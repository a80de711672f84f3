"""Which workers share a machine.

The job file says so, or the nodes that launchers have started.
"""

import pytest

from slipstream.cli.shared.summaries import describe_event
from slipstream.runtime.coordinator.decisions.recoveries import RecoveryClock
from slipstream.runtime.events import NodeLost
from slipstream.runtime.failure_domains import FailureDomains, divide_workers_by_node, find_domains
from slipstream.runtime.placement import PlacementError
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

GRID = schedule_for(grid(2, 2, 2)).grid
A, B, C, D = GRID.workers()
BY_STAGE = [(A, C), (B, D)]


def test_workers_of_one_machine_fail_together():
    domains = FailureDomains([(C, A), (B, D)])
    assert domains.domains == ((A, C), (B, D))
    assert [domains.domain_of(worker) for worker in (A, B, C, D)] == [0, 1, 0, 1]
    assert domains.workers_failing_with(C) == (A, C)
    assert B not in domains.workers_failing_with(A) and {A, C} <= {*domains.workers_failing_with(A)}


def test_who_is_in_none_fails_alone():
    domains = FailureDomains([(A, B)])
    assert domains.workers_failing_with(C) == (C,) and domains.domain_of(C) is None
    assert domains.workers_failing_with(C) == (C,)


def test_each_node_is_a_machine_where_nothing_else_is_known():
    shares = divide_workers_by_node([A, B, C, D], 2, ())
    assert shares == [[A, B], [C, D]]
    assert find_domains(GRID, shares, 1, ()).domains == ((A, B), (C, D))


def test_nodes_that_share_a_machine_are_one_domain():
    shares = divide_workers_by_node([A, B, C, D], 4, ())
    assert find_domains(GRID, shares, 2, ()).domains == ((A, B), (C, D))
    assert find_domains(GRID, shares, 3, ()).domains == ((A, B, C), (D,))


def test_a_lost_machine_of_several_nodes_is_not_taken_for_a_node():
    """Node 1 trains on; nodes 2 and 3 are lost, which share machine 1."""
    domains = find_domains(GRID, divide_workers_by_node([A, B, C, D], 4, ()), 2, ())
    number = domains.domain_of(D)
    watch = RecoveryClock().with_loss(C, "worker 1.0 was killed", 1.0)
    watch = watch.with_loss(D, "worker 1.1 was killed", 1.1).with_node_loss(number)
    (recovery,) = watch.with_end(3, live=2, at=1.2).recoveries
    assert str(recovery).startswith(
        "worker 1.0 was killed, worker 1.1 was killed, so that machine 1 is lost: iteration 3"
    )
    lost = NodeLost(node=number, workers=domains.domains[number])
    assert describe_event(lost) == "machine 1 is lost, with all of its workers: 1.0, 1.1"


def test_who_is_not_there_from_the_start_would_be_on_node_0():
    assert find_domains(GRID, divide_workers_by_node([A, B, D], 3, ()), 1, ()).domains == (
        (A, C),
        (B,),
        (D,),
    )


def test_a_topology_overrides_the_nodes_and_says_who_is_where():
    assert find_domains(
        GRID, divide_workers_by_node([A, B, C, D], 1, BY_STAGE), 1, BY_STAGE
    ).domains == ((A, C), (B, D))
    assert divide_workers_by_node([A, B, C, D], 1, BY_STAGE) == [[A, B, C, D]]
    assert divide_workers_by_node([A, B, D], 2, BY_STAGE) == [[A], [B, D]]
    # Two processes on each machine.
    assert divide_workers_by_node([A, B, C, D], 4, BY_STAGE) == [[A], [C], [B], [D]]
    assert divide_workers_by_node([A, B, C, D], 4, BY_STAGE[::-1]) == [[B], [D], [A], [C]]


@pytest.mark.parametrize(
    ("topology", "wrong"),
    [([(A, B, C)], D), ([(A, B), (C, D, A)], A), ([(A, B), (C, D, Worker(2, 0))], Worker(2, 0))],
)
def test_a_topology_of_another_job_is_refused(topology, wrong):
    with pytest.raises(PlacementError, match=f"see worker {wrong}"):
        find_domains(GRID, [[A, B, C, D]], 1, topology)
