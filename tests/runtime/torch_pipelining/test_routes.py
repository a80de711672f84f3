import pytest

from slipstream.runtime.torch_pipelining import NoRouteError, Routes
from slipstream.schedules.codec import write
from slipstream.schedules.schedule import Worker
from tests.generate import planned
from tests.jobs import grid

JOB = grid(3, 2, [2, 1, 3])


def test_peers_follow_from_the_microbatch():
    routes = Routes.read(planned(JOB, [Worker(0, 1)]), ["0.1"])
    assert routes.workers == (Worker(0, 0), Worker(1, 0), Worker(1, 1), Worker(2, 0), Worker(2, 1))
    assert routes.holders(1) == (Worker(1, 1), Worker(2, 1)) and routes.stages_of(Worker(0, 0)) == (
        0,
    )
    for number in range(6):
        assert routes.worker_with(0, "SEND_F", number).pipeline == routes.sample_of(number).pipeline
        assert routes.worker_with(1, "RECV_F", number) in routes.holders(1)
    assert [tuple(routes.sample_of(number)) for number in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
    ]


def test_routes_for_other_failures_come_from_the_same_source(tmp_path):
    path = tmp_path / "plan.json"
    write(planned(JOB), path)
    routes = Routes.read(path)
    assert routes.without([]) is routes
    with pytest.raises(
        NoRouteError, match=r"the schedule is for nobody down, not for 0\.1; give a table"
    ):
        routes.without([Worker(0, 1)])
    planning = Routes.read(lambda down: planned(JOB, down))
    assert planning.without([Worker(0, 1), Worker(2, 0)]).failed == (Worker(0, 1), Worker(2, 0))
    assert planning.digest == routes.digest != planning.without([Worker(0, 1)]).digest
