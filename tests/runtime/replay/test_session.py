"""What every transport promises.

They are gloo on CPUs and beside GPUs, NCCL, and the double that stands for it in tests.
"""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from benchmarks import conformance
from benchmarks.conformance import (
    CHECKS,
    GLOO,
    LAYERS,
    RELEASED_SECONDS,
    WORKERS,
    NotConformingError,
    Team,
)
from slipstream.runtime.replay import session, sum_tree, transfers
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.schedules.schedule import Worker
from tests.runtime.replay.transports import TRANSPORTS, require, use


@pytest.fixture(params=TRANSPORTS)
def team(request, monkeypatch):
    """Three workers, in one process."""
    require(request.param, len(WORKERS))
    use(request.param, monkeypatch)
    team_ = Team(request.param)
    yield team_
    team_.close()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_what_every_transport_promises(team, check):
    check(team)


@pytest.mark.parametrize("name", ["reach_commit_point", "abort", "wait_for_all"])
def test_a_session_that_breaks_a_promise_does_not_conform(monkeypatch, name):
    monkeypatch.setattr(conformance, "HELD_UP_SECONDS", 1.0 if name == "wait_for_all" else 0.05)
    monkeypatch.setattr(conformance, "RELEASED_SECONDS", 0.2)
    kept = getattr(GenerationSession, name)
    monkeypatch.setattr(GenerationSession, name, lambda _: None)
    monkeypatch.setattr(
        Team, "close", lambda self: [kept(session) for session in self._sessions if name == "abort"]
    )
    with pytest.raises((NotConformingError, TimeoutError)):
        for check in (CHECKS["meeting"], CHECKS["abort of receives"]):
            team = Team(GLOO)
            try:
                check(team)
            finally:
                team.close()


def test_small_gradients_are_summed_together_and_large_ones_alone(team, monkeypatch):
    # Shapes and dtypes may be any, also one that is a view; there are as many sums as buckets.
    sessions = team.connected()
    monkeypatch.setattr(session, "BUCKET_BYTES", 64)
    summed = []
    for member_session in sessions[1:]:
        allreduce = member_session.sharer_group(LAYERS[1]).allreduce
        monkeypatch.setattr(
            member_session,
            "_open_sharer_group",
            lambda _, allreduce=allreduce: SimpleNamespace(
                allreduce=lambda tensors: (summed.append(tensors[0].numel()), allreduce(tensors))[1]
            ),
        )

    def gradients(factor, device):
        tensors = [
            torch.arange(6.0).reshape(2, 3).t() * factor,
            torch.full((), factor),
            torch.full((4, 5), factor),
            torch.full((2,), factor, dtype=torch.float64),
            torch.full((1,), factor, dtype=torch.float64),
        ]
        return [tensor.to(device) for tensor in tensors]

    mine = [[], gradients(1.0, team.members[1].device), gradients(2.0, team.members[2].device)]
    team.each(lambda session, tensors: session.sum_over_sharers(LAYERS[1], tensors), sessions, mine)
    assert sorted(summed) == sorted(2 * [6 + 1, 20, 2 + 1])
    for sums in mine[1:]:
        expected = gradients(3.0, "cpu")
        assert all(
            torch.equal(found.cpu(), there) for found, there in zip(sums, expected, strict=True)
        )


@pytest.mark.parametrize(
    "check", [check for name, check in CHECKS.items() if name.startswith("parts")]
)
def test_parts_are_summed_where_they_are_when_they_pass_through_host_memory(check, monkeypatch):
    # A card has shown it: the copies on the host had the sums, and the gradients on the card had
    # not.
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    team = Team(GLOO)
    make = team.session

    def staged(*arguments):
        session = make(*arguments)
        session.staged = True
        return session

    monkeypatch.setattr(team, "session", staged)
    check(team)
    team.close()


class Card:
    """A GPU whose present operation fails once it is lost."""

    def __init__(self) -> None:
        self.busy, self.lost = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.busy.set()
        assert self.lost.wait(RELEASED_SECONDS)
        raise RuntimeError("CUDA error: the card is lost\nand more")


