"""What carries tensors in tests of sessions: each kind that this machine has, and the double of NCCL."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.runtime.protocol.rendezvous import host_store
from slipstream.runtime.replay import session
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.nccl import Nccl
from slipstream.runtime.replay.session import Links, Session
from slipstream.schedules.schedule import Worker
from tests.runtime.replay.double import Double

TRANSPORTS = ["gloo on CPUs", "gloo beside GPUs", "nccl", "double of NCCL"]
LIMIT_SECONDS = 60.0


class Member(NamedTuple):
    """One worker, in this process."""

    worker: Worker
    device: torch.device
    links: Links

    def tensor(self, values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
        """On the device of this worker."""
        return torch.tensor(values, dtype=dtype, device=self.device)


class Team:
    """Workers that communicate over one transport, each in a thread of its own."""

    def __init__(self, transport: str, workers: Sequence[Worker]) -> None:
        self.store, _ = host_store()
        self.ordered = "gloo" not in transport
        devices = [torch.device("cpu")] * len(workers) if "GPU" not in transport and transport != "nccl" else [
            torch.device("cuda", place if self.ordered else 0) for place in range(len(workers))]
        self.members = [Member(worker, device, Links("nccl" if self.ordered else "gloo"))
                        for worker, device in zip(workers, devices, strict=True)]
        self.ranks = {worker: rank for rank, worker in enumerate(workers)}
        self._pool = ThreadPoolExecutor(2 * len(workers))
        self._sessions: list[Session] = []

    def session(self, member: Member, generation: int = 1) -> Session:
        """One that is not connected."""
        made = Session(Membership(generation, self.ranks, member.worker), links=member.links, device=member.device,
                       store=self.store)
        self._sessions.append(made)
        return made

    def begin(self, member: Member, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call in a thread that computes on the device of a worker; its future."""
        def work() -> Any:
            if member.device.type == "cuda":
                torch.cuda.set_device(member.device)
            return call(*arguments)

        return self._pool.submit(work)

    def each(self, call: Callable[..., Any], *lists: Sequence[Any]) -> list[Any]:
        """Call for all members at the same time."""
        begun = [self.begin(member, call, *arguments)
                 for member, *arguments in zip(self.members, *lists, strict=True)]
        return [one.result(LIMIT_SECONDS) for one in begun]

    def close(self) -> None:
        """End all that is left."""
        for one in self._sessions:
            one.abort()
        for one in self._sessions:
            one.close()
        for member in self.members:
            member.links.close()
        self._pool.shutdown(wait=False)


def require(transport: str, workers: int) -> None:
    """Skip a test where this machine lacks what it needs."""
    cards = torch.cuda.device_count()
    if transport == "gloo beside GPUs" and not cards:
        pytest.skip("needs a GPU")
    if transport == "nccl" and cards < workers:
        pytest.skip(f"needs {workers} GPUs, as NCCL refuses two workers on one; here are {cards}")


def use(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is the double, sessions of this process use it for NCCL."""
    if transport == "double of NCCL":
        monkeypatch.setattr(session, "Nccl", partial(Nccl, Double))
