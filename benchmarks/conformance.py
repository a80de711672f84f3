"""Check what every transport promises to replay (`runtime.replay.session`).

Tests and `benchmarks.devices` run the checks. Each check is a function of a team of workers, in
threads of one process or in separate processes, over gloo on CPUs, gloo next to GPUs, NCCL, or a
double of it. Checks raise NotConformingError.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.protocol.store import host_store
from slipstream.runtime.replay.group_cache import GenerationEndedError, GroupCache
from slipstream.runtime.replay.membership import GradientKey, Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.state.part_exchange import PartExchange
from slipstream.runtime.state.parts import Span, build_partition
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

GLOO = "gloo on CPUs"
STAGED = "gloo beside GPUs"
"""Gloo with tensors on GPUs, which are copied."""
NCCL = "nccl"
WORKERS = (Worker(0, 0), Worker(0, 1), Worker(1, 1))
GONE = Worker(1, 0)
LAYERS: tuple[LayerRange, LayerRange] = ((0, 2), (2, 4))
"""Layer ranges of the team. The last two workers hold layers 2 and 3 together."""
LIMIT_SECONDS = 60.0
HELD_UP_SECONDS = 0.2
"""Time, in seconds, after which a thread that can block is blocked."""
LOOKS = 40
"""Number of times that a device is asked within that time."""
RELEASED_SECONDS = 20.0
"""Time limit, in seconds, for a release on a busy machine."""
LARGE = 2**21
"""Number of elements in whose midst an abort finds sends, receives and sums."""


class NotConformingError(Exception):
    """Exception for a transport that breaks a promise. The message is one line."""


class Member(NamedTuple):
    """Worker of the team in this process."""

    worker: Worker
    device: torch.device
    links: GroupCache

    def full(self, value: float, size: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return a tensor filled with a value on the device of this worker."""
        return torch.full((size,), float(value), dtype=dtype, device=self.device)


