"""Run the real control plane in virtual time, with workers that fail in all ways.

    python -m benchmarks.scale.chaos [--workers 1024] [--faults 200] [--seed 0] [--seconds 8]

The workers compute nothing. Node 0's event loop, its handshakes, frames and proofs, heartbeats,
commits, orders, fetches and take-overs are those of any run. Schedules are scripted: the first one
without the workers that are down, which takes a random time. Faults come one every `--seconds` on
average: a worker dies; a node agent dies, with its workers; a machine, or a rack of them, dies
without notice; node 0 dies; a worker is silent for less than the heartbeat timeout, or for longer.
All that die come back.

At each step the benchmark checks that the run commits within two minutes of virtual time; that each
iteration is committed once and in order; that no worker is told to continue from an iteration that
it cannot reach by undoing at most one step; and that no worker is given up that lives and was
heard.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

from msgspec.structs import replace

from benchmarks.scale import virtual
from benchmarks.scale.fakes import Fake, FakeAgent, FakeWorker
from benchmarks.scale.node_0 import Marks, NoProcesses, leading
from benchmarks.scale.shapes import first_schedule, job_of, shares_of
from slipstream.runtime.coordinator import event_loop
from slipstream.runtime.coordinator.planning.background import capture_result
from slipstream.runtime.events import LOSSES
from slipstream.runtime.processes.process_manager import NodeProcesses
from slipstream.runtime.processes.stop_signals import StopSignals
from slipstream.runtime.protocol.rendezvous import LOOPBACK, Rendezvous, open_listener
from slipstream.runtime.protocol.to_coordinator import (
    NOTHING_HELD,
    ReadableCheckpoints,
    RecoveryReport,
    WorkerEnded,
)
from slipstream.runtime.protocol.to_node_agent import KillWorker, NodeSetup, NodeTaken, StartWorker
from slipstream.runtime.protocol.to_worker import Acknowledged, Leave, ReportCheckpoints, Train
from slipstream.schedules.schedule import Schedule, Worker

TIMEOUT = 5.0
"""Timeout of heartbeats, in seconds."""
PATIENCE = 120.0
"""Maximum time without a commit, in seconds."""
FAULTS = {"worker": 60, "agent": 8, "machine": 8, "rack": 3, "pause": 10, "silence": 8, "node 0": 3}
"""Relative frequencies of faults."""
RACKS = 16
"""Number of racks that hold all machines, each at least two."""
RETURN = 900.0
"""Time after the last fault, in seconds, within which all workers must be back."""
BACK = 1.0, 20.0
"""Least and largest time, in seconds, until an agent is back."""


class BrokenError(AssertionError):
    """Exception for a promise that was not kept."""


class ChaosWorker(FakeWorker):
    """Fake worker that records how far it has stepped, and who has let it go."""

    def __init__(
        self, world: "World", worker: Worker, epoch: int = 0, former: RecoveryReport | None = None
    ) -> None:
        super().__init__(cast(Any, world), worker, epoch, former)
        self.world, self.failed = world, ()
        self.stepped: int | None = None
        """Last stepped iteration, or None if the worker has no layers."""
        self.silent_until = 0.0
        self.excused = False
        """True if the worker may be given up."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.world.disconnected(self)

    def take(self, message: object) -> None:
        match message:
            case Leave():
                self.world.given_up(self, "was told to leave")
            case ReportCheckpoints():
                self.say(ReadableCheckpoints(self.worker, (0,)))
            case _:
                super().take(message)

    def say(self, message: Any) -> None:
        delay = self.silent_until - self.world.loop.now
        if delay > 0:
            self.world.loop.call_later(delay, self.say, message)
        else:
            super().say(message)


class ChaosAgent(FakeAgent):
    """Fake agent that starts and ends the workers of its node."""

    def __init__(
        self, world: "World", node: int, epoch: int = 0, alive: tuple[Worker, ...] = ()
    ) -> None:
        super().__init__(node, epoch, alive)
        self.world, self.node, self.epoch = world, node, epoch

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.world.agent_disconnected(self)

    def take(self, message: object) -> None:
        match message:
            case NodeSetup():
                self.epoch = message.epoch
                for ended in self.world.ended[self.node].values():
                    self.say(ended)
                for worker in message.workers if not self._hello.epoch else ():
                    self.world.start(worker)
            case NodeTaken():
                self.abort()
            case StartWorker():
                self.world.start(message.worker)
            case KillWorker():
                self.world.killed(message.worker)
            case _:
                super().take(message)


