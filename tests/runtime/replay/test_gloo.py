"""The ends of process groups over gloo.

No thread that does anything else waits for them.
"""

import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

from benchmarks.conformance import GLOO, LAYERS, Team
from slipstream.runtime.replay import gloo
from slipstream.runtime.replay.backend import GroupRendezvous
from slipstream.runtime.replay.gloo import GlooGroup, InterruptibleCalls
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.torch_groups import open_gloo_devices
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.schedules.schedule import Worker


class Circle:
    """An object that refers to itself.

    So does an error whose traceback has a frame that refers to the error.
    """

    def __init__(self, group):
        self.itself, self.group = self, group


def test_the_collector_does_not_wait_for_a_sum_in_which_another_member_takes_no_part():
    store, found = HashStore(), {}

    def meet(rank):
        found[rank] = GlooGroup(InterruptibleCalls())
        found[rank].join_members(GroupRendezvous(store, store, "", rank, 2), open_gloo_devices())

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sums = [torch.ones(4) for _ in found]
    circle = Circle(found.pop(0))
    circle.group.allreduce([sums[0]])
    gone = weakref.ref(circle)
    del circle
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(20)
    assert gone() is None and not collecting.is_alive()
    found[1].allreduce([sums[1]]).wait()  # else its end would wait
    found[1].close()


@pytest.mark.parametrize("beside", [False, True])
def test_what_a_broken_sum_has_used_is_free_without_the_collector(beside):
    team = Team(GLOO)
    sessions, used = team.connected(), list[weakref.ref]()

    def fail() -> None:
        gradients = torch.ones(4)
        used.append(weakref.ref(gradients))
        try:
            if beside:
                sessions[1].reduce_in_background(
                    partial(sessions[1].sum_over_sharers, LAYERS[1], [gradients])
                )
                sessions[1].wait_for_reductions()
            else:
                sessions[1].sum_over_sharers(LAYERS[1], [gradients])
        except CommunicationError:
            return
        pytest.fail("another member has left")

    gc.disable()
    try:
        thread = threading.Thread(target=fail)
        thread.start()
        sessions[2].abort()
        thread.join(20)
        deadline = time.monotonic() + 20
        while used[0]() is not None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        gc.enable()
        team.close()


def test_an_interface_that_does_not_exist_is_the_fault_of_no_peer(monkeypatch):
    # Else workers with a wrong GLOO_SOCKET_IFNAME would name those that they have not even tried to
    # reach.

    def refuse():
        raise RuntimeError("Unable to find address for: nonexistent0")

    me, other = Worker(0, 0), Worker(0, 1)
    for devices, named in (refuse, ()), (list, (other,)):
        monkeypatch.setattr(gloo, "open_gloo_devices", devices)
        session = GenerationSession(
            Membership(1, {me: 0, other: 1}, me),
            links=GroupCache("gloo"),
            device=torch.device("cpu"),
            store=HashStore(),
        )
        with pytest.raises(
            CommunicationError, match="connecting to the other workers failed"
        ) as caught:
            session.connect()
        assert caught.value.peers == named
