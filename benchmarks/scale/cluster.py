"""Run fake workers phase by phase, and measure each part of node 0's work.

All processes are on this machine, so that they share time.monotonic.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scale.fakes import Fake, FakeAgent, FakeWorker
from benchmarks.scale.node_0 import MARKS
from benchmarks.scale.shapes import grid_of, shares_of
from slipstream.runtime.protocol.rendezvous import LOOPBACK
from slipstream.runtime.protocol.to_coordinator import RecoveryReport, WorkerEnded
from slipstream.runtime.protocol.to_worker import Acknowledged, Train
from slipstream.schedules.schedule import Worker

AT_ONCE = 1000
"""Number of connections that are made at a time."""
SPREAD = 0.1
"""Share of an iteration over which workers end it."""
QUIET = 3.0
"""Time, in seconds, without a plan after which nothing more is planned ahead.

Node 0 may be busy between two plans.
"""
BEATS = 5
"""Number of heartbeats per timeout."""
TICKS = 50
"""Number of ticks of an interval over which heartbeats are spread."""
NOW = time.monotonic

Found = dict[str, Any]


class Order:
    """Order of node 0, as workers see it."""

    def __init__(self, message: Train, members: frozenset[Worker]) -> None:
        self.order, self.first = message.order, message.first_iteration
        self.members = members
        self.received: dict[Worker, float] = {}
        self.ended: list[float] = []
        self.acknowledged = 0
        self.stopping = False


class Cluster:
    """Fake workers and node agents of one run."""

    def __init__(self, workers: int, folder: Path, options: Any) -> None:
        self.pipelines, self.stages = grid_of(workers)
        self.every = [
            Worker(pipeline, stage)
            for pipeline in range(self.pipelines)
            for stage in range(self.stages)
        ]
        self.shares = shares_of(self.every)
        self._node_of = {worker: node for node, share in enumerate(self.shares) for worker in share}
        self.workers: dict[Worker, FakeWorker] = {}
        self.agents: dict[int, FakeAgent] = {}
        self.order: Order | None = None
        self.length = 0.0
        """Duration of an iteration, in seconds. 0 means that workers answer at once."""
        self.rounds: list[float] = []
        """Times at which all members had their acknowledgements of an iteration."""
        self.latencies: list[float] = []
        self.set_up = 0
        self._folder, self._options, self._count = folder, options, workers
        self._round_began = 0.0
        self._running: asyncio.Future[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = self._pid = 0

    # --- what workers tell

    def agent_of(self, worker: Worker) -> FakeAgent | None:
        """Return the agent that gathers a worker's reports.

        None: the worker reports to node 0 itself.
        """
        return self.agents.get(self._node_of[worker])

    def prepared(self, _: FakeWorker) -> None:
        """Handle a worker that is ready."""
        self.set_up += 1

    def trains(self, fake: FakeWorker, message: Train) -> None:
        """Handle a worker that has an order."""
        if self.order is None or message.order > self.order.order:
            self.order = Order(message, frozenset(self.every).difference(message.failed))
        order = self.order
        order.received[fake.worker] = NOW()
        if fake.worker not in order.members:
            return
        fake.begins(order.order, order.first)
        if not self.length:
            fake.ran(order.first)
        elif len(order.received) >= len(order.members):
            self._begin_round(order, order.first)

    def acknowledged(self, fake: FakeWorker, message: Acknowledged) -> None:
        """Handle a worker that may continue."""
        order = self.order
        self.latencies.append(NOW() - fake.sent)
        if order is None or fake.ended or message.order != order.order:
            return
        order.stopping |= message.stop
        order.acknowledged += 1
        if order.acknowledged == len(order.members):
            order.acknowledged = 0
            self.rounds.append(NOW())
            if not order.stopping:
                self._begin_round(order, message.iteration + 1)

    def order_ended(self, _: FakeWorker) -> None:
        """Handle a worker whose order has ended."""
        if self.order is not None:
            self.order.ended.append(NOW())

    def _begin_round(self, order: Order, iteration: int) -> None:
        self._running = asyncio.ensure_future(self._round(order, iteration))

    async def _round(self, order: Order, iteration: int) -> None:
        length = self.length
        begin = NOW() if not self.rounds else max(self._round_began + length, NOW() - length)
        self._round_began = begin
        ends = sorted(
            (begin + length - random.uniform(0, SPREAD * length), worker)
            for worker in order.members
        )
        for at, worker in ends:
            if at - NOW() > 0.001:
                await asyncio.sleep(at - NOW())
            fake = self.workers.get(worker)
            if fake is not None and fake.order == order.order and not fake.ended:
                fake.ran(iteration)

    async def beat(self) -> None:
        """Send heartbeats of all workers, spread over the interval."""
        interval, tick, began = self._options.heartbeat_timeout / BEATS, 0, NOW()
        place = {worker: index % TICKS for index, worker in enumerate(self.every)}
        while True:
            tick += 1
            await asyncio.sleep(max(0.0, began + tick * interval / TICKS - NOW()))
            for worker, fake in list(self.workers.items()):
                if place[worker] == tick % TICKS and fake.connected:
                    fake.beat(interval)

    # --- node 0, from outside

    async def launch(self, *more: str) -> None:
        """Start node 0, and wait until it listens."""
        marks, options = len(self.marks()), self._options
        command = [
            sys.executable,
            "-m",
            "benchmarks.scale.node_0",
            str(self._count),
            str(self._folder),
            *more,
            "--heartbeat-timeout",
            str(options.heartbeat_timeout),
        ]
        command += [] if options.table is None else ["--table", str(options.table)]
        command += ["--plan-then"] if options.plan_then else []
        command += [] if options.profile is None else ["--profile", str(options.profile)]
        self._process = subprocess.Popen(command, stdout=sys.stderr)
        while not (listens := [mark for mark in self.marks()[marks:] if mark["what"] == "listens"]):
            await asyncio.sleep(0.02)
            if self._process.poll() is not None:
                raise RuntimeError("node 0 has ended before it listened")
        self._port, self._pid = listens[0]["port"], listens[0]["pid"]

    def end(self) -> None:
        """End node 0."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)

    def profile(self) -> None:
        """Make node 0 profile itself from now on."""
        os.kill(self._pid, signal.SIGUSR1)

    def marks(self, since: float = 0.0) -> list[Found]:
        """Return the marks that node 0 has written."""
        path = self._folder / MARKS
        lines = path.read_text().splitlines() if path.exists() else []
        return [mark for mark in map(json.loads, lines) if mark["at"] >= since]

    def cpu(self) -> float:
        """Return the CPU seconds of node 0's process."""
        return self._cpu(11)

    def cpu_of_plans(self) -> float:
        """Return the CPU seconds of processes that node 0 has forked and that ended."""
        return self._cpu(13)

    def _cpu(self, first: int) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[first : first + 2])) / os.sysconf("SC_CLK_TCK")

    def _plans(self) -> bool:
        """Return whether node 0 has a process that plans."""

        def children(thread: Path) -> str:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                return (thread / "children").read_text()
            return ""

        return any(map(children, Path(f"/proc/{self._pid}/task").iterdir()))

    def megabytes(self) -> tuple[int, int]:
        """Return the current and peak resident memory of node 0."""
        lines = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{self._pid}/status").read_text().splitlines()
        )
        return int(lines["VmRSS"].split()[0]) // 1024, int(lines["VmHWM"].split()[0]) // 1024

    # --- phases; each gives what it found, and `ok`

    async def start(self) -> Found:
        """Connect all workers, which prove that they know the secret and get their first order."""
        began, used, before = NOW(), self.cpu(), self.megabytes()[0]
        self.workers = {worker: FakeWorker(self, worker) for worker in self.every}
        self.agents = {node: FakeAgent(node) for node in range(1, len(self.shares))}
        await self._connect([*self.agents.values(), *self.workers.values()])
        connected = NOW() - began
        ok = await self._until(lambda: self._all_have_order(0))
        return {
            "ok": ok,
            "connected": connected,
            "last order": NOW() - began,
            "CPU": self.cpu() - used,
            "MB more": self.megabytes()[0] - before,
        }

    async def busy(self) -> Found:
        """Run iterations in which workers answer at once: the least that an iteration takes."""
        await self._until(lambda: len(self.rounds) >= 2)
        first, began, used = len(self.rounds), NOW(), self.cpu()
        await self._until(lambda: NOW() - began > 5 and len(self.rounds) > first + 1)
        rounds = len(self.rounds) - first
        return {
            "ok": rounds > 0,
            "seconds": (NOW() - began) / max(1, rounds),
            "CPU": (self.cpu() - used) / max(1, rounds),
        }

    async def steady(self) -> Found:
        """Run iterations of a second."""
        self.length = 1.0
        await self._rounds(2)
        self.latencies.clear()
        began, used = NOW(), self.cpu()
        rounds = await self._rounds(6)
        took = NOW() - began
        late = sorted(self.latencies) or [float("nan")]
        return {
            "ok": rounds > 0,
            "iteration": took / max(1, rounds),
            "of a core": (self.cpu() - used) / took,
            "acknowledged, median": statistics.median(late),
            "worst": late[-1],
            "MB": self.megabytes()[0],
        }

    async def ahead(self) -> Found:
        """Wait until the answers to all possible next failures are planned."""
        self.length = self.length or 1.0
        used, planning, began, last = self.cpu(), self.cpu_of_plans(), NOW(), NOW()

        def quiet() -> bool:
            nonlocal last
            last = NOW() if self._plans() else last
            return NOW() - last > QUIET

        ok = await self._until(quiet)
        return {
            "ok": ok,
            "seconds": last - began,
            "CPU": self.cpu() - used,
            "of plans": self.cpu_of_plans() - planning,
            "MB": self.megabytes()[0],
        }

    async def death(self) -> Found:
        """Let a worker die: its connection ends, and its node reports it."""
        self.length = self.length or 1.0
        await asyncio.sleep(0.3)
        victim, order = max(self.workers), self.order
        assert order is not None
        sent, used, planning, killed = self._bytes(), self.cpu(), self.cpu_of_plans(), NOW()
        self.workers.pop(victim).abort()
        node = next(node for node, share in enumerate(self.shares) if victim in share)
        if node:
            self.agents[node].say(WorkerEnded(victim, -9))
        ok = await self._until(lambda: self._all_have_order(order.order))
        found: Found = {
            "ok": ok,
            "CPU": self.cpu() - used,
            "CPU of its plan": self.cpu_of_plans() - planning,
        }
        marks = self.marks(killed)
        for name, what in (
            ("missed", "Failed"),
            ("plan asked", "PlanAsked"),
            ("planned", "PlanAnswered"),
            ("order made", "OrderGiven"),
        ):
            found[name] = next(
                (mark["at"] - killed for mark in marks if mark["what"] == what), None
            )
        if order.ended:
            found["last told to stop"] = max(order.ended) - killed
        if ok and self.order is not None:
            at = sorted(self.order.received.values())
            found |= {
                "first order": at[0] - killed,
                "last order": at[-1] - killed,
                "bytes": self._bytes() - sent,
            }
            await self._rounds(1)
            found["first commit"] = self.rounds[-1] - killed
        else:
            found["told"] = [mark["text"] for mark in marks if mark["what"] == "told"][-3:]
        return found

    async def back(self) -> Found:
        """Let the dead worker come back."""
        order = self.order
        assert order is not None
        missing = sorted(set(self.every) - self.workers.keys())
        began, used = NOW(), self.cpu()
        fakes = [FakeWorker(self, worker) for worker in missing]
        self.workers |= {fake.worker: fake for fake in fakes}
        await self._connect(list(fakes))
        ok = await self._until(lambda: self._all_have_order(order.order))
        found: Found = {"ok": ok, "CPU": self.cpu() - used}
        if ok and self.order is not None:
            at = sorted(self.order.received.values())
            found |= {"last order": at[-1] - began, "pause": at[-1] - self.rounds[-1]}
        return found

    async def restart(self) -> Found:
        """Kill node 0, and let another one continue."""
        order, port = self.order, self._port
        assert order is not None and self._process is not None
        self._process.kill()
        self._process.wait()
        failed = tuple(sorted(set(self.every) - order.members))
        identities = {
            worker: (
                fake.epoch,
                RecoveryReport(
                    fake.order, failed, fake.reached, fake.kept, None, False, fake.begun
                ),
            )
            for worker, fake in self.workers.items()
        }
        for fake in (*self.workers.values(), *self.agents.values()):
            fake.abort()
        self.workers = {}
        await self.launch("--behind", str(port))
        began, used, epoch = NOW(), self.cpu(), next(iter(identities.values()))[0]
        self.workers = {
            worker: FakeWorker(self, worker, *identity) for worker, identity in identities.items()
        }
        self.agents = {}
        for node, share in enumerate(self.shares):
            if node:
                workers = tuple(worker for worker in share if worker in identities)
                self.agents[node] = FakeAgent(node, epoch, workers)
        await self._connect([*self.agents.values(), *self.workers.values()])
        connected = NOW() - began
        ok = await self._until(lambda: self._all_have_order(order.order))
        found: Found = {"ok": ok, "connected": connected, "CPU": self.cpu() - used}
        if ok and self.order is not None:
            found |= {
                "last order": max(self.order.received.values()) - began,
                "found": len(self.order.received),
            }
        return found

    # --- helpers

    def _all_have_order(self, after: int) -> bool:
        return (
            self.order is not None
            and self.order.order > after
            and len(self.order.received) >= len(self.workers)
        )

    def _bytes(self) -> int:
        return sum(fake.bytes for fake in self.workers.values())

    async def _rounds(self, count: int) -> int:
        first = len(self.rounds)
        await self._until(lambda: len(self.rounds) >= first + count)
        return len(self.rounds) - first

    async def _connect(self, fakes: list[Fake]) -> None:
        loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)

        async def connect(fake: Fake) -> None:
            async with gate:
                await loop.create_connection(lambda: fake, LOOPBACK, self._port)

        await asyncio.gather(*map(connect, fakes))

    async def _until(self, condition: Callable[[], bool]) -> bool:
        deadline = NOW() + self._options.patience
        while not condition():
            if NOW() > deadline:
                return False
            await asyncio.sleep(0.005)
        return True
