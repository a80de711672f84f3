import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from runtime.coordinator.membership import HEARTBEAT_TIMEOUT_SECONDS, Lighthouse, Member, MembershipError
from schedules.schedule import Worker

SOON = timedelta(seconds=20)


@pytest.fixture
def lighthouse():
    lighthouse = Lighthouse("127.0.0.1", 3)
    yield lighthouse
    lighthouse.close()


def join(url: str, worker: Worker):
    with Member(url, worker) as member:
        return member.join(SOON)


def test_all_members_get_one_quorum_and_ranks_in_the_order_of_workers(lighthouse):
    workers = [Worker(10, 0), Worker(2, 1), Worker(2, 0)]
    with ThreadPoolExecutor(3) as pool:
        quorums = list(pool.map(lambda worker: join(lighthouse.url, worker), workers, timeout=20))
    assert len({quorum.number for quorum in quorums}) == 1
    assert all(quorum.ranks == {Worker(2, 0): 0, Worker(2, 1): 1, Worker(10, 0): 2} for quorum in quorums)


def test_who_waits_longer_than_a_heartbeat_lasts_is_not_forgotten(lighthouse):
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(join, lighthouse.url, Worker(0, column)) for column in range(2)]
        time.sleep(HEARTBEAT_TIMEOUT_SECONDS + 0.5)
        late = pool.submit(join, lighthouse.url, Worker(0, 2))
        assert {len(future.result(20).ranks) for future in (*early, late)} == {3}


def test_members_that_stay_away_are_waited_for_only_so_long(lighthouse):
    with Member(lighthouse.url, Worker(0, 0)) as member, \
            pytest.raises(MembershipError, match=r"^worker 0\.0 found no quorum within 1 s"):
        member.join(timedelta(seconds=1))
