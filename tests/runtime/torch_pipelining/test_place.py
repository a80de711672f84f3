"""How long a place waits, and where it is."""

import socket
from types import SimpleNamespace

import pytest

from slipstream.runtime.replay.torch_groups import HashStore, PrefixStore, TCPStore
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.torch_pipelining import LeftOutError, Place
from slipstream.runtime.torch_pipelining import place as places
from slipstream.schedules.schedule import Worker
from tests.generate import planned
from tests.jobs import grid
from tests.runtime.torch_pipelining.threads import TIMEOUT_SECONDS, with_workers


@pytest.mark.usefixtures("one_process")
def test_all_waits_end_after_the_patience_of_the_place(monkeypatch):
    def run(place):
        place._patience = 0
        with pytest.raises(
            CommunicationError,
            match=r"^nobody said 'anything' in 0 s; expected all workers to step$",
        ):
            place.read("anything")
        with monkeypatch.context() as patched:
            patched.setattr(place.session, "is_quiescent", lambda: False)
            with pytest.raises(
                TimeoutError, match=r"^transfers of 0\.0:0 have not ended 0 s after they were "
            ):
                place._await_quiescence()
        place._patience = TIMEOUT_SECONDS

    with_workers(planned(grid(1, 1, [1]), []), run)


@pytest.mark.usefixtures("one_process")
def test_a_program_that_takes_no_worker_back_refuses_one_that_starts_again():
    def run(place):
        if place.worker == Worker(0, 0):
            with pytest.raises(
                LeftOutError, match=r"^the others go on without worker 1\.0, and this program "
            ):
                Place.take(place.routes, "1.0", store=place._shared, returns=False)
        place.commit()

    with_workers(planned(grid(2, 1, [1, 1]), []), run)


def test_the_ranks_of_a_worker_meet_though_one_of_them_died_at_the_start_before(monkeypatch):
    store = HashStore()

    def enter():
        return places.Place._store_of_ranks(
            SimpleNamespace(ranks=2, worker=Worker(0, 0), _shared=store)
        )

    enter()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    enter().set("met", "")
    assert enter().check(["met"])


def test_the_host_is_found_through_prefixes_of_the_store(monkeypatch):
    asked, connect = [], socket.create_connection
    monkeypatch.setattr(
        socket,
        "create_connection",
        lambda address, **options: asked.append(address) or connect(address, **options),
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert places._own_host(PrefixStore("outer", PrefixStore("inner", store))) == "127.0.0.1"
    assert asked == [("127.0.0.1", store.port)]
