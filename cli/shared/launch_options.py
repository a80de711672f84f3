"""Read which node of a run this process is, and what is rehearsed.

Nothing here imports torch, so that a wrong --kill, --return or --slow is refused before the seconds
that this takes.
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
from slipstream.runtime.processes.launch_environment import LaunchInfo, group_ranks, read_launch_info
from slipstream.runtime.protocol.authentication import SECRET_REMEDY, Secret, SecretError, read_secret
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules.schedule import Schedule, Worker

if TYPE_CHECKING:
    from slipstream.runtime.processes.process_manager import NodeFailure, Return
    from slipstream.runtime.protocol.failure_injection import Injection, Slowdown


def find_own_node(nodes: int | None, node: int | None, rendezvous: str | None, ranks: int = 1) -> LaunchInfo | None:
    """Return which node of a run this process is, and how many there are.

    Options take precedence over the environment. Returns None if `ranks` processes were started for
    each worker and this process is not the first of its worker. Exits 2 if options or environment
    are inconsistent.
    """
    if nodes is None and node is None and rendezvous is None:
        try:
            here = read_launch_info()
            return LaunchInfo() if here is None else group_ranks(here, ranks)
        except ValueError as error:
            refuse(error)
    if node and nodes is None:
        refuse(f"--node {node} needs --nodes, how many there are, and --rendezvous HOST:PORT, an address of node 0")
    nodes, node = nodes or 1, node or 0
    if node >= nodes:
        refuse(f"--node {node}: expected 0 to {nodes - 1}, with --nodes {nodes}")
    if rendezvous is None:
        if nodes > 1:
            refuse("--nodes needs --rendezvous HOST:PORT, an address of node 0 that the others can reach")
        return LaunchInfo()
    try:
        return LaunchInfo(node=node, nodes=nodes, master=Rendezvous.parse(rendezvous))
    except ValueError as error:
        refuse(f"--rendezvous: {error}")


def with_machines(job: Job, first: Schedule, here: LaunchInfo) -> Job:
    """Return the job with a topology that says which workers share a machine.

    It is the job's own [topology], or else follows from how the nodes of this run (`here`) share
    the workers of the `first` schedule.
    """
    if job.nodes or here.nodes == 1:
        return job
    node_shares = divide_workers_by_node([seat.worker for seat in first.seats], here.nodes, ())
    return replace(job, nodes=find_domains(first.grid, node_shares, here.local.processes, ()).domains)


def read_secret_or_refuse(here: LaunchInfo) -> Secret | None:
    """Return the secret given by the environment. Exits 2 if it is missing and several nodes need
    one."""
    try:
        secret = read_secret()
    except SecretError as error:
        refuse(error)
    if secret is None and here.nodes > 1:
        refuse(f"a run on {here.nodes} nodes needs a secret that all of them have: {SECRET_REMEDY} on each")
    return secret


REHEARSED = ("--kill", "--return", "--slow")
"""Options of rehearsals, in the order of the arguments of `read_rehearsals`."""
KILL_BEFORE_OP = 2
"""Index of the op, in mid-iteration, before which --kill kills its worker."""
MAX_SLOW_FACTOR = 1000
"""Largest factor by which --slow may lengthen a worker's ops."""
_FACTOR = re.compile(r"[0-9]{1,4}(\.[0-9]{1,9})?", re.ASCII)
_NODE = re.compile(r"node([0-9]{1,7})", re.ASCII)


