"""Read which node of a run this process is, and which failures are rehearsed.

Nothing here imports torch, which takes seconds, so that a wrong --kill, --return or --slow is
refused at once.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from slipstream.cli.shared.console import refuse
from slipstream.cli.shared.options import parse_workers
from slipstream.planner.job.file import Job, JobError, read_job, workers_of_nodes
from slipstream.runtime.failure_domains import divide_workers_by_node, find_domains
from slipstream.runtime.processes.launch_environment import (
    LaunchInfo,
    group_ranks,
    read_launch_info,
)
from slipstream.runtime.protocol.authentication import (
    SECRET_REMEDY,
    Secret,
    SecretError,
    read_secret,
)
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules.schedule import Schedule, Worker

if TYPE_CHECKING:
    from slipstream.runtime.processes.process_manager import NodeFailure, Return
    from slipstream.runtime.protocol.failure_injection import Injection, Slowdown


def find_own_node(
    nodes: int | None, node: int | None, rendezvous: str | None, ranks: int = 1
) -> LaunchInfo | None:
    """Return which node this process is, by options or else by the environment.

    The result is None if each worker was started as `ranks` processes and this is not the first one
    of its worker. Exits 2 if options or environment contradict themselves, or are incomplete.
    """
    if nodes is None and node is None and rendezvous is None:
        try:
            here = read_launch_info()
            return LaunchInfo() if here is None else group_ranks(here, ranks)
        except ValueError as error:
            refuse(error)
    if node and nodes is None:
        refuse(
            f"--node {node} needs --nodes, how many there are, and --rendezvous HOST:PORT, an "
            "address of node 0"
        )
    # Options must name an address of node 0, without which nodes cannot meet.
    nodes, node = nodes or 1, node or 0
    if node >= nodes:
        refuse(f"--node {node}: expected 0 to {nodes - 1}, with --nodes {nodes}")
    if rendezvous is None:
        if nodes > 1:
            refuse(
                "--nodes needs --rendezvous HOST:PORT, an address of node 0 that the others can "
                "reach"
            )
        return LaunchInfo()
    try:
        return LaunchInfo(node=node, nodes=nodes, master=Rendezvous.parse(rendezvous))
    except ValueError as error:
        refuse(f"--rendezvous: {error}")


def with_machines(job: Job, first: Schedule, here: LaunchInfo) -> Job:
    """Return the job with the information which workers share a machine.

    A job that has a [topology], or is run on one node, is returned unchanged. Otherwise the workers
    of the `first` schedule are divided over the nodes of the run (`here`).
    """
    if job.nodes or here.nodes == 1:
        return job
    node_shares = divide_workers_by_node([seat.worker for seat in first.seats], here.nodes, ())
    return replace(
        job, nodes=find_domains(first.grid, node_shares, here.local.processes, ()).domains
    )


def read_secret_or_refuse(here: LaunchInfo) -> Secret | None:
    """Return the secret from the environment; None if a single node has none.

    Exits 2 if a run on several nodes has none, or if it cannot be used.
    """
    try:
        secret = read_secret()
    except SecretError as error:
        refuse(error)
    if secret is None and here.nodes > 1:
        refuse(
            f"a run on {here.nodes} nodes needs a secret that all of them have: {SECRET_REMEDY} "
            "on each"
        )
    return secret


REHEARSED = ("--kill", "--return", "--slow")
"""Options of rehearsals, in the order of the arguments of `read_rehearsals`."""
KILL_BEFORE_OP = 2
"""Index, in a worker's program, of the op before which --kill kills the worker."""
MAX_SLOW_FACTOR = 1000
"""Largest factor by which --slow may lengthen a worker's ops."""
_FACTOR = re.compile(r"[0-9]{1,4}(\.[0-9]{1,9})?", re.ASCII)
_NODE = re.compile(r"node([0-9]{1,7})", re.ASCII)


