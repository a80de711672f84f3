"""Tensors between workers: point to point, and summed over the workers of a stage.

An `Epoch` holds the process groups of one quorum and is dropped whole with it. Groups come from torchft, which makes
them without the global state of torch.distributed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllreduceOptions
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from runtime.config import ConfigError
from runtime.coordinator.membership import Quorum
from runtime.errors import first_line
from runtime.replay.group_store import Bulletin
from runtime.replay.stuck_calls import TALKS
from schedules.schedule import Worker

Transport = Literal["gloo", "nccl"]
TIMEOUT = timedelta(minutes=10)
"""Of any one transfer. Long, because a gloo timeout closes all connections; a dead peer is noticed in milliseconds."""
CLOCK_ROUNDS = 8


class CommunicationError(RuntimeError):
    """A peer is gone, or did not answer in time. The message is one line."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor being sent; it must live until it has been."""

    work: Work
    payload: Tensor
    target: Worker

    def wait(self) -> None:
        """Wait until the tensor may go. Raises CommunicationError."""
        with _speaking_of(f"sending to worker {self.target}"):
            self.work.wait()


@dataclass(frozen=True, slots=True)
class Arriving:
    """A tensor on its way here."""

    work: Work
    payload: Tensor
    source: Worker
    device: torch.device

    def take(self) -> Tensor:
        """Wait for the tensor, on the device that computes. Raises CommunicationError."""
        with _speaking_of(f"receiving from worker {self.source}"):
            self.work.wait()
        return self.payload.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Summing:
    """Numbers on their way to being summed over all workers."""

    work: Work
    payload: Tensor

    def arrived(self) -> bool:
        """Whether `take` returns at once."""
        return bool(self.work.is_completed())

    def take(self) -> Sequence[float]:
        """Wait for the sums. Raises CommunicationError."""
        with _speaking_of("summing over all workers"):
            self.work.wait()
        sums: list[float] = self.payload.tolist()
        return sums


