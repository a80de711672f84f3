"""Run the checks of `benchmarks.conformance` for workers in separate processes.

NCCL demands that on one card. A check is a function of a team, and calls the members one by one.
Here all processes run the same check at the same time. Whatever concerns one member is carried out
in its process, and its outcome is sent to the others, so that all of them take the same path. A
call in the check's main thread begins once all processes are there, and what `begin` starts runs in
a thread of its owner, as in a team of threads. Tensors that such a call has changed are copied to
all processes.
"""

import pickle
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.conformance import CHECKS, NCCL, STAGED, WORKERS, Member, NotConformingError, Team
from benchmarks.devices.crew import Crew, CrewError
from benchmarks.devices.crew import Member as Process
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.store import connect_store, host_store
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.torch_groups import TCPStore

DOUBLE = "double of NCCL"
"""Name of the double of NCCL that tests use, on CPUs."""
MODULES = {DOUBLE: ("tests.runtime.over_double",)}
"""Modules that processes import for a transport."""
CHECK_SECONDS = 45.0
"""Time limit of a check, in seconds. Most checks take a second, or a few on a busy machine."""
LOOK_SECONDS = 0.0005
_PLAIN = (bool, int, float, str, bytes, type(None), BaseException)


class Agreement:
    """Outcomes of one check, by which all processes take the same path through it."""

    def __init__(self, store: TCPStore, name: str, place: int, size: int) -> None:
        self.place = place
        self._store, self._name, self._size = store, name, size
        self._number = 0
        self._objects: dict[tuple[int, int], Elsewhere] = {}
        self._numbers: dict[int, int] = {}
        """Numbers of the objects of this process, by their `id`."""
        self._kept: list[object] = []
        self.given: dict[int, list[Tensor]] = defaultdict(list)
        """Tensors that calls of each member may change."""
        self.inside = threading.local()
        """Thread-local data, with `owner` in threads of `begin`, which call its objects directly.
        """

    def outcome(self, owner: int, call: Callable[[], Any]) -> Any:
        """Return what a call returns or raises in its owner's process.

        All processes wait for each other first.
        """
        self._number += 1
        key = f"{self._name} {self._number}"
        self._store.add(f"{key} here", 1)
        if owner == self.place:
            self._wait(lambda: self._store.add(f"{key} here", 0) == self._size)
            try:
                result = True, self.portable(call())
            except Exception as error:
                result = False, error
            self._store.set(key, pickle.dumps(result))
        else:
            self._wait(lambda: self._store.check([key]))
            result = pickle.loads(self._store.get(key))  # noqa: S301  # of a process of this step
        well, value = result
        if not well:
            raise value
        return self.local(value)

    def fail(self) -> None:
        """Report that this process has left the check; the others need not wait."""
        self._store.add(f"{self._name} failed", 1)

    def portable(self, value: Any) -> Any:
        """Return what represents a value in other processes.

        Objects are numbered, and tensors are copied to the CPU.
        """
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            return value.detach().cpu()
        if isinstance(value, Elsewhere):
            return value.reference
        if isinstance(value, Mapping):
            return {key: self.portable(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.portable(item) for item in value]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return _Reference(self.place, self._numbers[id(value)])

    def local(self, value: Any) -> Any:
        """Return what a check sees of a portable value."""
        if isinstance(value, _Reference):
            key = value.owner, value.number
            if key not in self._objects:
                there = self._kept[value.number] if value.owner == self.place else None
                self._objects[key] = Elsewhere(self, value, there)
            return self._objects[key]
        if isinstance(value, dict):
            return {key: self.local(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.local(item) for item in value]
        return value

    def share(self, owner: int, value: object) -> Any:
        """Return an object that exists only in its owner's process."""
        return self.outcome(owner, lambda: value)

    def _wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + CHECK_SECONDS
        while not ready():
            if self._store.check([f"{self._name} failed"]):
                raise NotConformingError("another worker has failed")
            if time.monotonic() > deadline:
                raise NotConformingError("another worker did not come")
            time.sleep(LOOK_SECONDS)


class _Reference(NamedTuple):
    """Reference to an object of another process."""

    owner: int
    number: int


class Elsewhere:
    """Proxy of an object of one member's process, in which its methods run.

    All processes get the results.
    """

    def __init__(self, agreement: Agreement, reference: _Reference, there: object) -> None:
        self._agreement, self.reference, self.there = agreement, reference, there

    def __getattr__(self, name: str) -> Any:
        if getattr(self._agreement.inside, "owner", None) == self.reference.owner:
            return getattr(self.there, name)
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        # It was looked up before.
        if getattr(self._agreement.inside, "owner", None) == self.reference.owner:
            return getattr(self.there, name)(*arguments, **named)
        return self._agreement.outcome(
            self.reference.owner, lambda: getattr(self.there, name)(*_own(arguments), **named)
        )


class Begun:
    """Call that `ProcessTeam.begin` has started, with the methods of a Future that checks need."""

    def __init__(self, agreement: Agreement, owner: int, future: "Future[Any]") -> None:
        self._agreement, self._owner, self._future = agreement, owner, future

    def done(self) -> bool:
        """Return whether the call has ended."""
        return bool(self._agreement.outcome(self._owner, self._future.done))

    def exception(self, timeout: float) -> BaseException | None:
        """Wait for the end of the call, and return what it has raised."""
        return cast(
            BaseException | None,
            self._agreement.outcome(self._owner, lambda: self._future.exception(timeout)),
        )

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end of the call, and return its result."""
        given = self._agreement.given[self._owner]
        result, tensors = self._agreement.outcome(
            self._owner, lambda: (self._future.result(timeout), given)
        )
        for mine, theirs in zip(given, tensors, strict=True):
            if self._owner != self._agreement.place:
                mine.copy_(theirs)
        return result


class ProcessTeam(Team):
    """Workers that communicate over one transport, one of which is this process."""

    def __init__(self, transport: str, agreement: Agreement, address: Rendezvous) -> None:
        self.store = connect_store(address)
        self.ordered = "gloo" not in transport
        self._agreement = agreement
        device = (
            torch.device("cuda", agreement.place % torch.cuda.device_count())
            if transport in {STAGED, NCCL}
            else torch.device("cpu")
        )
        backend = "nccl" if self.ordered else "gloo"
        self.members = [Member(worker, device, GroupCache(backend)) for worker in WORKERS]
        self._ranks = {worker: rank for rank, worker in enumerate(WORKERS)}
        self._pool = ThreadPoolExecutor(2 * len(WORKERS))
        self._sessions: list[GenerationSession] = []

    def session(self, member: Member, order: int = 1) -> GenerationSession:
        """Return a session that is not connected."""
        owner, made = self._ranks[member.worker], None
        if owner == self._agreement.place:
            made = GenerationSession(
                Membership(order, self._ranks, member.worker),
                links=member.links,
                device=member.device,
                store=self.store,
            )
            self._sessions.append(made)
        return cast(GenerationSession, self._agreement.share(owner, made))

    def begin(self, member: Member, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Start a call in a thread of the member's process."""
        owner = self._ranks[member.worker]

        def work() -> Any:
            self._agreement.inside.owner = owner
            return call(*_own(arguments))

        future = super().begin(member, work) if owner == self._agreement.place else Future[Any]()
        given = self._agreement.given[owner]
        new = [*_tensors(arguments)]
        for kept in list(given):
            new = [tensor for tensor in new if tensor is not kept]
        given += new
        return cast("Future[Any]", Begun(self._agreement, owner, future))


def _own(value: Any) -> Any:
    """Return a call's arguments in its owner's process, with objects for proxies."""
    if isinstance(value, Elsewhere):
        return value if value.there is None else value.there
    if isinstance(value, list | tuple) and not isinstance(value, Member):
        return type(value)(map(_own, value)) if type(value) in (list, tuple) else value
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif type(value) in (list, tuple):
        items = value
    for item in items:
        yield from _tensors(item)


def check_transport(process: Process) -> None:
    """Run checks in this process, and report what is wrong with each of them."""
    transport, place = process.task["transport"], process.place
    for name in process.task["modules"]:
        import_module(name)
    if transport in {STAGED, NCCL}:
        torch.cuda.set_device(place % torch.cuda.device_count())
    opened = []
    for name in process.task["checks"]:
        if place == 0:
            store, address = host_store()
            opened.append(store)
            process.store.set(f"store of {name}", f"{address}")
        address = Rendezvous.parse(process.store.get(f"store of {name}").decode())
        agreement = Agreement(process.store, name, place, process.size)
        team = ProcessTeam(transport, agreement, address)
        began, wrong = time.monotonic(), None
        try:
            CHECKS[name](team)
        except Exception as error:
            wrong = (
                str(error)
                if isinstance(error, NotConformingError)
                else f"{type(error).__name__}: {error}"
            )
            agreement.fail()
        finally:
            team.close()
        process.tell(check=name, wrong=wrong, seconds=time.monotonic() - began)
        if wrong is not None:
            return


class Checked(NamedTuple):
    """Result of the checks of a transport."""

    passed: int
    failures: dict[str, str]
    """Description of what is wrong, by name of the check."""
    left: int
    """Number of checks for which there was no time."""

    def __str__(self) -> str:
        text = f"{self.passed} of {len(CHECKS)}"
        text += f", {self.left} not run" if self.left else ""
        first = next(iter(self.failures.items()), None)
        return text if first is None else f"{text}; {first[0]}: {first[1]}"


def check_in_processes(
    transport: str,
    fork_server: ForkServer,
    log: Path,
    seconds: float,
    names: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
    modules: Sequence[str] = (),
) -> Checked:
    """Run all checks, or those with the given names, within a time limit.

    Processes that have failed a check are replaced. They import `modules`.
    """
    left, failures, passed = list(names or CHECKS), dict[str, str](), 0
    until = time.monotonic() + seconds
    while left and time.monotonic() < until:
        wrong, counts = None, Counter[str]()
        tasks = [
            {
                "transport": transport,
                "checks": left,
                "modules": (*MODULES.get(transport, ()), *modules),
            }
        ] * len(WORKERS)
        current, words = left[0], list[str]()
        with Crew(fork_server, f"{__name__}:check_transport", tasks, log) as crew:
            try:
                for _, said in crew.news(min(CHECK_SECONDS, max(1.0, until - time.monotonic()))):
                    counts[said["check"]] += 1
                    words += [said["wrong"]] if said["wrong"] is not None else []
                    if counts[current] < len(WORKERS):
                        continue
                    if words:
                        break
                    left, passed = left[1:], passed + 1
                    current = left[0] if left else ""
                    if time.monotonic() > until:
                        break
            except CrewError as error:
                words.append(str(error))
        if words and left:
            wrong = next(
                (text for text in words if not text.startswith("another worker")), words[0]
            )
            failures[left[0]] = wrong
            tell(f"{left[0]}: {wrong}")
            left = left[1:]
    return Checked(passed, failures, len(left))