class _Rehearsal(NamedTuple):
    """Kill, return or slowdown of a worker or node that one option asks for."""

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
    """All kills, returns and slowdowns on purpose that the options of a run ask for."""

    kills: tuple[_Rehearsal, ...]
    returned: tuple[_Rehearsal, ...]
    slowed: tuple[tuple[_Rehearsal, float], ...]

    @property
    def slowdowns(self) -> "tuple[Slowdown, ...]":
        """Slowdowns on purpose, one for each worker that --slow names."""
        from slipstream.runtime.protocol.failure_injection import Slowdown

        return tuple(Slowdown(worker, one.iteration, factor) for one, factor in self.slowed for worker in one.workers)

    @property
    def injections(self) -> "tuple[Injection, ...]":
        """Failures on purpose, one for each worker that --kill names: the worker kills itself."""
        from slipstream.runtime.protocol.failure_injection import Injection

        return tuple(Injection(one.workers[0], one.iteration, KILL_BEFORE_OP) for one in self.kills if not one.is_node)

    @property
    def node_failures(self) -> "tuple[NodeFailure, ...]":
        """Failures on purpose of the nodes that --kill names, each of all its workers."""
        from slipstream.runtime.processes.process_manager import NodeFailure

        return tuple(NodeFailure(event.workers, event.iteration) for event in self.kills if event.is_node)

    @property
    def returns(self) -> "tuple[Return, ...]":
        """Restarts of dead workers, one for each worker that --return names."""
        from slipstream.runtime.processes.process_manager import Return

        return tuple(Return(worker, event.iteration) for event in self.returned for worker in event.workers)

    def find_conflicts(self, iterations: int, absent: Collection[Worker] = ()) -> Iterator[str]:
        """Yield a line for each event on purpose that cannot happen or contradicts another.

        The run has iterations 0 to `iterations` - 1, and `absent` workers are down from the start.
        """
        for event in chain(self.kills, self.returned, (slow for slow, _ in self.slowed)):
            if event.iteration >= iterations:
                yield f"{event} cannot happen: the last iteration is {iterations - 1}"
        for worker in sorted({worker for event in chain(self.kills, self.returned) for worker in event.workers}):
            yield from self._find_order_conflicts(worker, is_down=worker in absent)
        factors: dict[tuple[Worker, int], float] = {}
        for worker, iteration, factor in ((worker, slow.iteration, factor) for slow, factor in self.slowed
                                          for worker in slow.workers):
            earlier = factors.setdefault((worker, iteration), factor)
            if earlier != factor:
                yield (f"--slow {worker}={factor:g}@{iteration} contradicts "
                       f"--slow {worker}={earlier:g}@{iteration}")

    def _find_order_conflicts(self, worker: Worker, *, is_down: bool) -> Iterator[str]:
        """Yield a line for each kill of a dead worker, or live one's return."""
        events = sorted((one.iteration, one.option != "--kill", one) for one in chain(self.kills, self.returned)
                        if worker in one.workers)
        for _, is_return, one in events:
            if is_return and not is_down:
                yield f"{one}: worker {worker} is not down by then; expected --kill {worker}@ITERATION before"
            elif not is_return and is_down:
                yield f"{one}: worker {worker} is down by then; expected --return {worker}@ITERATION before"
            is_down = not is_return


def read_rehearsals(job: Job, kill: list[str] | None, bring_back: list[str] | None,
                    slow: list[str] | None) -> Rehearsals:
    """Return what --kill, --return and --slow ask for. Exits 2 if a text is malformed."""
    return Rehearsals(tuple(_read_all("--kill", kill or (), job)), tuple(_read_all("--return", bring_back or (), job)),
                      tuple(chain(*(_parse_slowdowns(text, job) for text in slow or ()))))


def require_possible_rehearsals(arguments: Sequence[str]) -> None:
    """Exit 2 if `slipstream train` is asked for an event that cannot happen.

    Such a kill, return or slowdown is malformed, or of a worker or iteration that the job does not
    have. Whatever else is wrong, such as the job file, is left to the command itself.
    """
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
    """Return an option's values, given as `--option VALUE` or `--option=VALUE`."""
    return [text.partition("=")[2] if text.startswith(f"{option}=") else text
            for name, text in pairwise(("", *arguments)) if name == option or text.startswith(f"{option}=")]


def _parse_slowdowns(text: str, job: Job) -> Iterator[tuple[_Rehearsal, float]]:
    """Yield the slowdown that a text of --slow asks for, with its factor."""
    name, _, factor = text.partition("@")[0].partition("=")
    if not _FACTOR.fullmatch(factor) or not 1 <= float(factor) <= MAX_SLOW_FACTOR:
        refuse(f"--slow {text}: expected D.S=FACTOR@ITERATION with a factor of 1 (usual) to {MAX_SLOW_FACTOR}, for "
               "example 1.2=2@10")
    for event in _read_all("--slow", [f"{name}@{text.partition('@')[2]}"], job, text):
        yield event, float(factor)


def _read_all(option: str, texts: Iterable[str], job: Job, said: str | None = None) -> Iterator[_Rehearsal]:
    """Yield the events that an option asks for by texts D.S@ITERATION or nodeN@ITERATION."""
    for text in texts:
        name, at, iteration = text.partition("@")
        if not (at and iteration.isascii() and iteration.isdecimal() and len(iteration) < 14):
            form = "D.S@ITERATION, for example 1.2@10" if said is None else "D.S=FACTOR@ITERATION, for example 1.2=2@10"
            refuse(f"{option} {said or text}: expected {form}; or nodeN for all workers of a node")
        node = _NODE.fullmatch(name)
        try:
            workers = parse_workers(option, [name]) if node is None else \
                workers_of_nodes(job.nodes, [int(node[1])], f"{option} node")
        except JobError as error:
            refuse(error)
        if workers[0].pipeline >= job.pipelines or workers[0].column >= job.stages:
            refuse(f"{option} {said or text}: the job has no worker {workers[0]}")
        yield _Rehearsal(option, name, workers, int(iteration))