class _Rehearsal(NamedTuple):
    """Kill, return or slowdown of a worker or node, from one option."""

    option: str
    name: str
    """Worker D.S or node nodeN, as the user wrote it."""
    workers: tuple[Worker, ...]
    iteration: int

    def __str__(self) -> str:
        return f"{self.option} {self.name}@{self.iteration}"

    @property
    def is_node(self) -> bool:
        """True if the option names a node, and so means all of its workers."""
        return _NODE.fullmatch(self.name) is not None


@dataclass(frozen=True, slots=True)
class Rehearsals:
    """Kills, returns and slowdowns that the options of a run ask for."""

    kills: tuple[_Rehearsal, ...]
    returned: tuple[_Rehearsal, ...]
    slowed: tuple[tuple[_Rehearsal, float], ...]

    @property
    def slowdowns(self) -> "tuple[Slowdown, ...]":
        """Slowdowns to inject, one for each worker that --slow names, by itself or its node."""
        from slipstream.runtime.protocol.failure_injection import Slowdown

        return tuple(
            Slowdown(worker, start.iteration, factor)
            for start, factor in self.slowed
            for worker in start.workers
        )

    @property
    def injections(self) -> "tuple[Injection, ...]":
        """Failures to inject, one for each worker that --kill names: the worker kills itself."""
        from slipstream.runtime.protocol.failure_injection import Injection

        return tuple(
            Injection(kill.workers[0], kill.iteration, KILL_BEFORE_OP)
            for kill in self.kills
            if not kill.is_node
        )

    @property
    def node_failures(self) -> "tuple[NodeFailure, ...]":
        """Failures to inject: node 0 kills the workers of each node that --kill names."""
        from slipstream.runtime.processes.process_manager import NodeFailure

        return tuple(
            NodeFailure(event.workers, event.iteration) for event in self.kills if event.is_node
        )

    @property
    def returns(self) -> "tuple[Return, ...]":
        """Restarts of dead workers, one for each that --return names, by itself or its node."""
        from slipstream.runtime.processes.process_manager import Return

        return tuple(
            Return(worker, event.iteration) for event in self.returned for worker in event.workers
        )

    def find_conflicts(self, iterations: int, absent: Collection[Worker] = ()) -> Iterator[str]:
        """Yield a line for each rehearsal that is impossible or contradicts another one.

        The run has iterations 0 to `iterations` - 1, and `absent` workers are down from the start.
        """
        for event in chain(self.kills, self.returned, (slow for slow, _ in self.slowed)):
            if event.iteration >= iterations:
                yield f"{event} cannot happen: the last iteration is {iterations - 1}"
        for worker in sorted(
            {worker for event in chain(self.kills, self.returned) for worker in event.workers}
        ):
            yield from self._find_order_conflicts(worker, is_down=worker in absent)
        # A worker and a node with it may be slowed at once, by different factors.
        factors: dict[tuple[Worker, int], float] = {}
        for worker, iteration, factor in (
            (worker, slow.iteration, factor)
            for slow, factor in self.slowed
            for worker in slow.workers
        ):
            earlier = factors.setdefault((worker, iteration), factor)
            if earlier != factor:
                yield (
                    f"--slow {worker}={factor:g}@{iteration} contradicts "
                    f"--slow {worker}={earlier:g}@{iteration}"
                )

    def _find_order_conflicts(self, worker: Worker, *, is_down: bool) -> Iterator[str]:
        """Yield a line for each kill of `worker` while dead, or return while alive."""
        # Within an iteration, kills come before returns.
        events = sorted(
            (event.iteration, event.option != "--kill", event)
            for event in chain(self.kills, self.returned)
            if worker in event.workers
        )
        for _, is_return, event in events:
            if is_return and not is_down:
                yield (
                    f"{event}: worker {worker} is not down by then; expected --kill "
                    f"{worker}@ITERATION before"
                )
            elif not is_return and is_down:
                yield (
                    f"{event}: worker {worker} is down by then; expected --return "
                    f"{worker}@ITERATION before"
                )
            is_down = not is_return


