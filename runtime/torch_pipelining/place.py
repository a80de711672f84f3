"""Join a run as a process of a worker, connect to others, and survive deaths."""

import contextlib
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Self

import torch
from torch import distributed, nn

from slipstream.runtime.processes.torchrun_store import open_common_store
from slipstream.runtime.ranks.worker_group import WorkerGroup
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.membership import GradientKey, Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.torch_groups import PrefixStore, Store, TCPStore
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.replay.transport import TransportName
from slipstream.runtime.torch_pipelining.agreement import Agreement, Decision, LeftOutError, Voice
from slipstream.runtime.torch_pipelining.mates import Mates
from slipstream.runtime.torch_pipelining.routes import NoRouteError, Routes
from slipstream.runtime.torch_pipelining.state import (
    pack_state,
    require_all_parameters,
    unpack_state,
)
from slipstream.runtime.torch_pipelining.watch import Watch
from slipstream.schedules.schedule import Worker

WORKER_VARIABLE = "SLIPSTREAM_WORKER"
"""Environment variable that names a process's worker, as torchrun may change its rank."""
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.002
Form = tuple[tuple[int, ...], torch.dtype, bool]
"""Form of a tensor between two stages: shape, dtype, and whether it has a gradient."""


class Place:
    """Membership of this process in a run, as a rank of one worker.

    Attributes
    ----------
    worker, rank, ranks
        Worker of this process, its number within the worker, and how many processes a worker has.
    routes
        Routes of the present generation.
    committed
        Number of iterations that this process has committed.
    last_sum
        Sum over all workers of the values that they gave to the last `commit`.
    has_returned
        True if a lost worker is back and asks to take part, so that `recover` should be called.
    mates
        Connection to the other ranks of this worker, with which this one fails.
    """

    def __init__(
        self,
        routes: Routes,
        worker: Worker,
        rank: int,
        ranks: int,
        store: Store,
        host: str,
        *,
        device: torch.device,
        transport: TransportName,
        patience: float,
    ) -> None:
        self.routes, self.worker, self.rank, self.ranks = routes, worker, rank, ranks
        self.device, self._shared = device, store
        self.committed, self.last_sum, self.has_returned = 0, 0.0, False
        self.newcomers: tuple[Worker, ...] = ()
        self.forms: dict[int, tuple[Form, ...]] = {}
        """Forms of the tensors before each stage, and behind the last, once they are known."""
        self._links = GroupCache(transport)
        self._session: GenerationSession | None = None
        self._group = None if ranks == 1 else WorkerGroup(rank, ranks)
        self._agreement = Agreement(store, f"{worker}:{rank}", ranks, patience)
        self.mates = Mates(rank, ranks, lambda: self._agreement.end(self._agreement.number))
        self._watch = Watch(host, self._end_if_told)
        self._decision: Decision | None = None
        self._has_state, self._patience = True, patience

    @classmethod
    def take(
        cls,
        routes: Routes,
        worker: str | Worker | None = None,
        *,
        store: Store | None = None,
        inner: int = 1,
        device: str | torch.device = "cpu",
        transport: TransportName = "gloo",
        patience: float = PATIENCE_SECONDS,
        returns: bool = True,
    ) -> Self:
        """Take the place of a worker, and connect to the others; all processes call this.

        If the run goes on already, this is a worker that returns: the process asks to become a
        member, and waits until the others commit. If torch.distributed is not initialised, this
        initialises it for the processes of this worker alone, so all meshes are inside the worker.
        Raises TimeoutError if others do not come or commit in time; RuntimeError, torch's, if store
        or other ranks of this worker cannot be reached; NoRouteError if there is no schedule for
        the live workers; LeftOutError if the run goes on without this process and no worker may
        return; and ValueError for a worker that is unknown or down in `routes`, or if processes
        have different routes.

        Parameters
        ----------
        routes
            Routes of the first generation.
        worker
            Worker of this process. None: the one that the environment variable SLIPSTREAM_WORKER
            names, or else the live worker with index RANK // inner.
        store
            Store that all processes share; None: torchrun's. If the process that hosts it dies,
            nobody recovers.
        inner
            Number of processes of each worker; this one has number RANK % inner there.
        device
            Device of this process.
        transport
            "gloo" or "nccl".
        patience
            Longest wait in seconds. After it, a process that lives but is silent is left out of a
            recovery; and waiting for what others publish, for other ranks of this worker or for the
            device ends in an error.
        returns
            Whether the program calls `share_state`, so that a worker may return.
        """
        # Which worker this process is: as told, by the environment, or by its rank.
        world_rank = int(os.environ.get("RANK", "0"))
        if worker is None:
            worker = os.environ.get(WORKER_VARIABLE) or _worker_of_rank(routes, world_rank // inner)
        worker = worker if isinstance(worker, Worker) else Worker.parse(worker)
        if worker not in routes.grid_workers:
            raise ValueError(
                f"the schedule has no worker {worker}; expected one of "
                f"{routes.grid_workers[0]} to {routes.grid_workers[-1]}, for example "
                f"by {WORKER_VARIABLE}"
            )
        # Meet the others through the store, in the first generation or a later one.
        store = store or open_common_store(world_rank)
        place = cls(
            routes,
            worker,
            world_rank % inner,
            inner,
            store,
            _own_host(store),
            device=torch.device(device),
            transport=transport,
            patience=patience,
        )
        place._begin(returns)
        return place

    @property
    def store(self) -> Store:
        """Store that all processes of this run share."""
        return self._agreement.store

    @property
    def session(self) -> GenerationSession:
        """Transfers and sums among the members of the present generation."""
        assert self._session is not None
        return self._session

    def commit(self, value: float = 0.0) -> float:
        """Wait until all live workers have all gradients; return the sum of their values.

        Then all workers have what they need to step, so no step has to be undone: step after this
        and before anything else. A worker's value is the mean of `value` over its processes.
        Raises CommunicationError if a worker has died; then call `recover`. Raises ValueError if
        `share_state` has to be called first, for a worker that has returned.
        """
        session = self.session
        if self.newcomers:
            raise ValueError(
                f"worker {self.newcomers[0]} has returned without state; expected "
                "share_state before the next iteration"
            )
        sums: Sequence[float] = (0.0, 0.0)
        # One process counts the joiners, and the sum tells all: so all recover in the same place.
        with self.mates.deferring_errors():
            session.reach_commit_point()
            new = self._count_new_joiners() if self._is_first else 0
            sums = session.start_sum_over_all([value / self.ranks, new]).wait_for_sums()
        sums = self.mates.settle(sums, needs_all=False)  # whoever is past it knows for all
        self.committed, self.last_sum, self.has_returned = self.committed + 1, sums[0], sums[1] > 0
        return sums[0]

    def share_state(
        self, modules: Mapping[int, nn.Module], optimizer: torch.optim.Optimizer
    ) -> None:
        """Send parameters and optimizer state to workers that have returned, if there are any.

        All workers call this after `take` and after `recover`, once they have made a step that they
        owed, and have created their stages (which undoes what FSDP has gathered). `modules` has the
        module of each stage that this worker holds. Raises CommunicationError, NoRouteError if
        nobody has the state of a stage, and ValueError if the optimizer has parameters that belong
        to none of the modules, or state that is no tensor.
        """
        newcomers = set(self.newcomers)
        if newcomers:
            require_all_parameters(modules.values(), optimizer)
            with self.mates.failing_together():
                self._pass_state(modules, optimizer, newcomers)
        self.newcomers, self._has_state = (), True

    def _pass_state(
        self,
        modules: Mapping[int, nn.Module],
        optimizer: torch.optim.Optimizer,
        newcomers: Collection[Worker],
    ) -> None:
        # In the order of stages, and from the first holder with state: alike on all workers.
        for stage, module in sorted(modules.items()):
            holders, key = self.routes.holders(stage), f"stage {stage}"
            source = next((worker for worker in holders if worker not in newcomers), None)
            if source is None:
                raise NoRouteError(
                    f"no live worker has the state of stage {stage}; go back to a checkpoint"
                )
            if source == self.worker:
                for target in sorted(set(newcomers) & set(holders)):
                    self.session.send_bytes(pack_state(module, optimizer), key, target)
            elif self.worker in newcomers:
                unpack_state(self.session.receive_bytes(key, source), module, optimizer)

    def sum_over_all(self, value: float) -> float:
        """Return the sum over all processes, which all call this. Raises CommunicationError."""
        with self.mates.failing_together():
            sums = self.session.start_sum_over_all([value]).wait_for_sums()
        return sums[0]

    def recover(self) -> bool:
        """Go on with the workers that live or return; return whether to step first.

        Call this after a CommunicationError, or if `has_returned`; then make new stages around the
        same modules. The result is True if other processes have committed the iteration: this one
        has all gradients, and must step with them. If False, the iteration is run again.

        Raises NoRouteError or another error of `Routes.without` if these workers cannot go on,
        LeftOutError if the others go on without this process, TimeoutError if the device does not
        end aborted transfers, ValueError if another process has other routes, and torch's DistError
        if the store is gone.
        """
        assert self._decision is not None
        self.mates.fail("another rank of this worker recovers")
        while True:
            self._leave()
            try:
                return self._enter(self._agreement.go_on(self._own_voice(), self._decision))
            except CommunicationError:  # another one died meanwhile
                continue

    def close(self) -> None:
        """Wait for all workers, and close the connections; call this after the last step.

        Workers wait here because one that still owes the last step learns that from the others.
        Raises the errors of `recover` except DistError, and LeftOutError if the run ended before
        this worker had its state. A second call does nothing.
        """
        if self._session is None:
            return
        with contextlib.suppress(distributed.DistError):  # who has the store may be gone by now
            while not self._have_all_ended():
                self.recover()
        # From here on a process that ends is no death.
        self._watch.follow(None, lambda: None)
        with contextlib.suppress(distributed.DistError):
            self._leave()
        self._watch.close()
        if not self._has_state:
            raise LeftOutError(
                "the run has ended before this worker had its state; expected "
                "share_state before it: its parameters are the initial ones, take "
                "another worker's"
            )

    def publish(self, key: str, value: str) -> None:
        """Publish a value to all processes, under a key that is never given another value."""
        self.store.set(f"told/{key}", value)

    def knows(self, key: str) -> bool:
        """Return whether a process has published a value under this key."""
        return self.store.check([f"told/{key}"])

    def read(self, key: str) -> str:
        """Wait for the value published under a key, and return it.

        Raises CommunicationError if the generation ends, or if nothing comes in `patience` seconds.
        """
        name, deadline = f"told/{key}", time.monotonic() + self._patience
        while not self.store.check([name]):
            self.session.raise_if_ended()
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"nobody said {key!r} in {self._patience:g} s; expected all workers to step"
                )
            time.sleep(POLL_SECONDS)
        return self.store.get(name).decode()

    def _have_all_ended(self) -> bool:
        """Wait until all members have called this; return False if one dies before."""
        # The last to come publishes that all have. Ranks that learn it tell those that do not.
        assert self._decision is not None
        number, members = self._agreement.number, len(self._decision.voices)
        key = f"all have ended {number}"
        try:
            self.session.wait_for_device()
            if self.store.add(f"have ended {number}", 1) == members:
                self.publish(key, "")
            self.read(key)
        except CommunicationError as error:  # those past this leave, which ends the generation
            if not self.knows(key):
                self.mates.keep(error)
        try:
            self.mates.settle(needs_all=False)
        except CommunicationError:
            return False
        return True

    def _count_new_joiners(self) -> int:
        assert self._decision is not None
        return self._agreement.count_joiners() - self._decision.joiners

    @property
    def _is_first(self) -> bool:
        assert self._decision is not None
        return next(iter(self._decision.voices)) == self._process

    @property
    def _process(self) -> str:
        return f"{self.worker}:{self.rank}"

    def _begin(self, returns: bool = True) -> None:
        """Become a member of the first generation, or if `returns`, of a later one."""
        # Connect the ranks of this worker, for collectives inside it.
        own_store = self._store_of_ranks()
        self.mates.connect(own_store, self._patience)
        if not distributed.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            distributed.init_process_group(
                backend,
                store=own_store,
                rank=self.rank,
                world_size=self.ranks,
                timeout=timedelta(seconds=self._patience),
            )
        # A process that comes when the run goes on already has no state.
        self._has_state = not self._agreement.has_begun()
        if not (self._has_state or returns):
            self._watch.close()
            raise LeftOutError(
                f"the others go on without worker {self.worker}, and this program "
                "takes no worker back; expected it to stay away until the run ends"
            )
        if self._has_state and self.worker not in self.routes.workers:
            raise ValueError(
                f"worker {self.worker} is down in the routes that the run begins "
                f"with; expected one of {', '.join(map(str, self.routes.workers))}"
            )
        if self._has_state:
            decision = self._agreement.start(self._own_voice(), self.routes.workers)
        else:
            decision = self._agreement.join(self._own_voice())
        try:
            self._enter(decision)
        except CommunicationError:
            self.recover()

    def _store_of_ranks(self) -> Store:
        """Return a store for the processes of this worker that were started together."""
        if self.ranks == 1:
            return PrefixStore(f"ranks {self._watch.address}/", self._shared)
        # All processes of a worker have one agent, whose count of restarts keeps those that start
        # together apart from one that died before the others came.
        start = f"{self.worker} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        visits = self._shared.add(f"visits of {start}", 1)
        return PrefixStore(f"ranks of {start} {(visits - 1) // self.ranks}/", self._shared)

    def _own_voice(self) -> Voice:
        committed = self.committed if self._has_state else None
        return Voice(address=self._watch.address, committed=committed, sums=(self.last_sum.hex(),))

    def _enter(self, decision: Decision) -> bool:
        """Connect to the members of `decision`; return whether this process lags a step behind."""
        # Find the routes for the workers that live.
        self._decision, number = decision, self._agreement.number
        live = decision.workers
        self.routes = self.routes.without(set(self.routes.grid_workers) - set(live))

        # Connect; each member watches the next one, so that all are watched in a circle.
        members = [*decision.voices]
        after = members[(members.index(self._process) + 1) % len(members)]
        ranks = {worker: place for place, worker in enumerate(live)}
        self._session = GenerationSession(
            Membership(number, ranks, self.worker, self._group),
            links=self._links,
            device=self.device,
            store=self.store,
            exempt_sockets=self._watch.sockets,
        )
        self._watch.follow(
            None if after == self._process else decision.voices[after].address,
            lambda: self._agreement.end(number),
        )
        with self.mates.failing_together():
            self._connect()

        # One that got past the commit proves that all have their gradients: the others step later.
        latest = decision.latest.committed or 0
        owes_step = self._has_state and self.committed < latest
        self.newcomers, self.has_returned = decision.newcomers, False
        if self.committed < latest:
            self.last_sum = float.fromhex(decision.latest.sums[0])
        self.committed = latest
        return owes_step

    def _connect(self) -> None:
        session, routes = self.session, self.routes
        sharers: dict[GradientKey, Sequence[Worker]] = {
            f"stage {stage}": routes.holders(stage) for stage in routes.stages_of(self.worker)
        }
        session.connect(sharers, pairs=_find_pairs(routes, self.worker), sums=True, bytes_too=True)
        self._require_same_routes()
        session.raise_if_ended()

    def _require_same_routes(self) -> None:
        # Planned twice, within some seconds, a job has other plans.
        key = f"routes {self._agreement.number}"
        if self._is_first:
            self.publish(key, self.routes.digest)
        elif self.read(key) != self.routes.digest:
            raise ValueError(
                "this process has other routes than the first one; expected the "
                "same: plan once, write a table (slipstream table), and let all "
                "processes read it"
            )

    def _end_if_told(self) -> None:
        """Abort the session if a member has ended the generation."""
        # Called by the watch, so that transfers with live workers end, too.
        session, number = self._session, self._agreement.number
        with contextlib.suppress(distributed.DistError):  # without it, it goes on until a death
            if session is not None and self._agreement.has_ended(number):
                session.abort()

    def _leave(self) -> None:
        if self._session is None:
            return
        try:
            self._agreement.end(self._agreement.number)
        finally:
            self._session.abort()
            self._await_quiescence()  # `drain` has no limit of time
            self._session.drain()
            self._session.close()
            self._session = None

    def _await_quiescence(self) -> None:
        deadline = time.monotonic() + self._patience
        while not self.session.is_quiescent():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"transfers of {self._process} have not ended "
                    f"{self._patience:g} s after they were aborted; expected the "
                    "device to answer: end this process, and start it again"
                )
            time.sleep(POLL_SECONDS)


