"""Take part in a run as a node other than node 0.

The coordinator says which workers to start and end. What these workers run, and where they write,
comes from this node's own job file and command line.
"""

import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from slipstream.runtime.checkpoints.checkpoint import CheckpointError, open_checkpoint
from slipstream.runtime.config import ConfigError
from slipstream.runtime.device import gpu_count
from slipstream.runtime.errors import RunError
from slipstream.runtime.processes.file_descriptors import (
    LAUNCHER_DESCRIPTORS,
    raise_descriptor_limit,
)
from slipstream.runtime.processes.fork_server import ForkServer, ForkServerError
from slipstream.runtime.processes.launch_environment import (
    ONLY_PROCESS,
    GpuShare,
    LocalProcess,
    compute_gpu_share,
)
from slipstream.runtime.processes.process_manager import NodeProcesses
from slipstream.runtime.processes.restart_policy import StartLimit, StartLimitError
from slipstream.runtime.processes.stop_signals import (
    GRACE_SECONDS,
    RunStopped,
    StopSignals,
    handle_stop_signals,
)
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.protocol import to_node_agent
from slipstream.runtime.protocol.channel import Channel
from slipstream.runtime.protocol.coordinator_link import CoordinatorLink
from slipstream.runtime.protocol.node_reports import ReportGatherer
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError
from slipstream.runtime.protocol.setup import JOIN_TIMEOUT_SECONDS
from slipstream.runtime.protocol.to_coordinator import JoinNode, Leaving, WorkerEnded
from slipstream.runtime.protocol.to_node_agent import (
    KillWorker,
    NodeSetup,
    NodeTaken,
    ReportsAcknowledged,
    RunEnded,
    StartWorker,
    ToNodeAgent,
)
from slipstream.runtime.run_folder import CHECKPOINTS, clear_parameters, hold_folder_lock, lock_path
from slipstream.schedules.schedule import Worker

AgentLink = CoordinatorLink[ToNodeAgent, NodeSetup]
JOIN_RETRY_SECONDS = 0.5
"""Seconds between attempts to join the run, or to find another node 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJob:
    """Job of a node other than node 0, by the job file and options there."""

    settings: NodeSettings
    """Settings of the node's workers; `resume` is a checkpoint, or a folder that has it."""
    workers: Sequence[Worker]
    """All workers of the job; the node starts no others."""


class RunDoneError(Exception):
    """Error for a node that waits for node 0 although the run has ended."""


def join_run(
    rendezvous: Rendezvous,
    job: NodeJob,
    *,
    node: int,
    nodes: int,
    fork_server: ForkServer | None = None,
    local: LocalProcess = ONLY_PROCESS,
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
    notify: Callable[[str], None] = lambda _: None,
    is_done: Callable[[], bool] = lambda: False,
) -> None:
    """Take part in the run that node 0 leads, with this node's workers.

    The workers' logs, and the parameters that they write, go into `job.settings.out`. If node 0
    starts the run again, this node joins again. After a signal (`StopSignals`) the workers leave
    the run at the next iteration, or are killed after `grace_seconds`; the other nodes continue.

    Raises RunDoneError if the run is done, RendezvousError if node 0 cannot be reached, has another
    secret or has this node already, ConfigError if the job or this machine does not fit,
    CheckpointError if this node's checkpoint does not, FolderError if another process writes to
    that folder as this node, OSError if it cannot be written, RunError if the run fails or node 0
    is gone, ForkServerError if the fork server dies, and RunStopped after a signal.

    Parameters
    ----------
    rendezvous
        Address of node 0.
    job
        Settings and workers of this node.
    node
        Number of this node, from 1.
    nodes
        Number of nodes of the run, node 0 included.
    local
        This process's rank on its machine, from which the workers' GPUs follow.
    fork_server
        Fork server that starts the workers; None: a new one.
    join_timeout_seconds
        Longest wait for node 0.
    notify
        Function that is called with each line of text for users.
    is_done
        Function that returns True if the run has done all iterations, so that node 0 will not come.
    """
    raise_descriptor_limit(LAUNCHER_DESCRIPTORS)
    out = Path(job.settings.out)
    joins_again = True
    while joins_again:
        # Wait for node 0, which says which workers to start.
        channel, setup = _connect_to_coordinator(
            rendezvous,
            job,
            node,
            join_timeout_seconds,
            partial(_notify_unless_done, notify, is_done),
        )
        link = CoordinatorLink(
            channel,
            setup,
            lambda hello, seconds: Channel(
                rendezvous, job.settings.secret, hello, to_node_agent.decode, seconds
            ),
        )
        with closing(link), ExitStack() as stack:
            # Check that the workers fit this machine and this node's job.
            gpus = _find_own_gpus(
                setup, node, nodes, local, job.settings.config.training.tensor_parallel
            )
            settings = _build_own_settings(job, setup, notify)
            stop = stack.enter_context(handle_stop_signals())
            stack.enter_context(hold_folder_lock(out, node))
            if not setup.restarted:
                # The folder may be shared with node 0, whose workers have logs there.
                clear_parameters(out)
            # Gather the workers' reports; a single worker has none that could be combined.
            gatherer = stack.enter_context(ReportGatherer()) if len(setup.workers) > 1 else None
            settings = replace(settings, reports=None if gatherer is None else gatherer.address)
            # Have the fork server clean up even if this process is killed.
            server = fork_server or stack.enter_context(ForkServer())
            server.register_cleanup(
                "slipstream.runtime.run_folder:remove_lock", lock_path(out, node).absolute()
            )
            if gatherer is not None:
                server.register_cleanup("shutil:rmtree", gatherer.folder)
            processes = NodeProcesses(
                server,
                rendezvous,
                setup.workers,
                gpu_count(setup.common.device),
                settings,
                gpus.first,
            )
            # Start the workers, and carry out what node 0 says until the run ends.
            with processes.run_workers(restarted=setup.restarted):
                agent = _NodeAgent(
                    node,
                    link,
                    processes,
                    StartLimit(setup.workers),
                    stop,
                    gatherer,
                    notify=notify,
                    grace_seconds=grace_seconds,
                    coordinator_timeout_seconds=settings.coordinator_timeout_seconds,
                )
                error = agent.serve()
        joins_again = agent.run_restarts and stop.received is None
        if joins_again:
            notify(f"{error}: joins node 0 again, which starts the run again")
    if stop.received is not None:
        text = f"interrupted by {stop.received.name}; the workers of node {node} have left"
        raise RunStopped(stop.received, text if error is None else f"{text}: {error}")
    if error is not None:
        raise RunError(error)