class Team:
    """Workers that communicate over one transport, each in a thread of its own."""

    def __init__(self, transport: str, workers: Sequence[Worker] = WORKERS) -> None:
        self.store, _ = host_store()
        self.ordered = "gloo" not in transport
        on_cards = transport in {STAGED, NCCL}
        self.members = []
        for place, worker in enumerate(workers):
            card = place if self.ordered else 0
            device = torch.device("cuda", card) if on_cards else torch.device("cpu")
            groups = GroupCache("nccl" if self.ordered else "gloo")
            self.members.append(Member(worker, device, groups))
        self._ranks = {worker: rank for rank, worker in enumerate(workers)}
        self._pool = ThreadPoolExecutor(2 * len(workers))
        self._sessions: list[GenerationSession] = []

    def session(self, member: Member, order: int = 1) -> GenerationSession:
        """Return a session that is not connected."""
        made = GenerationSession(
            Membership(order, self._ranks, member.worker),
            links=member.links,
            device=member.device,
            store=self.store,
        )
        self._sessions.append(made)
        return made

    def connected(self, order: int = 1) -> list[GenerationSession]:
        """Return connected sessions of all members. The last two members hold layers together."""
        shared: Mapping[GradientKey, Sequence[Worker]] = {LAYERS[1]: WORKERS[1:]}
        sharers = [{LAYERS[0]: WORKERS[:1]}, shared, shared]
        return self.each(
            GenerationSession.connect,
            [self.session(member, order) for member in self.members],
            sharers,
        )

    def begin(self, member: Member, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Start a call in a thread that computes on the device of a worker."""

        def work() -> Any:
            if member.device.type == "cuda":
                torch.cuda.set_device(member.device)
            return call(*arguments)

        return self._pool.submit(work)

    def each(self, call: Callable[..., Any], *lists: Sequence[Any]) -> list[Any]:
        """Call a function for all members at the same time, and return the results."""
        begun = [
            self.begin(member, call, *arguments)
            for member, *arguments in zip(self.members, *lists, strict=True)
        ]
        return [future.result(LIMIT_SECONDS) for future in begun]

    def close(self) -> None:
        """End all sessions and threads that are left."""
        for session in self._sessions:
            session.abort()
        for session in self._sessions:
            session.close()
        for member in self.members:
            member.links.close_idle()
        self._pool.shutdown(wait=False)


def pass_on(
    team: Team,
    sessions: Sequence[GenerationSession],
    ends: tuple[int, int],
    tensors: Sequence[Tensor],
    tags: Sequence[int],
) -> list[Tensor]:
    """Send tensors from one worker to another, and return what arrived, on the CPU."""
    source, target = ends

    def send() -> None:
        for parcel in [
            sessions[source].send(tensor, WORKERS[target], tag)
            for tensor, tag in zip(tensors, tags, strict=True)
        ]:
            parcel.wait()
        sessions[source].reach_commit_point()

    def receive() -> list[Tensor]:
        arriving = [
            sessions[target].receive(tensor.shape, tensor.dtype, WORKERS[source], tag)
            for tensor, tag in zip(tensors, tags, strict=True)
        ]
        return [parcel.wait_for_tensor().cpu() for parcel in arriving]

    sending, receiving = (
        team.begin(team.members[source], send),
        team.begin(team.members[target], receive),
    )
    sending.result(LIMIT_SECONDS)
    arrived: list[Tensor] = receiving.result(LIMIT_SECONDS)
    return arrived


def in_order(team: Team) -> None:
    """Check that tensors arrive in the order of sending, also two of one tag."""
    sent = [team.members[0].full(value, 2) for value in (1, 2, 3)]
    found = pass_on(team, team.connected(), (0, 1), sent, (0, 1, 0))
    _expect(
        [tensor.tolist() for tensor in found] == [[1, 1], [2, 2], [3, 3]],
        "tensors are out of order",
    )


def both_ways(team: Team) -> None:
    """Check that two workers that each post a receive first can exchange tensors.

    Over NCCL, both would wait forever in one communicator.
    """
    sessions = team.connected()

    def swap(member: Member, other: Worker, session: GenerationSession) -> float:
        arriving = session.receive((1,), torch.float64, other, 0)
        session.send(member.full(member.worker.column), other, 0).wait()
        return arriving.wait_for_tensor().item()

    begun = [
        team.begin(
            team.members[place], swap, team.members[place], WORKERS[1 - place], sessions[place]
        )
        for place in range(2)
    ]
    _expect(
        [future.result(LIMIT_SECONDS) for future in begun] == [1, 0],
        "two that send to each other got other tensors",
    )


def any_tensor(team: Team) -> None:
    """Check that a tensor of any dtype can be sent, also a view."""
    tensors = [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.tensor(3.0),
        torch.tensor([[2**40, -1]]),
    ]
    found = pass_on(
        team,
        team.connected(),
        (0, 1),
        [tensor.to(team.members[0].device) for tensor in tensors],
        (0, 1, 2),
    )
    _expect(
        all(
            torch.equal(tensor, sent) and tensor.dtype == sent.dtype
            for tensor, sent in zip(found, tensors, strict=True)
        ),
        "other tensors arrived than were sent",
    )


def sums(team: Team) -> None:
    """Check that gradients are summed only over the workers that hold the layers."""
    tensors = [
        [member.full(rank + 1, 3, torch.float32), member.full(rank + 1, 2)]
        for rank, member in enumerate(team.members)
    ]
    team.each(
        lambda session, worker, mine: session.sum_over_sharers(LAYERS[worker.column], mine),
        team.connected(),
        WORKERS,
        tensors,
    )
    totals = [(first[0].item(), second[0].item()) for first, second in tensors]
    _expect(totals == [(1, 1), (5, 5), (5, 5)], "sums are wrong")


def sums_over_all(team: Team) -> None:
    """Check that all workers get the same of consecutive sums.

    An abort ends the wait for an absent worker.
    """
    sessions = team.each(
        lambda session: session.connect(sums=True), list(map(team.session, team.members))
    )

    def two_sums(session: GenerationSession, value: float) -> list[Sequence[float]]:
        return [
            begun.wait_for_sums()
            for begun in [
                session.start_sum_over_all([value, 1.0]),
                session.start_sum_over_all([2 * value]),
            ]
        ]

    found = team.each(two_sums, sessions, [1.0, 2.0, 4.0])
    _expect(found == [[[7, 3], [14]]] * len(WORKERS), "sums over all are wrong")
    alone = sessions[1].start_sum_over_all([1.0])
    begun = team.begin(team.members[1], alone.wait_for_sums)
    time.sleep(HELD_UP_SECONDS)
    _expect(not alone.has_arrived() and not begun.done(), "it did not wait for the others")
    sessions[1].abort()
    _expect(
        isinstance(begun.exception(RELEASED_SECONDS), CommunicationError), "an abort did not end it"
    )


def meeting(team: Team) -> None:
    """Check that all workers wait for the last one."""
    sessions = team.connected()
    begun = [
        team.begin(member, session.wait_for_all)
        for member, session in zip(team.members[1:], sessions[1:], strict=True)
    ]
    time.sleep(HELD_UP_SECONDS)
    _expect(not any(future.done() for future in begun), "somebody did not wait for the last")
    sessions[0].wait_for_all()
    for future in begun:
        future.result(LIMIT_SECONDS)


def commit_point(team: Team) -> None:
    """Check that a commit point returns once all operations are done."""
    sessions = team.connected()
    pass_on(team, sessions, (0, 1), [team.members[0].full(1)], (0,))
    team.each(GenerationSession.reach_commit_point, sessions)
    _expect(
        [session.failure_reason() for session in sessions] == [None] * 3,
        "there is an error, and nothing has failed",
    )
    _expect(all(map(_becomes_over, sessions)), "something is still under way")


def _receives(team: Team, sessions: Sequence[GenerationSession]) -> Tensor:  # noqa: ARG001
    """Block in a receive to which nothing is sent."""
    return sessions[1].receive((1,), torch.float64, WORKERS[2], 0).wait_for_tensor().cpu()


def _sums(team: Team, sessions: Sequence[GenerationSession]) -> Tensor:
    """Block in a sum in which the third worker takes no part."""
    gradients = [team.members[1].full(1)]
    sessions[1].sum_over_sharers(LAYERS[1], gradients)
    return gradients[0].cpu()


def _meets(team: Team, sessions: Sequence[GenerationSession]) -> None:  # noqa: ARG001
    """Block in a meeting to which the others do not come."""
    sessions[1].wait_for_all()


def abort_of_a_blocked(
    team: Team, blocked: Callable[[Team, Sequence[GenerationSession]], Any]
) -> None:
    """Check that an abort releases a blocked operation.

    The operation may return as if it had succeeded, with garbage, or raise. A commit point raises
    in either case.
    """
    sessions, begun = _blocked(team, blocked)
    device = blocked is not _meets and team.ordered
    _expect(sessions[1].failure_reason() is None, "there is an error, and nothing has failed")
    _expect(_becomes_over(sessions[1]) is not device, "what is under way would still fill a tensor")
    sessions[1].abort()
    error = begun.exception(RELEASED_SECONDS)
    _expect(isinstance(error, CommunicationError | None), f"an abort ended it with {error!r}")
    if device and error is None and team.members[1].device.type == "cpu":
        _expect(begun.result().isnan().all(), "the double leaves garbage")
    _raises(GenerationEndedError, sessions[1].reach_commit_point)
    _raises(CommunicationError, lambda: sessions[1].send(team.members[1].full(1), WORKERS[0], 1))
    sessions[1].drain()
    _expect(sessions[1].is_quiescent(), "something is still under way")


def abort_after_a_death(
    team: Team, blocked: Callable[[Team, Sequence[GenerationSession]], Any]
) -> None:
    """Check that a worker that waits for a dead member is released.

    Over gloo, its operation fails at once. Over NCCL, the operation waits until an abort, because
    nothing reports the death.
    """
    sessions, begun = _blocked(team, blocked)
    sessions[2].abort()
    if team.ordered:
        time.sleep(HELD_UP_SECONDS)
        _expect(not begun.done(), "it did not wait for the abort")
        sessions[1].abort()
        begun.result(RELEASED_SECONDS)
    else:
        _expect(
            isinstance(begun.exception(RELEASED_SECONDS), CommunicationError),
            "it was not told of a death",
        )
    sessions[1].abort()
    _raises(CommunicationError, sessions[1].reach_commit_point)


def _blocked(
    team: Team, call: Callable[[Team, Sequence[GenerationSession]], Any]
) -> tuple[list[GenerationSession], "Future[Any]"]:
    sessions = team.connected()
    begun = team.begin(team.members[1], call, team, sessions)
    if team.ordered and call is not _meets:
        _becomes(sessions[1], RELEASED_SECONDS, quiescent=False)  # the operation is posted
    time.sleep(HELD_UP_SECONDS)
    _expect(not begun.done(), "it did not wait")
    return sessions, begun


def abort_of_a_meeting(team: Team) -> None:
    """Check that an abort ends a meeting to which a worker does not come."""
    made = [team.session(member) for member in team.members[:2]]
    begun = [
        team.begin(member, session.connect)
        for member, session in zip(team.members, made, strict=False)
    ]
    time.sleep(HELD_UP_SECONDS)
    _expect(not any(future.done() for future in begun), "they did not wait for the third")
    for session in made:
        session.abort()
    _expect(
        all(isinstance(future.exception(RELEASED_SECONDS), CommunicationError) for future in begun),
        "an abort did not end a meeting",
    )


def abort_of_a_half_made_group(team: Team, first: int, second: int) -> None:
    """Check that a worker can leave while it waits for another to join a group.

    The other one then fails, waits forever, or, over gloo, reaches the socket at which the first
    one has listened and takes that for a connection. In this case its operation or its commit point
    fails.
    """
    for worker in WORKERS:
        # Each has said that it has no group of an order before.
        team.store.set(f"order1/kept {worker}:0", "{}")
    made = {place: team.session(team.members[place]) for place in (first, second)}
    pairs = {(WORKERS[0], WORKERS[2]), (WORKERS[2], WORKERS[0])}

    def meet(place: int) -> None:
        session, other = made[place], first + second - place
        session.connect(pairs=pairs)
        session.receive((1,), torch.float64, WORKERS[other], 0).wait_for_tensor()
        session.reach_commit_point()

    for place, session in made.items():
        begun = team.begin(team.members[place], meet, place)
        time.sleep(HELD_UP_SECONDS)
        _expect(place == second or not begun.done(), "it did not wait for the other")
        session.abort()
        error = begun.exception(RELEASED_SECONDS)
        _expect(isinstance(error, CommunicationError), f"an abort did not end it: {error!r}")


def abort_at_any_time(team: Team, size: int) -> None:
    """Check that no commit point succeeds after an abort during other operations.

    These are transfers, sums and commits. Gloo forgets waiting workers if data is half sent, half
    received, or half summed.
    """
    sessions, aborted, late = team.connected(), threading.Event(), list[bool]()

    def work(member: Member, session: GenerationSession) -> None:
        rank, received = WORKERS.index(member.worker), 1.0
        while True:
            if rank == 0:
                session.send(member.full(1, size), WORKERS[1], 0).wait()
            elif rank == 1:
                received = (
                    session.receive((size,), torch.float64, WORKERS[0], 0)
                    .wait_for_tensor()[-1]
                    .item()
                )
            gradients = [member.full(rank, size)]
            session.sum_over_sharers(LAYERS[member.worker.column], gradients)
            was_aborted = aborted.is_set()
            session.reach_commit_point()
            late.append(was_aborted)
            _expect(
                received == 1 and (rank == 0 or gradients[0][-1].item() == 3),
                "garbage was committed",
            )

    begun = [
        team.begin(member, work, member, session)
        for member, session in zip(team.members, sessions, strict=True)
    ]
    until = time.monotonic() + RELEASED_SECONDS
    while not late and time.monotonic() < until:
        time.sleep(HELD_UP_SECONDS)
    time.sleep(HELD_UP_SECONDS)
    for session in sessions:
        session.abort()
    aborted.set()
    _expect(
        all(isinstance(future.exception(RELEASED_SECONDS), CommunicationError) for future in begun),
        "an abort did not end it",
    )
    _expect(bool(late) and not any(late), "a commit point followed an abort")


def clean_groups(team: Team) -> None:
    """Check that groups without pending operations stay usable in the next generation.

    That holds if transfers match by order. Over gloo no group stays, because a receive may be left
    in it.
    """
    sessions, begun = _blocked(team, _receives)
    before = [session.groups_by_name() for session in sessions]
    for session in sessions:
        session.abort()
    begun.exception(RELEASED_SECONDS)
    for session in sessions:
        session.drain()
        session.release()
    again = team.connected(2)
    kept = {
        name
        for mine, session in zip(before, again, strict=True)
        for name, group in session.groups_by_name().items()
        if mine[name] is group
    }
    names = {name for mine in before for name in mine}
    _expect(
        kept == (names - {"1.1:0 to 0.1:0"} if team.ordered else set()),
        f"of {sorted(names)}, {sorted(kept)} live",
    )
    _expect(
        pass_on(team, again, (2, 1), [team.members[2].full(7)], (0,))[0].item() == 7,
        "another tensor arrived",
    )
    gradients = [[member.full(1)] for member in team.members]
    team.each(
        lambda session, worker, mine: session.sum_over_sharers(LAYERS[worker.column], mine),
        again,
        WORKERS,
        gradients,
    )
    _expect([mine[0].item() for mine in gradients] == [1, 2, 2], "sums are wrong")


def nobody_receives(team: Team) -> None:
    """Check that one generation's unreceived data does not arrive in the next."""
    sessions = team.connected()

    def send() -> None:
        sessions[0].send(team.members[0].full(1), WORKERS[1], 0)

    team.begin(team.members[0], send).result(LIMIT_SECONDS)
    time.sleep(HELD_UP_SECONDS)
    for session in sessions:
        session.abort()
    for session in sessions:
        session.drain()
        session.release()
    again = team.connected(2)
    _expect(
        pass_on(team, again, (0, 1), [team.members[0].full(7)], (0,))[0].item() == 7,
        "an old tensor arrived",
    )


def parts(team: Team, total: int, dtype: torch.dtype, gone: tuple[Worker, ...]) -> None:
    """Check that owners of parts get sums, and all workers what the owners step.

    With four elements, the last of three workers has no part.
    """
    partition = build_partition(total, [*WORKERS, *gone], (), sharded=True)
    if gone:
        remainder = partition.after_losses(WORKERS)
        assert remainder is not None
        partition = remainder
    sessions = _all_share(team)
    devices = [member.device for member in team.members]
    draw = torch.Generator().manual_seed(total)
    given = [
        torch.randn(partition.padded_length, generator=draw).to(dtype).to(device)
        for device in devices
    ]
    totals = torch.stack([gradients.cpu().double() for gradients in given]).sum(0)
    parameters = [
        torch.full((partition.padded_length,), float(rank), dtype=dtype, device=devices[rank])
        for rank in range(3)
    ]
    copies = []
    for worker, device in zip(WORKERS, devices, strict=True):
        spans = partition.copied_parts(worker)
        copies.append(
            {span: torch.zeros(span[1] - span[0], dtype=dtype, device=device) for span in spans}
        )

    def work(
        exchange: PartExchange, gradients: Tensor, there: Mapping[Span, Tensor], mine: Tensor
    ) -> None:
        for _ in range(2):
            exchange.reduce_gradients(LAYERS[0], gradients, partition, there)
            exchange.wait_for_copies()
        exchange.start_gather(LAYERS[0], mine, partition)()

    first, exchanges = [gradients.clone() for gradients in given], list(map(PartExchange, sessions))
    team.each(
        lambda exchange, mine, there: exchange.reduce_gradients(LAYERS[0], mine, partition, there),
        exchanges,
        first,
        copies,
    )
    team.each(PartExchange.wait_for_copies, exchanges)
    close = partial(torch.allclose, rtol=1e-2, atol=1e-6 if dtype is torch.bfloat16 else 1e-12)
    for worker, mine, theirs in zip(WORKERS, first, copies, strict=True):
        _expect(
            all(
                close(theirs.get(span, mine[slice(*span)]).cpu().double(), totals[slice(*span)])
                for span in partition.stored_parts(worker)
            ),
            f"{worker} has other sums of what it keeps",
        )
    team.each(work, exchanges, given, copies, parameters)
    owners = {
        element: float(rank)
        for rank, worker in enumerate(WORKERS)
        for span in partition.own_parts(worker)
        for element in range(*span)
    }
    expected = [owners[element] for element in range(total)]
    _expect(
        all(its[:total].tolist() == expected for its in parameters),
        "parameters are not those of their owners",
    )


def bytes_between(team: Team) -> None:
    """Check that bytes can be sent between workers."""
    sessions = _all_share(team)
    arrived = team.begin(team.members[2], sessions[2].receive_bytes, LAYERS[0], WORKERS[0])
    sessions[0].send_bytes(b"some bytes", LAYERS[0], WORKERS[2])
    _expect(arrived.result(LIMIT_SECONDS) == b"some bytes", "other bytes arrived than were sent")


def _all_share(team: Team) -> list[GenerationSession]:
    """Return sessions of three workers that hold layers 0 and 1 together."""
    return team.each(
        lambda session: session.connect({LAYERS[0]: WORKERS}, bytes_too=True),
        list(map(team.session, team.members)),
    )


def _becomes_over(session: GenerationSession) -> bool:
    """Return whether the device soon reports that all operations have ended.

    A separate thread asks it.
    """
    return _becomes(session, HELD_UP_SECONDS, quiescent=True)


def _becomes(session: GenerationSession, seconds: float, *, quiescent: bool) -> bool:
    """Return whether the session soon reports that all operations have ended, or not."""
    # Looks are counted, so that members in processes of their own all look as often.
    for _ in range(round(LOOKS * seconds / HELD_UP_SECONDS)):
        if session.is_quiescent() is quiescent:
            return True
        time.sleep(HELD_UP_SECONDS / LOOKS)
    return False


def _expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise NotConformingError(otherwise)


def _raises(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise NotConformingError(f"after an abort, a call did not raise {kind.__name__}")


CHECKS: dict[str, Callable[[Team], None]] = {
    "tensors in order": in_order,
    "both ways at once": both_ways,
    "any tensor": any_tensor,
    "sums": sums,
    "sums over all": sums_over_all,
    "meeting": meeting,
    "commit point": commit_point,
    **{
        f"abort of {blocked.__name__[1:]}": partial(abort_of_a_blocked, blocked=blocked)
        for blocked in (_receives, _sums, _meets)
    },
    **{
        f"abort of {blocked.__name__[1:]} after a death": partial(
            abort_after_a_death, blocked=blocked
        )
        for blocked in (_receives, _sums)
    },
    "abort of a meeting": abort_of_a_meeting,
    **{
        f"abort of a group half made by {first}": partial(
            abort_of_a_half_made_group, first=first, second=2 - first
        )
        for first in (0, 2)
    },
    **{
        f"abort at any time, {size} elements": partial(abort_at_any_time, size=size)
        for size in (1, LARGE)
    },
    "clean groups live on": clean_groups,
    "nobody receives": nobody_receives,
    **{
        f"parts of {total} elements, {str(dtype)[6:]}, {len(gone)} gone": partial(
            parts, total=total, dtype=dtype, gone=gone
        )
        for total in (10, 4)
        for dtype in (torch.float64, torch.bfloat16)
        for gone in ((), (GONE,))
    },
    "bytes": bytes_between,
}
"""All checks by name."""