def _find_pairs(routes: Routes, worker: Worker) -> Collection[tuple[Worker, Worker]]:
    """Return the pairs (source, target) of workers between which `worker` sends or receives."""
    # A row names no peers: they follow from who has the other end of each transfer.
    pairs: set[tuple[Worker, Worker]] = set()
    for stage, action, microbatch in routes.rows[worker]:
        if microbatch is None:
            continue
        step = 1 if action in ("SEND_F", "RECV_B") else -1
        if action.startswith("SEND"):
            pairs.add((worker, routes.worker_with(stage + step, f"RECV{action[4:]}", microbatch)))
        elif action.startswith("RECV"):
            pairs.add((routes.worker_with(stage + step, f"SEND{action[4:]}", microbatch), worker))
    return pairs


def _worker_of_rank(routes: Routes, number: int) -> Worker:
    if number >= len(routes.workers):
        raise ValueError(
            f"rank {os.environ.get('RANK')} has no worker: the schedule has "
            f"{len(routes.workers)} live workers; start as many processes, or name "
            f"the worker in {WORKER_VARIABLE}"
        )
    return routes.workers[number]


def _own_host(store: Store) -> str:
    """Return this machine's address towards a TCPStore; loopback for any other store."""
    # Of several addresses, this is one that other processes of the run can reach as well.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "127.0.0.1"
    with socket.create_connection((store.host, store.port), timeout=PATIENCE_SECONDS) as connection:
        return str(connection.getsockname()[0])
