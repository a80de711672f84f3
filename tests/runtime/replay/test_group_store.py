import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistStoreError, HashStore

from slipstream.runtime.protocol.store import connect_store, host_store
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.group_store import GroupStore, delete_old_orders, order_key_prefix
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.torch_groups import open_gloo_devices
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.schedules.schedule import Worker

LONG = timedelta(seconds=20)


def test_keys_of_two_groups_are_apart():
    store = HashStore()
    store_, other = (GroupStore(store, prefix, LONG, lambda: None) for prefix in ("one/", "other/"))
    store_.set("key", b"value")
    assert store_.get("key") == b"value" and store_.check(["key"]) and not other.check(["key"])
    assert [store_.add("count", 2), other.add("count", 1)] == [2, 1]


def test_keys_of_orders_that_are_over_are_forgotten():
    store, address = host_store()
    for order in (1, 2, 12, 13):
        GroupStore(connect_store(address), order_key_prefix(order), LONG, lambda: None).set(
            "a/0", b"x"
        )
    store.set("another", "x")
    delete_old_orders(connect_store(address), 12)
    assert sorted(store.list_keys()) == ["another", "order12/a/0", "order13/a/0"]


def test_what_all_ranks_leave_is_fetched_at_once():
    """The store may be far away."""
    store, asked = HashStore(), []

    class Far(HashStore):
        def check(self, keys):
            asked.append("check")
            return store.check(keys)

        def multi_get(self, keys):
            asked.append("multi_get")
            return store.multi_get(keys)

    far, other = (GroupStore(place, "", LONG, lambda: None, ranks=3) for place in (Far(), store))
    for rank in range(3):
        other.set(f"0/{rank}", str(rank).encode())
    for rank in range(3):
        far.wait([f"0/{rank}"])
        assert far.get(f"0/{rank}") == str(rank).encode()
    assert asked == ["check", "multi_get"]


def test_who_waits_in_vain_is_told():
    with pytest.raises(DistStoreError, match="timed out waiting for a, b"):
        GroupStore(HashStore(), "", LONG, lambda: None).wait(["a", "b"], timedelta(milliseconds=5))


def test_groups_meet_over_the_store_they_are_given_and_waiting_can_be_called_off(monkeypatch):
    """Nobody can connect to this store: what meets there opens no connection to one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, workers, raised = HashStore(), [Worker(0, 0), Worker(1, 0)], []
    sessions = {}

    def meet(worker, number=1):
        membership = Membership(
            number, {worker: rank for rank, worker in enumerate(workers)}, worker
        )
        try:
            sessions[worker] = GenerationSession(
                membership, links=GroupCache("gloo"), device=torch.device("cpu"), store=store
            )
            sessions[worker].connect({0: workers})
        except CommunicationError as error:
            raised.append(error)

    threads = [threading.Thread(target=meet, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sessions.keys() == set(workers) and not raised
    for session in sessions.values():
        session.close()
    sessions.clear()
    alone = threading.Thread(target=meet, args=(workers[0], 2))
    alone.start()
    deadline = time.monotonic() + 20
    while workers[0] not in sessions:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.05)
    assert alone.is_alive()
    sessions[workers[0]].abort()
    alone.join(20)
    assert not alone.is_alive() and "the generation has ended" in str(raised)


def test_groups_connect_on_the_interface_that_is_named(monkeypatch):
    # Else workers of several machines would listen where their own machine's name leads, which may
    # be nowhere.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-0")
    with pytest.raises(RuntimeError, match="no-such-0"):
        open_gloo_devices()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert len(open_gloo_devices()) == 2
