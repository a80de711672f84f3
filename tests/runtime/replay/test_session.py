import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from slipstream.runtime.model.state.parts import cut
from slipstream.runtime.protocol.rendezvous import host_store
from slipstream.runtime.replay import session
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.part_exchange import PartExchange
from slipstream.runtime.replay.session import Links, Session
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.schedules.schedule import Worker

WORKERS = [Worker(0, 0), Worker(0, 1), Worker(1, 1)]
GONE = (Worker(1, 0),)
LAYERS = [(0, 2), (2, 4)]
CPU = torch.device("cpu")


@pytest.fixture
def sessions():
    """Those of three workers, in one process; the last two hold layers 2 and 3 together."""
    store, _ = host_store()
    ranks = {worker: rank for rank, worker in enumerate(WORKERS)}

    def make(worker: Worker) -> Session:
        groups = {LAYERS[0]: WORKERS[:1]} if worker.column == 0 else {LAYERS[1]: WORKERS[1:]}
        return Session(Membership(1, ranks, worker), links=Links("gloo"), device=CPU, store=store).connect(groups)

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(make, WORKERS, timeout=120))
    yield made
    for one in made:
        one.abort()
        one.close()


def test_tags_keep_tensors_apart_whatever_the_order(sessions):
    sender, receiver, _ = sessions
    arriving = [receiver.receive((2,), torch.float64, WORKERS[0], tag) for tag in (2, 0, 1)]
    leaving = [sender.send(torch.full((2,), float(tag), dtype=torch.float64), WORKERS[1], tag) for tag in (0, 1, 2)]
    assert [parcel.take()[0].item() for parcel in arriving] == [2, 0, 1]
    for parcel in leaving:
        parcel.wait()


def test_two_rounds_under_one_tag_arrive_in_order(sessions):
    sender, receiver, _ = sessions
    leaving = [sender.send(torch.full((1,), float(turn)), WORKERS[1], 5) for turn in range(2)]
    arriving = [receiver.receive((1,), torch.float32, WORKERS[0], 5) for _ in range(2)]
    assert [parcel.take().item() for parcel in arriving] == [0, 1]
    for parcel in leaving:
        parcel.wait()


def test_what_is_sent_may_be_a_view_and_any_dtype(sessions):
    sender, receiver, _ = sessions
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    arriving = receiver.receive((3, 2), torch.bfloat16, WORKERS[0], 0)
    sender.send(tensor, WORKERS[1], 0).wait()
    assert torch.equal(arriving.take(), tensor)


def test_gradients_are_summed_over_those_who_hold_the_layers_only(sessions):
    tensors = [[torch.full((3,), rank + 1.0), torch.full((2,), rank + 1.0, dtype=torch.float64)] for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda one, worker, mine: one.sum_over_sharers(LAYERS[worker.column], mine), sessions,
                      WORKERS, tensors, timeout=120))
    assert [mine[0][0].item() for mine in tensors] == [1, 5, 5]
    assert [mine[1][0].item() for mine in tensors] == [1, 5, 5]


def test_small_gradients_are_summed_together_and_large_ones_alone(sessions, monkeypatch):
    """Whatever their shapes and dtypes, also one that is a view; in as many sums as there are buckets."""
    monkeypatch.setattr(session, "BUCKET_BYTES", 64)
    summed = []
    for one in sessions[1:]:
        allreduce = one.sharers_of(LAYERS[1]).allreduce
        monkeypatch.setattr(one, "_sharing", lambda _, __, allreduce=allreduce: SimpleNamespace(
            allreduce=lambda tensors: (summed.append(tensors[0].numel()), allreduce(tensors))[1]))

    def gradients(factor):
        return [torch.arange(6.0).reshape(2, 3).t() * factor, torch.full((), factor), torch.full((4, 5), factor),
                torch.full((2,), factor, dtype=torch.float64), torch.full((1,), factor, dtype=torch.float64)]

    mine = [gradients(1.0), gradients(2.0)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one, tensors: one.sum_over_sharers(LAYERS[1], tensors), sessions[1:], mine,
                      timeout=120))
    assert sorted(summed) == sorted(2 * [6 + 1, 20, 2 + 1])
    for one in mine:
        assert all(torch.equal(found, expected) for found, expected in zip(one, gradients(3.0), strict=True))


