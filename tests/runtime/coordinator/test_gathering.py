from slipstream.runtime.coordinator.records.progress_lines import MAX_NAMES, describe_awaited
from slipstream.schedules.schedule import Worker

WORKERS = [Worker(pipeline, 0) for pipeline in range(4)]


def test_nodes_that_are_not_there_go_before_workers_of_those_that_are():
    shares = [WORKERS[:1], WORKERS[1:2], WORKERS[2:]]
    assert (
        describe_awaited(WORKERS, shares, ())
        == "node 1 and node 2, which have not connected, and for worker 0.0 of node 0"
    )
    assert (
        describe_awaited(WORKERS[1:], shares, (1,))
        == "node 2, which has not connected, and for worker 1.0 of node 1"
    )
    assert (
        describe_awaited(WORKERS[2:], shares, (1, 2))
        == "worker 2.0 of node 2 and worker 3.0 of node 2"
    )


def test_of_many_only_the_first_are_named():
    shares = [[Worker(node, 0)] for node in range(20)]
    line = describe_awaited([share[0] for share in shares[1:]], shares, ())
    assert line.startswith("node 1, node 2, ") and line.endswith(
        f"and {19 - MAX_NAMES} more, which have not connected"
    )
