"""What every transport promises: gloo on CPUs and beside GPUs, NCCL, and the double that stands for it in tests."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from slipstream.runtime.model.state.parts import cut
from slipstream.runtime.replay import session
from slipstream.runtime.replay.part_exchange import PartExchange
from slipstream.runtime.replay.session import OrderEndedError, Session
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.schedules.schedule import Worker
from tests.runtime.replay.transports import TRANSPORTS, Team, require, use

WORKERS = [Worker(0, 0), Worker(0, 1), Worker(1, 1)]
GONE = (Worker(1, 0),)
LAYERS = [(0, 2), (2, 4)]
HELD_UP_SECONDS = 0.2
"""Long enough for a thread to be blocked by then."""
LARGE = 2**21
"""Elements that an abort finds half sent, half received, or half summed up."""


@pytest.fixture(params=TRANSPORTS)
def transport(request, monkeypatch):
    require(request.param, len(WORKERS))
    use(request.param, monkeypatch)
    return request.param


@pytest.fixture
def team(transport):
    """Three workers, in one process."""
    made = Team(transport, WORKERS)
    yield made
    made.close()


@pytest.fixture
def sessions(team):
    """Theirs; the last two hold layers 2 and 3 together."""
    return connected(team)


def connected(team: Team, generation: int = 1) -> list[Session]:
    groups = [{LAYERS[0]: WORKERS[:1]}, {LAYERS[1]: WORKERS[1:]}, {LAYERS[1]: WORKERS[1:]}]
    made = [team.session(member, generation) for member in team.members]
    return team.each(Session.connect, made, groups)


def full(member, value, size=1, dtype=torch.float64):
    return torch.full((size,), float(value), dtype=dtype, device=member.device)


def pass_on(team, sessions, source, target, tensors, tags):
    """Send some tensors; what has arrived, on the CPU."""
    def send():
        for parcel in [sessions[source].send(one, WORKERS[target], tag)
                       for one, tag in zip(tensors, tags, strict=True)]:
            parcel.wait()
        sessions[source].commit_point()

    def receive():
        arriving = [sessions[target].receive(one.shape, one.dtype, WORKERS[source], tag)
                    for one, tag in zip(tensors, tags, strict=True)]
        return [parcel.take().cpu() for parcel in arriving]

    sending, receiving = team.begin(team.members[source], send), team.begin(team.members[target], receive)
    sending.result(60)
    return receiving.result(60)


def test_tensors_arrive_in_the_order_in_which_they_were_sent(team, sessions):
    """Also two of one tag, as in two iterations."""
    sent = [full(team.members[0], value, 2) for value in (1, 2, 3)]
    assert [one.tolist() for one in pass_on(team, sessions, 0, 1, sent, (0, 1, 0))] == [[1, 1], [2, 2], [3, 3]]


def test_what_goes_one_way_does_not_wait_for_what_comes_the_other(team, sessions):
    """Each posts its receive first; over NCCL, both would wait for good in one communicator."""
    first, second = team.members[:2]

    def swap(member, other, one):
        arriving = one.receive((1,), torch.float64, other, 0)
        leaving = one.send(full(member, member.worker.column), other, 0)
        leaving.wait()
        return arriving.take().item()

    begun = [team.begin(first, swap, first, WORKERS[1], sessions[0]),
             team.begin(second, swap, second, WORKERS[0], sessions[1])]
    assert [one.result(60) for one in begun] == [1, 0]


def test_what_is_sent_may_be_a_view_and_any_dtype(team, sessions):
    tensors = [torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(), torch.tensor(3.0),
               torch.tensor([[2**40, -1]])]
    found = pass_on(team, sessions, 0, 1, [one.to(team.members[0].device) for one in tensors], (0, 1, 2))
    assert all(torch.equal(one, expected) and one.dtype == expected.dtype
               for one, expected in zip(found, tensors, strict=True))


def test_gradients_are_summed_over_those_who_hold_the_layers_only(team, sessions):
    tensors = [[full(member, rank + 1, 3, torch.float32), full(member, rank + 1, 2)]
               for rank, member in enumerate(team.members)]
    team.each(lambda one, worker, mine: one.sum_over_sharers(LAYERS[worker.column], mine), sessions, WORKERS, tensors)
    assert [[one[0].item() for one in mine] for mine in tensors] == [[1, 1], [5, 5], [5, 5]]


def test_small_gradients_are_summed_together_and_large_ones_alone(team, sessions, monkeypatch):
    """Whatever their shapes and dtypes, also one that is a view; in as many sums as there are buckets."""
    monkeypatch.setattr(session, "BUCKET_BYTES", 64)
    summed = []
    for one in sessions[1:]:
        allreduce = one.sharers_of(LAYERS[1]).allreduce
        monkeypatch.setattr(one, "_sharing", lambda _, __, allreduce=allreduce: SimpleNamespace(
            allreduce=lambda tensors: (summed.append(tensors[0].numel()), allreduce(tensors))[1]))

    def gradients(factor, device):
        tensors = [torch.arange(6.0).reshape(2, 3).t() * factor, torch.full((), factor), torch.full((4, 5), factor),
                   torch.full((2,), factor, dtype=torch.float64), torch.full((1,), factor, dtype=torch.float64)]
        return [one.to(device) for one in tensors]

    mine = [[], gradients(1.0, team.members[1].device), gradients(2.0, team.members[2].device)]
    team.each(lambda one, tensors: one.sum_over_sharers(LAYERS[1], tensors), sessions, mine)
    assert sorted(summed) == sorted(2 * [6 + 1, 20, 2 + 1])
    for one in mine[1:]:
        expected = gradients(3.0, "cpu")
        assert all(torch.equal(found.cpu(), there) for found, there in zip(one, expected, strict=True))


def test_clocks_of_one_machine_agree(team, sessions):
    """As a busy machine may hold up an answer, the best of several times counts."""
    tries = [team.each(Session.clock_offset, sessions) for _ in range(5)]
    for offsets in zip(*tries, strict=True):
        assert min(map(abs, offsets)) < 0.05
    assert all(offsets[0] == 0 for offsets in tries)


def test_all_wait_for_the_last(team, sessions):
    begun = [team.begin(member, one.wait_for_all) for member, one in zip(team.members[1:], sessions[1:], strict=True)]
    time.sleep(HELD_UP_SECONDS)
    assert not any(one.done() for one in begun)
    sessions[0].wait_for_all()
    for one in begun:
        one.result(60)


def test_a_commit_point_returns_once_all_is_done(team, sessions):
    pass_on(team, sessions, 0, 1, [full(team.members[0], 1)], (0,))
    team.each(Session.commit_point, sessions)
    assert [one.errored() for one in sessions] == [None] * 3
    assert all(one.over() for one in sessions)


def receive(team, sessions):
    """Blocks: nothing is sent."""
    return sessions[1].receive((1,), torch.float64, WORKERS[2], 0).take().cpu()


def sums(team, sessions):
    """Blocks: the third worker takes no part."""
    gradients = [full(team.members[1], 1)]
    sessions[1].sum_over_sharers(LAYERS[1], gradients)
    return gradients[0].cpu()


def meets(team, sessions):
    """Blocks: the others do not come."""
    sessions[1].wait_for_all()


@pytest.mark.parametrize("blocked", [receive, sums, meets])
def test_an_abort_releases_whoever_is_blocked_and_what_comes_after_it_does_not_count(team, sessions, blocked):
    """It may return as if all were well, with garbage, or raise: a commit point raises in any case."""
    begun = team.begin(team.members[1], blocked, team, sessions)
    time.sleep(HELD_UP_SECONDS)
    assert not begun.done() and sessions[1].errored() is None
    assert sessions[1].over() == (blocked is meets or not team.ordered), "what is under way would still fill a tensor"
    sessions[1].abort()
    assert isinstance(begun.exception(20), CommunicationError | None)
    if blocked is not meets and team.ordered:
        assert begun.result().isnan().all(), "an abort leaves garbage, and says nothing"
    with pytest.raises(OrderEndedError):
        sessions[1].commit_point()
    with pytest.raises(CommunicationError):
        sessions[1].send(full(team.members[1], 1), WORKERS[0], 1)
    sessions[1].drain()
    assert sessions[1].over()


@pytest.mark.parametrize("blocked", [receive, sums])
def test_who_waits_for_a_member_that_is_gone_is_released_by_an_abort_at_the_latest(team, sessions, blocked):
    """Over gloo it is told at once; over NCCL nothing says so but a question."""
    begun = team.begin(team.members[1], blocked, team, sessions)
    time.sleep(HELD_UP_SECONDS)
    sessions[2].abort()
    if team.ordered:
        time.sleep(HELD_UP_SECONDS)
        assert not begun.done()
        sessions[1].abort()
        begun.result(20)
    else:
        assert isinstance(begun.exception(20), CommunicationError)
    sessions[1].abort()
    with pytest.raises(CommunicationError):
        sessions[1].commit_point()


def test_an_abort_ends_a_meeting_that_somebody_does_not_come_to(team):
    made = [team.session(member) for member in team.members]
    begun = [team.begin(member, one.connect) for member, one in zip(team.members[:2], made[:2], strict=True)]
    time.sleep(HELD_UP_SECONDS)
    assert not any(one.done() for one in begun)
    for one in made[:2]:
        one.abort()
    assert all(isinstance(one.exception(20), CommunicationError) for one in begun)


@pytest.mark.parametrize("size", [1, LARGE])
def test_an_abort_from_any_thread_at_any_time_ends_it(team, sessions, size):
    """Again and again sent and received, summed and committed, until it is aborted: no commit point follows that.
    Gloo forgets those who wait for what is half sent, half received, or half summed up."""
    aborted, late = threading.Event(), []

    def work(member, one):
        rank, received = WORKERS.index(member.worker), 1.0
        with pytest.raises(CommunicationError):
            while True:
                if rank == 0:
                    one.send(full(member, 1, size), WORKERS[1], 0).wait()
                elif rank == 1:
                    received = one.receive((size,), torch.float64, WORKERS[0], 0).take()[-1].item()
                gradients = [full(member, rank, size)]
                one.sum_over_sharers(LAYERS[member.worker.column], gradients)
                known = aborted.is_set()
                one.commit_point()
                late.append(known)
                assert received == 1, "garbage is no error before a commit point"
                assert rank == 0 or gradients[0][-1].item() == 3

    begun = [team.begin(member, work, member, one) for member, one in zip(team.members, sessions, strict=True)]
    until = time.monotonic() + 20
    while not late and time.monotonic() < until:
        time.sleep(HELD_UP_SECONDS)
    time.sleep(HELD_UP_SECONDS)
    for one in sessions:
        one.abort()
    aborted.set()
    for one in begun:
        one.result(20)
    assert late and not any(late)


def test_groups_that_are_clean_live_on(team, sessions):
    """Where transfers match by order; over gloo, a receive may be left in them. One in which something was under way is
    made anew, others are not."""
    begun = team.begin(team.members[1], receive, team, sessions)
    time.sleep(HELD_UP_SECONDS)
    before = [{name: id(held.group) for name, held in one._held.items()} for one in sessions]
    for one in sessions:
        one.abort()
    begun.exception(20)
    for one in sessions:
        one.drain()
        one.release()
    again = connected(team, 2)
    after = [{name: id(held.group) for name, held in one._held.items()} for one in again]
    kept = {name for mine, theirs in zip(before, after, strict=True) for name in mine if mine[name] == theirs[name]}
    names = {name for mine in before for name in mine}
    assert kept == (names - {"1.1:0 to 0.1:0"} if team.ordered else set())
    assert pass_on(team, again, 2, 1, [full(team.members[2], 7)], (0,))[0].item() == 7
    gradients = [[full(member, 1)] for member in team.members]
    team.each(lambda one, worker, mine: one.sum_over_sharers(LAYERS[worker.column], mine), again, WORKERS, gradients)
    assert [mine[0].item() for mine in gradients] == [1, 2, 2]


@pytest.fixture
def sharers(team):
    """Sessions of three workers that hold layers 0 and 1 together."""
    made = [team.session(member) for member in team.members]
    return team, team.each(lambda one: one.connect({LAYERS[0]: WORKERS}, bytes_too=True), made)


@pytest.mark.parametrize("gone", [(), GONE], ids=["all", "one is gone"])
@pytest.mark.parametrize("total", [10, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parts_are_summed_by_their_owners_and_gathered(sharers, total, dtype, gone):
    """Who keeps a part has its sums; of four elements, the last of three workers has none."""
    one = cut(total, [*WORKERS, *gone], (), sharded=True)
    one = one.left(WORKERS) if gone else one
    team, sessions = sharers
    devices = [member.device for member in team.members]
    draw = torch.Generator().manual_seed(total)
    given = [torch.randn(one.length, generator=draw).to(dtype).to(device) for device in devices]
    sums = torch.stack([gradients.cpu().double() for gradients in given]).sum(0)
    parameters = [torch.full((one.length,), float(rank), dtype=dtype, device=devices[rank]) for rank in range(3)]
    copies = [{span: torch.zeros(span[1] - span[0], dtype=dtype, device=device) for span in one.copied(worker)}
              for worker, device in zip(WORKERS, devices, strict=True)]
    assert any(copies)

    def work(exchange, gradients, there, mine):
        for _ in range(2):
            exchange.reduce(LAYERS[0], gradients, one, there)
            exchange.wait_for_copies()
        exchange.gather(LAYERS[0], mine, one)()

    first, exchanges = [gradients.clone() for gradients in given], list(map(PartExchange, sessions))
    team.each(lambda exchange, mine, there: exchange.reduce(LAYERS[0], mine, one, there), exchanges, first, copies)
    team.each(PartExchange.wait_for_copies, exchanges)
    found = [{span: there.clone() for span, there in mine.items()} for mine in copies]
    team.each(work, exchanges, given, copies, parameters)
    for worker, mine, theirs in zip(WORKERS, first, found, strict=True):
        for span in one.kept(worker):
            here = theirs.get(span, mine[slice(*span)]).cpu().double()
            torch.testing.assert_close(here, sums[slice(*span)], rtol=1e-2,
                                       atol=1e-6 if dtype is torch.bfloat16 else 1e-12)
    owners = {element: float(rank) for rank, worker in enumerate(WORKERS) for span in one.own(worker)
              for element in range(*span)}
    assert all(its[:total].tolist() == [owners[element] for element in range(total)] for its in parameters)


def test_bytes_go_from_worker_to_worker(sharers):
    team, sessions = sharers
    arrived = team.begin(team.members[2], sessions[2].receive_bytes, LAYERS[0], WORKERS[0])
    sessions[0].send_bytes(b"some bytes", LAYERS[0], WORKERS[2])
    assert arrived.result(20) == b"some bytes"


def test_tags_keep_tensors_apart_whatever_the_order():
    """Over gloo."""
    team = Team("gloo on CPUs", WORKERS)
    sender, receiver, _ = connected(team)
    arriving = [receiver.receive((2,), torch.float64, WORKERS[0], tag) for tag in (2, 0, 1)]
    leaving = [sender.send(torch.full((2,), float(tag), dtype=torch.float64), WORKERS[1], tag) for tag in (0, 1, 2)]
    assert [parcel.take()[0].item() for parcel in arriving] == [2, 0, 1]
    for parcel in leaving:
        parcel.wait()
    team.close()


def test_a_blocked_receive_says_in_one_line_what_has_ended_it():
    team = Team("gloo on CPUs", WORKERS)
    _, receiver, peer = connected(team)
    arriving = receiver.receive((1,), torch.float32, WORKERS[2], 0)
    threading.Timer(HELD_UP_SECONDS, peer.abort).start()
    with pytest.raises(CommunicationError, match=r"^receiving from worker 1\.1 failed: [^/]+$"):
        arriving.take()
    team.close()