def test_clocks_of_one_machine_agree(sessions):
    """As a busy machine may hold up an answer, the best of several times counts."""
    with ThreadPoolExecutor(3) as pool:
        tries = [list(pool.map(Session.clock_offset, sessions, timeout=120)) for _ in range(5)]
    for offsets in zip(*tries, strict=True):
        assert min(map(abs, offsets)) < 0.05
    assert all(offsets[0] == 0 for offsets in tries)


def test_a_blocked_receive_ends_when_its_peer_aborts(sessions):
    _, receiver, peer = sessions
    arriving = receiver.receive((1,), torch.float32, WORKERS[2], 0)
    threading.Timer(0.2, peer.abort).start()
    began = time.monotonic()
    with pytest.raises(CommunicationError, match=r"^receiving from worker 1\.1 failed: [^/]+$"):
        arriving.take()
    assert time.monotonic() - began < 20


@pytest.fixture
def sharers():
    """Communicators of three workers that hold layers 0 and 1 together."""
    store, _ = host_store()
    ranks = {worker: rank for rank, worker in enumerate(WORKERS)}
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda worker: Session(
            Membership(1, ranks, worker), links=Links("gloo"), device=CPU, store=store).connect({LAYERS[0]: WORKERS}),
            WORKERS, timeout=120))
    yield made
    for one in made:
        one.abort()
        one.close()


@pytest.mark.parametrize("ordered", [False, True], ids=["by tag", "in order, as over NCCL"])
@pytest.mark.parametrize("gone", [(), GONE], ids=["all", "one is gone"])
@pytest.mark.parametrize("total", [10, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parts_are_summed_by_their_owners_and_gathered(sharers, total, dtype, gone, ordered):
    """Who keeps a part has its sums; of four elements, the last of three workers has none."""
    one = cut(total, [*WORKERS, *gone], (), sharded=True)
    one = one.left(WORKERS) if gone else one
    for one_session in sharers:
        one_session.ordered = ordered
    draw = torch.Generator().manual_seed(total)
    given = [torch.randn(one.length, generator=draw).to(dtype) for _ in WORKERS]
    sums = torch.stack(given).to(torch.float64).sum(0)
    parameters = [torch.full((one.length,), float(rank), dtype=dtype) for rank in range(3)]
    copies = [{span: torch.zeros(span[1] - span[0], dtype=dtype) for span in one.copied(worker)} for worker in WORKERS]
    assert any(copies)

    def work(exchange, gradients, there, mine):
        for _ in range(2):
            exchange.reduce(LAYERS[0], gradients, one, there)
            exchange.wait_for_copies()
        exchange.gather(LAYERS[0], mine, one)()

    first, exchanges = [gradients.clone() for gradients in given], list(map(PartExchange, sharers))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda exchange, mine, there: exchange.reduce(LAYERS[0], mine, one, there), exchanges, first,
                      copies, timeout=120))
        list(pool.map(PartExchange.wait_for_copies, exchanges, timeout=120))
        found = [{span: there.clone() for span, there in mine.items()} for mine in copies]
        list(pool.map(work, exchanges, given, copies, parameters, timeout=120))
    for worker, mine, theirs in zip(WORKERS, first, found, strict=True):
        for span in one.kept(worker):
            torch.testing.assert_close(theirs.get(span, mine[slice(*span)]).double(), sums[slice(*span)], rtol=1e-2,
                                       atol=1e-6 if dtype is torch.bfloat16 else 1e-12)
    owners = {element: float(rank) for rank, worker in enumerate(WORKERS) for span in one.own(worker)
              for element in range(*span)}
    assert all(its[:total].tolist() == [owners[element] for element in range(total)] for its in parameters)


def test_bytes_go_from_worker_to_worker(sharers):
    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(sharers[2].receive_bytes, LAYERS[0], WORKERS[0])
        sharers[0].send_bytes(b"some bytes", LAYERS[0], WORKERS[2])
        assert arrived.result(20) == b"some bytes"
