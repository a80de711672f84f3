"""A whole run whose workers only talk: real connections, no processes and no tensors."""

import asyncio
import dataclasses
import os
import time

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.commit_log import CommitLog
from slipstream.runtime.coordinator.decisions.run_state import RunFacts
from slipstream.runtime.coordinator.event_loop import EventLoop
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.coordinator.run_options import Resilience, RunOptions, RunRequest
from slipstream.runtime.coordinator.run_spec import RunSpec
from slipstream.runtime.processes.stop_signals import StopSignals
from slipstream.runtime.protocol import to_worker
from slipstream.runtime.protocol.rendezvous import Rendezvous, open_listener
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.to_coordinator import (
    Finished,
    Heartbeat,
    IterationReport,
    JoinNode,
    JoinWorker,
    Paused,
    Published,
    Ready,
    TrainingStarted,
    WorkerEnded,
    WorkerStatus,
)
from slipstream.runtime.protocol.to_worker import (
    Acknowledged,
    EndOrder,
    Finish,
    Leave,
    Publish,
    ReportStatus,
    Train,
)
from slipstream.runtime.state.parts import ElementCounts
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.coordinator.holding import holding
from tests.runtime.running import schedule_for, tiny
from tests.runtime.speaking import COMMON, SECRET, talk

JOB = grid(3, 1, 2)
WORKERS = [Worker(0, 0), Worker(1, 0), Worker(2, 0)]
SOON = 120.0
HEARTBEAT_TIMEOUT_SECONDS = COMMON.resilience.heartbeat_timeout_seconds
SETUP = WorkerSetup(common=COMMON, first_iteration=0, store=Rendezvous("127.0.0.1", 1))


def setup_with(heartbeat_timeout_seconds=None, **common):
    """The setup of the three workers, with other settings for all."""
    if heartbeat_timeout_seconds is not None:
        common["resilience"] = dataclasses.replace(
            COMMON.resilience, heartbeat_timeout_seconds=heartbeat_timeout_seconds
        )
    return replace(SETUP, common=replace(COMMON, **common))


class Processes:
    """Stands for the process manager.

    It keeps what it is told, and ends of processes that nobody has started.
    """

    def __init__(self) -> None:
        self.killed, self.buried, self._ends = [], [], []
        self._readable, self._writable = os.pipe()

    def connect_agents(self, send, note):
        pass

    def restart_due_workers(self):
        pass

    def fileno(self):
        return self._readable

    def poll(self):
        os.read(self._readable, 100)
        ends, self._ends = self._ends, []
        return ends

    def end(self, worker, status=-9):
        self._ends.append(WorkerEnded(worker, status))
        os.write(self._writable, b"!")

    def record_node_started(self, node):
        pass

    def get_node_workers(self, node):
        return WORKERS[node : node + 1]

    def kill_worker(self, worker):
        self.killed.append(worker)

    def handle_worker_end(self, worker):
        self.buried.append((worker, time.monotonic()))

    def begin_iteration(self, iteration):
        pass


class Talker:
    """A worker that says what workers say. `stops_before` is an iteration that it never reports."""

    def __init__(self, worker, address, stops_before=99):
        self.worker, self._address, self._stops_before = worker, address, stops_before
        self.stopped = asyncio.Event()
        self.talk = self.writer = None
        self.beating = self.answers = True
        self.folder = None
        self.status = WorkerStatus(worker, "waits for another", 1.0, waits=True)

    def say(self, message):
        self.talk.say(message)

    async def live(self):
        self.talk = await talk(self._address, JoinWorker(self.worker))
        self.writer = self.talk.writer
        beats = asyncio.create_task(self._beat())
        try:
            while data := await self.talk.reader.read(2**16):
                for body in self.talk.frames.parse_messages(data):
                    message = to_worker.decode(body)
                    if isinstance(message, Leave):
                        return
                    if self.answers:
                        self._answer(message)
        finally:
            beats.cancel()
            self.writer.close()

    async def _beat(self):
        while True:
            await asyncio.sleep(0.05)
            if self.beating:
                self.say(Heartbeat())

    def _answer(self, message):
        match message:
            case WorkerSetup():
                self.say(Ready(self.worker, (("127.0.0.1", 1),), self.folder))
            case Train() if self.worker not in message.failed:
                self.say(TrainingStarted(self.worker, message.order))
                self._run(message.order, message.first_iteration)
            case Acknowledged():
                self._run(message.order, message.iteration + 1)
            case EndOrder():
                self.say(Paused(self.worker, message.order, holding((0, 4)), None, None))
            case ReportStatus():
                self.say(self.status)
            case Finish():
                self.say(Finished(self.worker, message.order, {"weight": "a"}))
            case Publish():
                self.say(Published(self.worker, message.order))

    def _run(self, order, iteration):
        if iteration == self._stops_before:
            self._stops_before = 99
            self.stopped.set()
        elif iteration < SETUP.common.iterations:
            self.say(IterationReport(self.worker, order, iteration, 1.0, 0.1))
        else:
            self.say(Paused(self.worker, order, holding((0, 4)), None, None))


class World:
    """Three workers and their coordinator; `script` is run beside them."""

    def __init__(self, out, scheduler=None, setup=SETUP, config=None, **limits):
        self.processes, self.told, self.forgotten = Processes(), [], []
        self._log = RunLog(out)
        shares = [WORKERS] if setup.common.nodes == 1 else [WORKERS[::2], WORKERS[1:2]]
        self.events = EventLoop(
            RunSpec(
                request=RunRequest(
                    schedule=schedule_for(JOB),
                    config=config or tiny(),
                    out=out,
                    options=RunOptions(notify=self.told.append, secret=SECRET),
                    resilience=Resilience(scheduler=scheduler, **limits),
                ),
                setup=setup,
                forget_orders=self.forgotten.append,
                facts=RunFacts(
                    shares=shares, elements=[ElementCounts(1)] * 4, whole_schedules=False
                ),
            ),
            CommitLog(),
            self.processes,
            self._log,
        )
        self.talkers, self.address, self.agent = {}, None, None

    @property
    def log(self):
        return self.events.state.log

    def play(self, script=None, stops_before=99, *, agent=False):
        """With `agent`, that of node 1 joins before its worker, as all do."""

        async def live(talker):
            if agent and talker.worker == WORKERS[1]:
                self.agent = await talk(self.address, JoinNode(1))
                await self.agent.reader.read(2**16)
            await talker.live()

        async def run():
            listener, self.address = open_listener()
            self.talkers = {
                worker: Talker(worker, self.address, stops_before) for worker in WORKERS
            }
            others = [asyncio.create_task(live(talker)) for talker in self.talkers.values()]
            if script is not None:
                others.append(asyncio.create_task(script(self)))
            try:
                async with asyncio.timeout(SOON):
                    await self.events.serve(listener, StopSignals())
            finally:
                for other in others:
                    other.cancel()
                ends = await asyncio.gather(*others, return_exceptions=True)
                # The coordinator closes its connections at the end, and does not read what is said
                # to it then.
                wrong = [
                    end
                    for end in ends
                    if isinstance(end, Exception) and not isinstance(end, OSError | EOFError)
                ]
                assert not wrong, wrong

        with self._log:
            asyncio.run(run())