def _notify_unless_done(
    notify: Callable[[str], None], is_done: Callable[[], bool], line: str
) -> None:
    """Call `notify` with a line, or raise RunDoneError if the run is done."""
    if is_done():
        raise RunDoneError(line)
    notify(line)


def _find_own_gpus(
    setup: NodeSetup, node: int, nodes: int, local: LocalProcess, ranks: int
) -> GpuShare:
    # Raises ConfigError if node 0 has another number of nodes, or this machine has too few GPUs:
    # better now than in each worker.
    if len(setup.shares) != nodes:
        raise ConfigError(
            f"--nodes is {nodes} here and {len(setup.shares)} at node 0; expected the same"
        )
    common = setup.common
    gpus = compute_gpu_share([workers * ranks for workers in setup.shares], node, local)
    cards = gpu_count(common.device)
    if common.device == "cuda" and (
        cards == 0
        or (
            common.transport == "nccl"
            and cards < gpus.processes
            and not setup.config.training.share_devices
        )
    ):
        raise ConfigError(
            f"node {node} has {cards} GPUs for {gpus.processes} worker processes; "
            f"{common.transport} needs more"
        )
    return gpus


def _build_own_settings(
    job: NodeJob, setup: NodeSetup, notify: Callable[[str], None]
) -> NodeSettings:
    """Return the settings for this node's workers. Raises ConfigError and CheckpointError."""
    # Models and trainings must be the same as at node 0.
    config, start = job.settings.config, job.settings.resume
    if config.training.recompute == "auto":  # node 0 plans, and has chosen
        config = replace(
            config, training=replace(config.training, recompute=setup.config.training.recompute)
        )
    for table in ("model", "training"):
        ours, theirs = getattr(config, table), getattr(setup.config, table)
        for key in ours.__struct_fields__:
            if key != "iterations" and getattr(ours, key) != getattr(theirs, key):
                raise ConfigError(
                    f"{table}.{key} is {getattr(ours, key)!r} here and {getattr(theirs, key)!r} at "
                    "node 0; start every node with the same job file and options"
                )
    # Node 0 decides how long to train, like the other numbers of `WorkerSetup`. Learning rates
    # depend on it.
    iterations = setup.config.training.iterations
    if config.training.iterations != iterations:
        notify(
            f"training.iterations is {config.training.iterations} here and {iterations} at node 0; "
            f"trains for {iterations}"
        )
        config = replace(config, training=replace(config.training, iterations=iterations))
    # Node 0 may name only workers of this node's job.
    unknown = set(setup.workers) - set(job.workers)
    if unknown:
        raise ConfigError(
            f"node 0 has a worker {min(unknown)}, which is not in this job; start every node with "
            "the same job file"
        )
    # Each node reads its own copy of the checkpoint. Workers of a run that has continued need none,
    # as long as others have the layers.
    resume = None
    if setup.first_iteration and not setup.restarted:
        if start is None:
            raise ConfigError(
                f"node 0 resumes from iteration {setup.first_iteration}; start every node with "
                "--resume"
            )
        resume = str(_find_own_checkpoint(Path(start), setup.first_iteration).resolve())
    elif setup.first_iteration and start is not None:
        with suppress(CheckpointError):
            resume = str(_find_own_checkpoint(Path(start), setup.first_iteration).resolve())
    return replace(
        job.settings, config=config, out=str(Path(job.settings.out).resolve()), resume=resume
    )