@pytest.fixture
def queued(monkeypatch):
    """Sends through host memory, of which the first waits for the card, and their session."""
    card, empty = Card(), torch.empty
    monkeypatch.setattr(transfers, "TRANSFER_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: card)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **kind: empty(*shape, **kind))
    team = Team(GLOO)
    sender = team.connected()[0]
    sender.staged = True
    sends = [sender.send(torch.zeros(2), WORKERS[1], 0)]
    assert card.busy.wait(RELEASED_SECONDS)
    sends += [sender.send(torch.zeros(2), target, 1) for target in WORKERS[1:]]
    yield SimpleNamespace(card=card, session=sender, sends=sends)
    card.lost.set()
    team.close()


def test_sends_behind_one_that_the_card_fails_fail_with_it(queued):
    queued.card.lost.set()
    for outgoing, reason in zip(
        queued.sends, ("", "earlier work failed: ", "earlier work failed: "), strict=True
    ):
        message = (
            f"sending to worker {outgoing.target} failed: {reason}CUDA error: the card is lost"
        )
        with pytest.raises(CommunicationError, match=f"^{message}$") as raised:
            outgoing.wait()
        assert raised.value.peers == (outgoing.target,)


def test_sends_that_a_session_drops_at_its_end_fail(queued):
    queued.session.abort()
    threading.Timer(0.1, queued.card.lost.set).start()
    queued.session.drain()
    for outgoing in queued.sends[1:]:
        with pytest.raises(CommunicationError, match="failed: it was discarded before it began"):
            outgoing.wait()


def test_a_send_whose_tensor_never_comes_from_the_card_fails_after_the_timeout(queued):
    with pytest.raises(CommunicationError, match=f"worker {WORKERS[1]} failed: not begun within 1"):
        queued.sends[0].wait()


@pytest.mark.parametrize("size", [1, 2, 7])
def test_numbers_are_summed_over_a_tree_in_which_each_has_few_neighbours(size, monkeypatch):
    monkeypatch.setattr(sum_tree, "MAX_CHILDREN", 2)
    team = Team(GLOO, [Worker(pipeline, 0) for pipeline in range(size)])
    sessions = team.each(
        lambda session: session.connect(pairs=(), sums=True), list(map(team.session, team.members))
    )
    assert [len(session.groups_by_name()) for session in sessions] == {
        1: [0],
        2: [1, 1],
        7: [2, 3, 3, 1, 1, 1, 1],
    }[size]
    values = [0.1 * number for number in range(size)]
    found = team.each(
        lambda session, value: session.start_sum_over_all([value, 0.1]).wait_for_sums(),
        sessions,
        values,
    )
    assert found == [found[0]] * size and found[0] == pytest.approx(
        [0.05 * size * (size - 1), 0.1 * size]
    )
    team.close()


def test_clocks_of_one_machine_agree(team):
    """As a busy machine may hold up an answer, the best of several times counts."""
    sessions = team.connected()
    tries = [team.each(GenerationSession.measure_clock_offset, sessions) for _ in range(5)]
    for offsets in zip(*tries, strict=True):
        assert min(map(abs, offsets)) < 0.05
    assert all(offsets[0] == 0 for offsets in tries)


def test_tags_keep_tensors_apart_whatever_the_order():
    """Over gloo."""
    team = Team(GLOO)
    sender, receiver, _ = team.connected()
    arriving = [receiver.receive((2,), torch.float64, WORKERS[0], tag) for tag in (2, 0, 1)]
    leaving = [
        sender.send(torch.full((2,), float(tag), dtype=torch.float64), WORKERS[1], tag)
        for tag in (0, 1, 2)
    ]
    assert [parcel.wait_for_tensor()[0].item() for parcel in arriving] == [2, 0, 1]
    for parcel in leaving:
        parcel.wait()
    team.close()


def test_a_blocked_receive_says_in_one_line_what_has_ended_it():
    team = Team(GLOO)
    _, receiver, peer = team.connected()
    arriving = receiver.receive((1,), torch.float32, WORKERS[2], 0)
    threading.Timer(conformance.HELD_UP_SECONDS, peer.abort).start()
    with pytest.raises(CommunicationError, match=r"^receiving from worker 1\.1 failed: [^/]+$"):
        arriving.wait_for_tensor()
    team.close()