def read_rehearsals(
    job: Job, kill: list[str] | None, bring_back: list[str] | None, slow: list[str] | None
) -> Rehearsals:
    """Return what --kill, --return and --slow ask for.

    Exits 2 if a text is malformed, or names a worker or node that the job does not have.
    """
    return Rehearsals(
        tuple(_read_all("--kill", kill or (), job)),
        tuple(_read_all("--return", bring_back or (), job)),
        tuple(chain(*(_parse_slowdowns(text, job) for text in slow or ()))),
    )


def require_possible_rehearsals(arguments: Sequence[str]) -> None:
    """Exit 2 if the arguments of `slipstream train` ask for a rehearsal that cannot happen.

    Anything else that is wrong, such as the job file, is left to the command itself, and so are
    conflicts if --failed, --failed-node or --schedule is given.
    """
    # Such a kill, return or slowdown is malformed, or of a worker or iteration that the job does
    # not have. The arguments are read by hand, since the command's module imports torch.
    if not any(argument.partition("=")[0] in REHEARSED for argument in arguments):
        return
    path = next((Path(argument) for argument in arguments if argument.endswith(".toml")), None)
    try:
        job = read_job(path, _values_of("--set", arguments)) if path is not None else None
    except JobError:
        return
    if job is None:
        return
    rehearsals = read_rehearsals(job, *(_values_of(option, arguments) for option in REHEARSED))
    iterations = [job.run_keys.iterations, *_values_of("--iterations", arguments)][-1]
    given = {argument.partition("=")[0] for argument in arguments}
    if str(iterations).isdecimal() and not {"--failed", "--failed-node", "--schedule"} & given:
        for line in rehearsals.find_conflicts(int(str(iterations))):
            refuse(line)


def _values_of(option: str, arguments: Sequence[str]) -> list[str]:
    """Return the values of an option, given as `--option VALUE` or `--option=VALUE`."""
    values = []
    for name, text in pairwise(("", *arguments)):
        if text.startswith(f"{option}="):
            values.append(text.partition("=")[2])
        elif name == option:
            values.append(text)
    return values


def _parse_slowdowns(text: str, job: Job) -> Iterator[tuple[_Rehearsal, float]]:
    """Yield the one slowdown that `text`, a value of --slow, asks for, with its factor.

    Exits 2 if the text is malformed, or names a worker that the job does not have.
    """
    name, _, factor = text.partition("@")[0].partition("=")
    if not _FACTOR.fullmatch(factor) or not 1 <= float(factor) <= MAX_SLOW_FACTOR:
        refuse(
            f"--slow {text}: expected D.S=FACTOR@ITERATION with a factor of 1 (usual) to "
            f"{MAX_SLOW_FACTOR}, for example 1.2=2@10"
        )
    for event in _read_all("--slow", [f"{name}@{text.partition('@')[2]}"], job, text):
        yield event, float(factor)


def _read_all(
    option: str, texts: Iterable[str], job: Job, said: str | None = None
) -> Iterator[_Rehearsal]:
    """Yield the events that an option asks for by texts D.S@ITERATION or nodeN@ITERATION.

    Exits 2 for a malformed text, or a worker that the job does not have.
    """
    for text in texts:
        name, at, iteration = text.partition("@")
        if not (at and iteration.isascii() and iteration.isdecimal() and len(iteration) < 14):
            form = (
                "D.S@ITERATION, for example 1.2@10"
                if said is None
                else "D.S=FACTOR@ITERATION, for example 1.2=2@10"
            )
            refuse(f"{option} {said or text}: expected {form}; or nodeN for all workers of a node")
        node = _NODE.fullmatch(name)
        try:
            workers = (
                parse_workers(option, [name])
                if node is None
                else workers_of_nodes(job.nodes, [int(node[1])], f"{option} node")
            )
        except JobError as error:
            refuse(error)
        if workers[0].pipeline >= job.pipelines or workers[0].column >= job.stages:
            refuse(f"{option} {said or text}: the job has no worker {workers[0]}")
        yield _Rehearsal(option, name, workers, int(iteration))