def _find_own_checkpoint(folder: Path, iteration: int) -> Path:
    # `folder` is that of a run, of its checkpoints, or of the checkpoint itself. Raises
    # CheckpointError if the checkpoint is of another iteration.
    name = f"iteration-{iteration}"
    path = next(
        (path for path in (folder / CHECKPOINTS / name, folder / name) if path.is_dir()), folder
    )
    actual = open_checkpoint(path).iteration
    if actual != iteration:
        raise CheckpointError(
            f"{path}: a checkpoint of iteration {actual}; node 0 resumes from iteration {iteration}"
        )
    return path


def _connect_to_coordinator(
    rendezvous: Rendezvous,
    job: NodeJob,
    node: int,
    timeout_seconds: float,
    notify: Callable[[str], None],
) -> tuple[Channel[ToNodeAgent], NodeSetup]:
    """Connect to the coordinator; return the channel, and the coordinator's settings."""
    # Waits up to `timeout_seconds` for node 0; if it disappears before it answers, up to the job's
    # `coordinator_timeout_seconds`, within the same limit. Raises RendezvousError.
    deadline, patience = time.monotonic() + timeout_seconds, timeout_seconds
    notified = False
    while True:
        channel: Channel[ToNodeAgent] = Channel(
            rendezvous,
            job.settings.secret,
            JoinNode(node),
            to_node_agent.decode,
            max(0.0, min(patience, deadline - time.monotonic())),
            notify,
        )
        patience = job.settings.coordinator_timeout_seconds
        try:
            answer = channel.read_first(NodeSetup, NodeTaken)
        except RendezvousError:  # node 0 died or ended before it could answer
            channel.close()
            if not patience or time.monotonic() > deadline:
                raise
            time.sleep(JOIN_RETRY_SECONDS)
            continue
        if isinstance(answer, NodeSetup):
            return channel, answer
        # The coordinator has not noticed yet that this node's last process is gone: ask again.
        channel.close()
        if time.monotonic() > deadline:
            raise RendezvousError(f"node {node} takes part in the run at {rendezvous} already")
        if not notified:
            notify(
                f"node {node} takes part in the run at {rendezvous} already; waits until node 0 "
                "drops it"
            )
            notified = True
        time.sleep(JOIN_RETRY_SECONDS)