class Epoch:
    """What the members of one quorum say to each other, on one device each.

    `teams` holds, for each stage this worker hosts (copies by the name of their original), all live workers that do;
    `sums` says whether `sum_over_all` will be used. `store` is where the groups find each other; `require` may raise
    what shall end their waiting there. Gloo carries host memory only, so tensors of a GPU pass through pinned buffers.
    Gloo matches transfers by tag; NCCL by their order, so every worker must issue its transfers in an order that all of
    them agree on (that of `schedules.graph.transfers`).
    """

    def __init__(self, quorum: Quorum, worker: Worker, teams: Mapping[int, Sequence[Worker]], *, transport: Transport,
                 device: torch.device, store: Store, sums: bool = False,
                 require: Callable[[], None] = lambda: None) -> None:
        self.device = device
        self.ordered = transport == "nccl"
        """Whether transfers are matched by their order, and so have to be issued in one that all agree on."""
        self._staged = transport == "gloo" and device.type != "cpu"
        self._transport_device = torch.device("cpu") if self._staged else device
        self._ranks = quorum.ranks
        self._worker = worker

        def group(name: str, members: Sequence[Worker], transport: Transport = transport) -> ProcessGroup:
            place, rank = f"epoch{quorum.number}/{name}", members.index(worker)
            with _speaking_of(f"meeting the workers of {name}"):
                if transport == "gloo":
                    # What `configure` does, but that it would open another connection to the store.
                    gloo = ProcessGroupGloo(TIMEOUT)
                    gloo._pg = gloo._create_pg(Bulletin(store, f"{place}/", TIMEOUT, require), rank, len(members))
                    return gloo
                made = ProcessGroupNCCL(TIMEOUT)
                # NCCL's own threads use the store, for as long as they live: not one that they share, nor Python.
                assert isinstance(store, TCPStore)
                made.configure(f"{store.host}:{store.port}/{place}", str(worker), rank, len(members),
                               quorum_id=quorum.number)
            return made

        everyone = sorted(quorum.ranks, key=quorum.ranks.__getitem__)
        self._world = group("the world", everyone)
        # Numbers of the host: over gloo also where tensors go over NCCL, whose stream they would hold up.
        self._sums = group("sums", everyone, "gloo") if sums else None
        self._teams: dict[int, ProcessGroup] = {}
        # All members make their groups in the order of the stages: nobody waits for one who waits elsewhere.
        for stage, members in sorted(teams.items()):
            if len(members) > 1:
                self._teams[stage] = group(f"stage {stage}", sorted(members))

    def send(self, tensor: Tensor, target: Worker, tag: int) -> Outgoing:
        """Start sending; computing goes on."""
        payload = tensor.detach().contiguous()
        if self._staged:
            payload = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True).copy_(payload)
        with _speaking_of(f"sending to worker {target}"):
            return Outgoing(self._world.send([payload], self._ranks[target], tag), payload, target)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: Worker, tag: int) -> Arriving:
        """Make room for a tensor, and start receiving it."""
        payload = self._buffer(shape, dtype)
        with _speaking_of(f"receiving from worker {source}"):
            return Arriving(self._world.recv([payload], self._ranks[source], tag), payload, source, self.device)

    def sum_over_stage(self, stage: int, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the live workers of a stage. Raises CommunicationError."""
        team = self._teams.get(stage)
        if team is None:
            return
        with _speaking_of(f"summing the gradients of stage {stage}"):
            carried = [tensor.cpu() for tensor in tensors] if self._staged else list(tensors)
            for work in [team.allreduce([tensor], AllreduceOptions()) for tensor in carried]:
                work.wait()
        if self._staged:
            for tensor, total in zip(tensors, carried, strict=True):
                tensor.copy_(total)

    def sum_over_all(self, values: Sequence[float]) -> Summing:
        """Start to sum numbers over all members; computing goes on. Needs `sums`."""
        assert self._sums is not None
        payload = torch.tensor(values, dtype=torch.float64)
        with _speaking_of("summing over all workers"):
            return Summing(self._sums.allreduce([payload], AllreduceOptions()), payload)

    def clock_offset(self) -> float:
        """Seconds to add to this worker's perf_counter to read that of rank 0. All members must call it together.

        The offset seen in the quickest of a few round trips, as in NTP; rank 0 answers the others one by one.
        """
        by_rank = sorted(self._ranks, key=self._ranks.__getitem__)
        if self._worker == by_rank[0]:
            for peer in by_rank[1:]:
                for _ in range(CLOCK_ROUNDS):
                    self.receive((1,), torch.float64, peer, 0).take()
                    self.send(torch.tensor([perf_counter()], dtype=torch.float64, device=self.device), peer, 0).wait()
            return 0.0
        return min(self._ask_time(by_rank[0]) for _ in range(CLOCK_ROUNDS))[1]

    def _ask_time(self, reference: Worker) -> tuple[float, float]:
        """How long the question took, and the offset it found."""
        asked = perf_counter()
        self.send(torch.zeros(1, dtype=torch.float64, device=self.device), reference, 0).wait()
        answer = self.receive((1,), torch.float64, reference, 0).take().item()
        answered = perf_counter()
        return answered - asked, answer - (asked + answered) / 2

    def settle(self) -> None:
        """Wait until all members get here, so that none closes a connection another still reads from."""
        present = torch.ones(1, device=self._transport_device)
        with _speaking_of("waiting for all workers to end"):
            self._world.allreduce([present], AllreduceOptions()).wait()
            assert present.item() == len(self._ranks)  # reading it waits for the GPU, too

    def drop(self) -> None:
        """Close all groups; peers that wait for this worker are released with an error."""
        for team in self._teams.values():
            team.abort()
        if self._sums is not None:
            self._sums.abort()
        self._world.abort()

    def _buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._staged:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


@contextmanager
def _speaking_of(what: str) -> Iterator[None]:
    """Turn what a process group raises into one line that says what was going on."""
    TALKS.begin()
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{what} failed: {first_line(error)}") from error
    finally:
        TALKS.end()


def choose_transport(wanted: str, device: str, workers: int, cards: int) -> Transport:
    """NCCL where each of a machine's workers computes on a card of its own, else gloo.

    Raises ConfigError when NCCL is asked for where it cannot work: it refuses two workers on one card.
    """
    able = device == "cuda" and workers <= cards
    if wanted == "nccl" and not able:
        raise ConfigError(f"training.backend is 'nccl', which needs a GPU for each worker; here are {cards} for "
                         f"{workers} workers")
    return "nccl" if able and wanted != "gloo" else "gloo"