class ProcessesOfNode0(NoProcesses):
    """Processes of node 0's own workers."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world
        self._ended: list[WorkerEnded] = []

    def ends(self, ended: WorkerEnded) -> None:
        """Report that a process has ended."""
        self._ended.append(ended)
        self._world.loop.call_later(0.01, self._told)

    def _told(self) -> None:
        os.write(self._writable, b"!")

    def poll(self) -> list[object]:
        os.read(self._readable, 1)
        ended, self._ended = self._ended, []
        return list(ended)

    def execute_command(self, command: object) -> None:
        if isinstance(command, StartWorker):
            self._world.start(command.worker)
        elif isinstance(command, KillWorker):
            self._world.killed(command.worker)


class World:
    """State of one run: which workers live, what they do, and what goes wrong."""

    def __init__(self, loop: virtual.VirtualLoop, workers: int, seed: int, folder: Path) -> None:
        self.loop, self.random, self.folder = loop, random.Random(seed), folder
        self.first = first_schedule(job_of(workers), folder)
        self.every = [seat.worker for seat in self.first.seats]
        self.stages = self.first.grid.columns
        self.shares = shares_of(self.every)
        self.node_of = {worker: node for node, share in enumerate(self.shares) for worker in share}
        self.live: dict[Worker, ChaosWorker] = {}
        self.agents: dict[int, ChaosAgent] = {}
        self.processes = ProcessesOfNode0(self)
        self.ended: dict[int, dict[Worker, WorkerEnded]] = defaultdict(dict)
        """Ended workers that each agent has seen and that were not restarted."""
        self.count: Counter[str] = Counter()
        self.committed = -1
        self.committed_at = loop.now
        self.longest = 0.0
        """Longest virtual time between two commits, in seconds."""
        self.length = 1.0
        self.order = 0
        self.members: frozenset[Worker] = frozenset()
        self._acknowledged: Counter[int] = Counter()
        self._blocked = False
        """True if a member has died before it sent the others what they need."""
        self.serving: asyncio.Task[None] | None = None
        self.raised: BaseException | None = None
        """First exception raised by a callback."""
        loop.set_exception_handler(self._keep)
        self._stack = contextlib.ExitStack()
        self._port = 0
        self.epoch = 0

    def _keep(self, _: object, context: dict[str, Any]) -> None:
        self.raised = self.raised or context.get("exception") or BrokenError(context["message"])

    def latency(self) -> float:
        """Return the latency of a delivery: mostly short, occasionally a second."""
        return (
            self.random.uniform(0.0, 0.02)
            if self.random.random() < 0.999
            else self.random.uniform(0.1, 1.0)
        )

    # --- node 0

    def lead(self) -> None:
        """Start node 0, or continue where another node 0 has died."""
        behind = Rendezvous(LOOPBACK, self._port) if self._port else None
        absent = []
        if behind is not None:
            absent = [
                worker for worker in self.every if self.node_of[worker] or worker not in self.live
            ]
        events = self._stack.enter_context(
            leading(
                self.first,
                self.folder,
                cast(Marks, _Told(self)),
                cast(NodeProcesses, self.processes),
                behind=behind,
                scheduler=self._without,
                timeout=TIMEOUT,
                faults_per_hour=10**6,
                absent=absent,
            )
        )
        listener, address = open_listener(None)
        self._stack.callback(listener.close)
        self._port = address.port
        self.serving = self.loop.create_task(events.serve(listener, StopSignals()))

    async def lose_node_0(self) -> None:
        """Let node 0 die, and let another one take over."""
        assert self.serving is not None
        self.loop.nobody_serves()
        self.serving.cancel()
        for fake in (*self.live.values(), *self.agents.values()):
            cast(
                virtual.Wire, fake._transport
            ).cut_silently() if fake._transport is not None else None
        with contextlib.suppress(asyncio.CancelledError):
            await self.serving
        self._stack.close()
        self.serving = None
        await asyncio.sleep(self.random.uniform(0.0, 3.0))
        self.lead()

    def _without(self, down: tuple[Worker, ...]) -> Schedule:
        gone = set(down)
        return replace(
            self.first,
            failed=down,
            seats=tuple(seat for seat in self.first.seats if seat.worker not in gone),
        )

    def told(self, what: str, more: dict[str, Any]) -> None:
        """Record what node 0 notes."""
        if what == "committed":
            self._commit(more["iteration"])

    def _commit(self, iteration: int) -> None:
        if iteration != self.committed + 1:
            self.raised = self.raised or BrokenError(
                f"iteration {iteration} is committed after {self.committed}"
            )
            raise self.raised  # node 0 fails with another error then
        self.longest = max(self.longest, self.loop.now - self.committed_at)
        self.committed, self.committed_at = iteration, self.loop.now
        self.count["commits"] += 1

    # --- workers and agents

    def start(
        self,
        worker: Worker,
        epoch: int = 0,
        former: RecoveryReport | None = None,
        before: ChaosWorker | None = None,
    ) -> None:
        """Start a process of a worker, or let it look for another node 0."""
        node = self.node_of[worker]
        if former is None and (worker in self.live or (node and node not in self.agents)):
            return
        if former is None:
            self.ended[node].pop(worker, None)
        fake = ChaosWorker(self, worker, epoch, former)
        if before is not None:
            fake.stepped, fake.excused = before.stepped, before.excused
            fake.failed, fake.order, fake.begun = before.failed, before.order, before.begun
        self.live[worker] = fake
        self._join(fake, lambda: self.live.get(worker) is fake)

    def _join(self, fake: Fake, wanted: Callable[[], bool]) -> None:
        def attempt() -> None:
            if wanted() and self.loop.join(fake, self.latency) is None:
                self.loop.call_later(0.3, attempt)

        self.loop.call_later(self.random.uniform(0.0, 0.3), attempt)

    def start_agent(self, node: int, epoch: int = 0, alive: tuple[Worker, ...] = ()) -> None:
        """Start the launcher of a node, or let it look for another node 0."""
        agent = self.agents[node] = ChaosAgent(self, node, epoch, alive)
        self._join(agent, lambda: self.agents.get(node) is agent)

    def disconnected(self, fake: ChaosWorker) -> None:
        """Handle a worker that has lost node 0, which is gone or gave it up."""
        if self.live.get(fake.worker) is not fake:
            return
        if self.loop._serves is not None:
            self.given_up(fake, "was cut off")
        elif fake.stepped is None:
            # it had nothing: as good as new
            self.start(fake.worker, 0, RecoveryReport(0, (), -1, NOTHING_HELD, None, False))
            self.live[fake.worker].known = None
        else:
            fake.ended = True
            former = RecoveryReport(
                fake.order, fake.failed, fake.stepped, fake.kept, None, False, fake.begun
            )
            self.start(fake.worker, fake.epoch, former, fake)

    def agent_disconnected(self, agent: ChaosAgent) -> None:
        """Handle a node that has lost node 0."""
        if self.agents.get(agent.node) is not agent:
            return
        if self.loop._serves is None:
            self.start_agent(
                agent.node,
                agent.epoch,
                tuple(worker for worker in self.shares[agent.node] if worker in self.live),
            )
        else:  # it was told to ask again
            del self.agents[agent.node]
            self.loop.call_later(self.random.uniform(*BACK), self._agent_back, agent.node)

    def _agent_back(self, node: int) -> None:
        if node not in self.agents:
            self.start_agent(node)

    def given_up(self, fake: ChaosWorker, how: str) -> None:
        """Let a worker go. Raises BrokenError unless it may be given up."""
        if self.live.get(fake.worker) is not fake:
            return
        if not fake.excused:
            raise BrokenError(
                f"worker {fake.worker} {how} at {self.loop.now:.1f} s, although it lives"
            )
        self.dies(fake.worker)

    def killed(self, worker: Worker) -> None:
        """Kill the process of a worker at node 0's request."""
        if worker in self.live:
            self.given_up(self.live[worker], "was killed")

    def dies(self, worker: Worker, *, silently: bool = False) -> None:
        """End the process of a worker. Its agent reports this, if the agent lives."""
        fake = self.live.pop(worker, None)
        if fake is None:
            return
        self.count["deaths"] += 1
        if worker in self.members:
            self._blocked |= self.random.random() < 0.7
        wire = cast("virtual.Wire | None", fake._transport)
        if wire is not None and silently:
            wire.cut_silently()
        elif wire is not None:
            fake.abort()
        node, ended = self.node_of[worker], WorkerEnded(worker, -9)
        if node == 0:
            self.processes.ends(ended)
        elif not silently and node in self.agents:
            self.ended[node][worker] = ended
            self.agents[node].say(ended)

    # --- what workers do (`FakeWorker` calls these)

    def agent_of(self, worker: Worker) -> ChaosAgent | None:
        """Return the agent that gathers a worker's reports."""
        return self.agents.get(self.node_of[worker])

    def prepared(self, _: ChaosWorker) -> None:
        """Handle a worker that is ready."""

    def trains(self, fake: ChaosWorker, message: Train) -> None:
        """Handle a worker that has an order."""
        if message.order > self.order:
            self.order, self.members = (
                message.order,
                frozenset(self.every).difference(message.failed),
            )
            self._acknowledged.clear()
            self._blocked = not self.members <= self.live.keys()
            self.count["orders"] += 1
        if message.order < self.order:
            return
        before, first = fake.stepped, message.first_iteration
        fake.order, fake.failed = 0, message.failed
        if fake.worker in message.failed:
            return
        fetched = before is None or message.restore is not None
        if not fetched and before not in {first - 1, first}:
            raise BrokenError(
                f"worker {fake.worker} has stepped iteration {before}, and is to go on with {first}"
            )
        self.count["undone"] += before == first and not fetched
        fake.stepped = first - 1
        fake.begins(message.order, first)
        self._compute(fake, first)

    def acknowledged(self, _: ChaosWorker, message: Acknowledged) -> None:
        """Let a worker continue once all others have come that far."""
        if message.order != self.order or message.stop:
            return
        self._acknowledged[message.iteration] += 1
        if self._acknowledged[message.iteration] == len(self.members):
            del self._acknowledged[message.iteration]
            for worker in self.members:
                if worker in self.live:
                    self._compute(self.live[worker], message.iteration + 1)

    def order_ended(self, _: ChaosWorker) -> None:
        """Handle a worker that stops."""

    def _compute(self, fake: ChaosWorker, iteration: int) -> None:
        self.loop.call_later(
            self.length * self.random.uniform(0.8, 1.0), self._computed, fake, iteration, fake.order
        )

    def _computed(self, fake: ChaosWorker, iteration: int, order: int) -> None:
        if (
            self._blocked
            or self.live.get(fake.worker) is not fake
            or fake.ended
            or fake.order != order
            or not order
        ):
            return
        fake.stepped = iteration
        fake.ran(iteration)

    async def beat(self) -> None:
        """Send heartbeats of all workers."""
        while True:
            await asyncio.sleep(TIMEOUT / 10)
            for fake in self.live.values():
                if fake.connected:
                    fake.beat(TIMEOUT / 5)

    # --- faults

    def _may_die(self, workers: list[Worker]) -> bool:
        """Return whether workers may die: each stage keeps a live member with its layers.

        A process that was started again has none until an order that it is in.
        """
        left = Counter(
            worker.column
            for worker in self.members & self.live.keys()
            if worker not in set(workers) and self.live[worker].stepped is not None
        )
        return len(left) == self.stages

    def _nodes_die(self, nodes: list[int], *, silently: bool) -> bool:
        workers = [worker for node in nodes for worker in self.shares[node]]
        is_starting = any(
            worker in self.live and self.live[worker].stepped is None for worker in workers
        )
        is_empty = any(self.live.keys().isdisjoint(self.shares[node]) for node in nodes)
        if silently and (is_starting or is_empty) and virtual.SILENT_SECONDS > RETURN:
            # A machine with a worker that is not ready is missed once the system gives up its
            # connections.
            return False
        if not self._may_die(workers):
            return False
        for node in nodes:
            agent = self.agents.pop(node, None)
            self.ended[node].clear()
            if agent is not None and agent._transport is not None:
                wire = cast(virtual.Wire, agent._transport)
                wire.cut_silently() if silently else wire.abort()
            for worker in self.shares[node]:
                self.dies(worker, silently=silently)
            self.loop.call_later(self.random.uniform(*BACK), self._agent_back, node)
        return True

    async def fault(self) -> None:
        """Inject one more fault."""
        kind = self.random.choices(list(FAULTS), list(FAULTS.values()))[0]
        nodes, worker = range(1, len(self.shares)), self.random.choice(self.every)
        if kind == "node 0":
            await self.lose_node_0()
        elif kind == "worker":
            if worker not in self.live or not self._may_die([worker]):
                return
            self.dies(worker)
        elif kind in {"agent", "machine"}:
            if not self._nodes_die([self.random.choice(nodes)], silently=kind == "machine"):
                return
        elif kind == "rack":
            first, size = self.random.choice(nodes), max(2, len(nodes) // RACKS)
            if not self._nodes_die(
                [node for node in range(first, first + size) if node in nodes], silently=True
            ):
                return
        elif worker in self.live and self._may_die([worker]):
            longer = kind == "silence"
            fake = self.live[worker]
            fake.excused |= longer
            fake.silent_until = self.loop.now + TIMEOUT * (
                self.random.uniform(1.5, 4.0) if longer else self.random.uniform(0.1, 0.6)
            )
        self.count[kind] += 1

    def look(self) -> None:
        """Check whether the run makes progress. Raises what callbacks have raised."""
        if self.raised is not None:
            raise self.raised
        if self.serving is not None and self.serving.done() and not self.serving.cancelled():
            raise self.serving.exception() or BrokenError("the run has ended")
        if self.loop.now - self.committed_at > PATIENCE:
            raise BrokenError(
                f"nothing is committed since {self.committed_at:.1f} s, at {self.loop.now:.1f} s"
            )

    @property
    def whole(self) -> bool:
        """Return whether all workers take part again."""
        return len(self.members & self.live.keys()) == len(self.every)

    def missing(self) -> str:
        """Describe the workers that take no part, and why."""
        texts = []
        for worker in sorted(set(self.every) - (self.members & self.live.keys())):
            state = "" if worker in self.live else ", which is dead"
            texts.append(f"{worker} of node {self.node_of[worker]}{state}")
        return ", ".join(texts)

    def end(self) -> None:
        """Check that all files of the run are whole."""
        self._stack.close()
        lines = [
            json.loads(line)["iteration"]
            for line in (self.folder / LOSSES).read_text().splitlines()
        ]
        if lines != list(range(len(lines))) or len(lines) < self.committed:
            raise BrokenError("the file of losses does not hold each iteration once, in order")


class _Told:
    """Replacement of node 0's marks."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, what: str, **more: Any) -> None:
        self._world.told(what, more)

    def event(self, _: object) -> None:
        """Ignore events of the run, which are counted by their effects."""


def chaos(
    workers: int,
    faults: int,
    seed: int,
    folder: Path,
    *,
    seconds: float = 8.0,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """Inject the given number of faults, and return what has happened.

    It waits until all workers are back. Raises BrokenError and HangError.
    """
    found: dict[str, float] = {}

    async def script(loop: virtual.VirtualLoop) -> None:
        world = World(loop, workers, seed, folder)
        with _planned_later(world):
            world.lead()
            for worker in world.shares[0]:
                world.start(worker)
            for node in range(1, len(world.shares)):
                world.start_agent(node)
            beating = loop.create_task(world.beat())
            while world.committed < 2:
                await asyncio.sleep(1.0)
                world.look()
            done, last = 0, loop.now
            while done < faults or not world.whole:
                if done == faults and loop.now > last + RETURN:
                    raise BrokenError(
                        f"not back {RETURN:.0f} s after the last fault: {world.missing()}"
                    )
                await asyncio.sleep(world.random.expovariate(1 / seconds) if done < faults else 1.0)
                world.look()
                if done < faults:
                    await world.fault()
                    done, last = done + 1, loop.now
                    if done % 20 == 0:
                        say(
                            f"{done} faults, {world.count['deaths']} deaths, "
                            f"{world.committed + 1} iterations, {len(world.live)} live, "
                            f"{loop.now - virtual.BEGIN:.0f} s"
                        )
            until = world.committed + 2
            while world.committed < until:
                await asyncio.sleep(1.0)
                world.look()
            beating.cancel()
            world.end()
            found.update(
                world.count,
                longest=round(world.longest, 1),
                seconds=round(loop.now - virtual.BEGIN),
            )

    virtual.run(script)
    return found


@contextlib.contextmanager
def _planned_later(world: World) -> Iterator[None]:
    """Delay plans by seconds of virtual time, in which more workers may die."""

    def background(work: Callable[[], Any], done: Callable[[Any], None], **_: object) -> None:
        asking = world.serving

        def answer() -> None:
            if world.serving is asking:  # else it has ended with who asked
                done(capture_result(work))

        world.loop.call_later(world.random.choice((0.05, 0.5, 4.0)), answer)

    with mock.patch.object(event_loop, "choose_background", lambda _: background):
        yield


def main() -> int:
    """Return 0 if all promises were kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of virtual time from one fault to the next"
    )
    options = parser.parse_args()
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        found = chaos(
            options.workers,
            options.faults,
            options.seed,
            Path(folder),
            seconds=options.seconds,
            say=lambda line: print(line, flush=True),
        )
    print(", ".join(f"{name} {value:,}" for name, value in sorted(found.items())))
    print(f"all promises kept; {time.process_time() - began:.0f} s of CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