class _NodeAgent:
    """Agent of a node, which carries out the coordinator's messages until the run ends."""

    def __init__(
        self,
        node: int,
        link: AgentLink,
        processes: NodeProcesses,
        limit: StartLimit,
        stop: StopSignals,
        gatherer: ReportGatherer | None,
        *,
        notify: Callable[[str], None],
        grace_seconds: float,
        coordinator_timeout_seconds: float,
    ) -> None:
        self._node = node
        self._link = link
        self._limit = limit
        self._last_heard = time.monotonic()
        """Time at which the last message from node 0 came, by `time.monotonic`."""
        self._processes = processes
        self._gatherer = gatherer
        self._stop = stop
        self._notify = notify
        self._grace_seconds = grace_seconds
        self._coordinator_timeout_seconds = coordinator_timeout_seconds
        self._deadline: float | None = None
        """Time by which this node must end, by `time.monotonic`; None before a signal."""
        self._unreported_ends: list[WorkerEnded] = []
        """Workers that ended while there was no node 0, to report to the next."""
        self.run_restarts = False
        """True if node 0 starts the run from its beginning; this node must join again."""

    def serve(self) -> str | None:
        """Carry out the coordinator's messages until the run ends; return its error, or None."""
        # Raises RunError if node 0 is gone and no other comes, or if node 0 starts a worker too
        # often (`StartLimit`), and ForkServerError if the fork server, and with it the workers, are
        # gone. A signal wakes the loop by a socket, as it may wait in `select`.
        waker, woken = socket.socketpair()
        with waker, woken, self._stop.call_at_first_signal(lambda: waker.send(b"!")):
            try:
                while True:
                    try:
                        return self._follow_coordinator(woken)
                    except RendezvousError as gone:
                        ended = self._wait_for_coordinator(str(gone), woken)
                        if ended is not None:
                            self.run_restarts = ended.anew
                            return ended.error
            except StartLimitError as error:
                raise RunError(str(error)) from None

    def _follow_coordinator(self, woken: socket.socket) -> str | None:
        """Follow a coordinator until the run ends, or this node leaves; return the run's error."""
        # Data on the socket `woken` means that a signal asks this node to leave. Raises
        # RendezvousError if node 0 is gone.
        link, self._last_heard = self._link, time.monotonic()
        # First say what happened while there was no node 0.
        ended, self._unreported_ends = self._unreported_ends, []
        for report in ended:
            link.send(report)
        with selectors.DefaultSelector() as selector:
            for source in (link, self._processes, woken):
                selector.register(source, selectors.EVENT_READ)
            if self._gatherer is not None:
                selector.register(self._gatherer, selectors.EVENT_READ)
                self._gatherer.forget_unanswered()
            while True:
                # Messages that were read already make no socket ready.
                ready = []
                if not link.has_pending:
                    keys = selector.select(self._seconds_to_wait())
                    ready = [key.fileobj for key, _ in keys]
                # Is node 0 still there?
                if link in ready:
                    self._last_heard = time.monotonic()
                elif time.monotonic() - self._last_heard >= to_node_agent.SILENT_SECONDS:
                    raise RendezvousError(
                        "node 0 is gone: it has sent no message for "
                        f"{to_node_agent.SILENT_SECONDS:.0f} s"
                    )
                # Tell it what happens here: signals, and processes that end.
                if woken in ready:
                    woken.recv(1)
                    self._announce_leaving()
                if self._processes in ready:
                    self._report_ends()
                # Carry out what it says.
                for message in link.read() if link.has_pending or link in ready else ():
                    match message:
                        case RunEnded():
                            self.run_restarts = message.anew
                            return message.error
                        case StartWorker():
                            self._limit.count_start(message.worker)
                            self._processes.execute_command(message)
                        case KillWorker():
                            self._processes.execute_command(message)
                        case ReportsAcknowledged() if self._gatherer is not None:
                            self._gatherer.forward_answer(message)
                # Pass on the workers' reports of iterations, many in one message.
                if self._gatherer is not None:
                    for gathered in self._gatherer.collect_reports():
                        link.send(gathered)
                # After a signal: end when all workers have left, or at the deadline.
                if self._deadline is not None and not (
                    self._processes.list_alive() and self._seconds_left()
                ):
                    return None

    def _report_ends(self) -> None:
        try:
            for ended in self._processes.poll():
                self._link.send(ended)
        except ForkServerError:
            for worker in self._processes.list_alive():  # node 0 would notice by itself, but later
                self._link.send(WorkerEnded(worker, -signal.SIGKILL))
            raise

    def _wait_for_coordinator(self, gone: str, woken: socket.socket) -> RunEnded | None:
        """Wait for another node 0; return None to follow it, its RunEnded if it refuses."""
        # Returns None when this node follows another coordinator, or the `RunEnded` of one that
        # continues without this node. Raises RunError if none comes in time, or if a signal, seen
        # as data on the socket `woken`, asks this node to leave.
        seconds = self._coordinator_timeout_seconds
        if seconds:
            self._notify(f"{gone}; waits {seconds:g} s for another node 0")
        deadline = time.monotonic() + seconds
        while self._deadline is None and time.monotonic() < deadline:
            # the new node 0 gets the live workers with JoinNode, then these
            self._unreported_ends += self._processes.poll()
            with suppress(RendezvousError):
                hello = JoinNode(
                    self._node, self._link.setup.epoch, tuple(self._processes.list_alive())
                )
                return self._link.follow_new_coordinator(hello, RunEnded, lambda _: None)
            if select.select([woken], [], [], JOIN_RETRY_SECONDS)[0]:
                woken.recv(1)
                self._deadline = time.monotonic()
        raise RunError(
            gone
            if self._deadline is not None or not seconds
            else f"{gone}; no other node 0 came within {seconds:g} s"
        )

    def _announce_leaving(self) -> None:
        # The coordinator lets the workers leave at the end of an iteration, so nothing is lost.
        self._deadline = time.monotonic() + self._grace_seconds
        for worker in self._processes.list_alive():
            self._link.send(Leaving(worker))

    def _seconds_to_wait(self) -> float:
        # Wake up to notice a silent node 0, or to end at the deadline.
        silent = max(0.0, self._last_heard + to_node_agent.SILENT_SECONDS - time.monotonic())
        left = self._seconds_left()
        return silent if left is None else min(silent, left)

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
