"""Define what must be true after each run of `benchmarks.chaos`, and what is counted."""

import contextlib
import json
import os
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.runtime.checkpoints.parameters import load_parameters
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.events import Event, Failed, Joined, Noted
from slipstream.runtime.tools.reference import ReferenceResult
from slipstream.schedules.schedule import Worker

REASONS = (
    "SIGKILL",
    "stopped answering",
    "InjectedError",
    "exit status 3",
    "was not found by the new node 0",
)
"""Texts in the reasons for workers that were lost on purpose."""
STOPPED = "stopped answering"
"""Text in the reason for a worker that was stopped."""
SILENT_SECONDS = 30.0
"""Longest time, in seconds, without a commit, an event or a line."""
KEPT = re.compile(
    r"losses\.jsonl|metrics\.jsonl|events\.jsonl|schedule\.json|trace\.json"
    r"|schedules/[0-9a-f]{16}\.json|parameters/layer-\d+\.safetensors"
    r"|logs/worker-\d+\.\d+(-rank-\d+)?\.log|checkpoints/iteration-\d+/[^.][^/]*"
)
"""Pattern of the files that a run may leave in its folder."""
NOTICED_SECONDS = 10.0
"""Time limit, in seconds, to notice that a process has ended, on a busy machine."""
_OF_WORKER = re.compile(r"[/-].*")
"""Part of a process name that follows the name of its worker."""
_BEFORE = re.compile(r"worker (\S+) .*, before it took part")


class ChaosError(RuntimeError):
    """Exception for something that must not happen. The message is one line."""


@dataclass(slots=True)
class Tally:
    """Counts of what has happened so far."""

    recoveries: list[Recovery] = field(default_factory=list)
    lost: int = 0
    """Number of times that fewer workers were left than there are stages."""
    back: int = 0
    """Number of returns to a checkpoint, because a stage had no worker left."""
    nodes: int = 0
    """Number of times that all workers of a node were lost in one recovery."""
    leaders: int = 0
    """Number of times that node 0 was killed and another one continued."""
    pairs: Counter[str] = field(default_factory=Counter)
    """Number of times that two things failed within an iteration, by what failed."""
    slowdowns: int = 0
    """Number of changes of workers' speeds."""
    found: int = 0
    """Number of changes of workers' speeds that the run detected, correctly or not."""
    left_out: int = 0
    """Number of times that a worker was left out as too slow."""
    deviation: float = 0.0
    """Largest deviation of any loss and any parameter."""
    reasons: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    told: list[str] = field(default_factory=list)
    """Further messages of the runs."""
    innocent: int = 0
    """Number of workers that were lost as silent although nobody had stopped them."""
    silence: float = 0.0
    """Longest time, in seconds, in which a run has told nothing."""

    @property
    def kills(self) -> int:
        """Number of lost workers and lost connections."""
        return self.lost + sum(
            max(len(recovery.dead), not recovery.returned)
            for recovery in self.recoveries
            if not recovery.rebalanced
        )

    @property
    def returns(self) -> int:
        """Number of workers that came back."""
        return sum(len(recovery.returned) for recovery in self.recoveries)

    @property
    def settled(self) -> int:
        """Number of times that layers moved while all workers trained."""
        return sum(recovery.rebalanced for recovery in self.recoveries)

    @property
    def events(self) -> int:
        """Number of events that happened to the runs from outside."""
        return self.kills + self.returns + self.leaders + self.slowdowns

    def add(self, recovery: Recovery, nodes: Sequence[Collection[Worker]] = ()) -> None:
        """Count a recovery, given the workers of each node.

        Raises ChaosError for an unknown reason of a loss.
        """
        self.recoveries.append(recovery)
        self.nodes += sum(set(recovery.dead).issuperset(workers) for workers in nodes)
        self.back += recovery.went_back_to is not None
        for reason in recovery.reasons:
            key = next((key for key in REASONS if key in reason), None)
            if key is None:
                raise ChaosError(f"a worker was lost for no reason of ours: {reason}")
            self.reasons[key] += 1
        self.reasons["connections"] += (
            not recovery.dead and not recovery.returned and not recovery.rebalanced
        )

    def count_innocent(self, recovery: Recovery, stopped: Collection[str]) -> None:
        """Count the workers that were lost as silent, but not stopped."""
        self.innocent += sum(
            STOPPED in reason and reason.split()[1] not in stopped for reason in recovery.reasons
        )

    def add_speeds(self, event: SpeedEvent) -> None:
        """Count the detected changes of workers' speeds."""
        self.found += len(event.changes)
        self.left_out += len(event.left_out)

    def join(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        self.recoveries += other.recoveries
        self.reasons += other.reasons
        self.pairs += other.pairs
        self.deviation = max(self.deviation, other.deviation)
        self.silence = max(self.silence, other.silence)
        for name in (
            "lost",
            "back",
            "nodes",
            "leaders",
            "slowdowns",
            "found",
            "left_out",
            "innocent",
            "runs",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def report(self) -> str:
        """Return the counts in a few lines."""
        seconds = sorted(
            recovery.seconds
            for recovery in self.recoveries
            if recovery.dead or not (recovery.returned or recovery.rebalanced)
        )
        middle, worst = (statistics.median(seconds), seconds[-1]) if seconds else (0.0, 0.0)
        causes = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        meanwhile = sum(recovery.meanwhile for recovery in self.recoveries)
        pairs = ", ".join(f"{count} {what}" for what, count in self.pairs.most_common())
        return (
            f"{self.runs} runs, {self.events} events: {self.kills} kills ({causes}), "
            f"{self.returns} returns, {self.slowdowns} changes of speed, {self.nodes} nodes lost, "
            f"node 0 killed {self.leaders} times\n"
            f"{self.settled} times settled, {meanwhile} iterations while layers were fetched, "
            f"{self.found} changes of speed found, {self.left_out} workers left out, {self.back} "
            f"times back to a checkpoint, {self.lost} times too few were left\n"
            "pairs: "
            f"{pairs or 'none'}\n"
            f"recovery: median {middle * 1e3:.0f} ms, worst {worst * 1e3:.0f} ms; longest silence "
            f"{self.silence:.1f} s; {self.innocent} lost as silent that nobody had stopped\n"
            f"largest deviation {self.deviation:.3g}"
        )

    def compare_losses(self, out: Path, reference: ReferenceResult) -> int:
        """Return the number of losses on disk.

        Raises ChaosError if they are incomplete or out of order.
        """
        lines = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
        found = [line["iteration"] for line in lines]
        place = next((place for place, iteration in enumerate(found) if place != iteration), None)
        if place is not None:
            raise ChaosError(
                f"{out}: losses are not those of all iterations, in order: line {place + 1} is of "
                f"iteration {found[place]}, after {found[max(0, place - 3) : place]}"
            )
        for line in lines:
            if line["loss"] is None:
                raise ChaosError(f"{out}: the loss of iteration {line['iteration']} is not known")
            self.deviation = max(
                self.deviation, abs(line["loss"] - reference.losses[line["iteration"]])
            )
        return len(lines)

    def compare_parameters(self, out: Path, reference: ReferenceResult) -> None:
        """Update the deviation by that of the parameters. Raises ChaosError if some are missing."""
        parameters = load_parameters(out)
        if parameters.keys() != reference.parameters.keys():
            raise ChaosError(f"{out}: parameters are missing")
        for name, theirs in reference.parameters.items():
            self.deviation = max(self.deviation, float((parameters[name] - theirs).abs().max()))


class Silence:
    """Measure the longest time in which a run says nothing."""

    def __init__(self) -> None:
        self._heard = time.monotonic()
        self.longest = 0.0
        """That time, in seconds."""

    def end(self) -> None:
        """Record that the run has told something."""
        now = time.monotonic()
        self.longest, self._heard = max(self.longest, now - self._heard), now


class Survivors:
    """Check that a worker's process ends only if the run reports the worker as lost.

    The processes `found` belong to workers of another node 0 that must be adopted, by name of
    worker. `running` returns the processes that run now, so that a worker that is started and lost
    between two commits is known to be lost.
    """

    def __init__(
        self, found: Mapping[str, int], running: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        self._found = dict(found)
        self._running = running
        self._pids: dict[str, int] = {}
        self._ended: dict[str, float] = {}
        """Times since when processes to be adopted are gone unreported, by name of worker."""
        self._lost: set[int] = set()
        """Processes of workers that are reported lost, which may take a moment to end."""
        self._wrong: list[str] = []

    def observe(self, event: Event) -> None:
        """Record an event of the run."""
        # One that joins takes the place of a process that node 0 had started, and that had not
        # joined when node 0 died.
        worker = str(event.worker) if isinstance(event, Failed | Joined) else None
        if isinstance(event, Noted) and (match := _BEFORE.match(event.text)):
            worker = match[1]
        if worker is not None:
            for pids in (self._found, self._ended):
                for name in [name for name in pids if worker_of(name) == worker]:
                    del pids[name]
            if not isinstance(event, Joined):
                self._lost |= {
                    pid
                    for pids in (self._pids, self._running())
                    for name, pid in pids.items()
                    if worker_of(name) == worker
                }

    def look(self, pids: Mapping[str, int]) -> None:
        """Compare the expected processes with those that exist at a commit, by name of worker."""
        self._wrong += [
            f"worker {name} was process {self._pids[name]} and is {pid}, but was not lost"
            for name, pid in pids.items()
            if self._pids.get(name, pid) not in {pid, *self._lost}
        ]
        self._pids.update(pids)
        for name, pid in self._found.items():
            if not lives(pid):
                self._ended.setdefault(name, time.monotonic())

    def require(self) -> None:
        """Raise ChaosError if a process has ended or was replaced without a report."""
        late = [
            f"the process of worker {name} has ended, and nobody has said so"
            for name, at in self._ended.items()
            if time.monotonic() - at > NOTICED_SECONDS
        ]
        if self._wrong or late:
            raise ChaosError("; ".join([*self._wrong, *late]))


def worker_of(process: str) -> str:
    """Return the name of the worker that a process belongs to.

    A worker may consist of several processes, or continue as half of them. The fork server has its
    own name.
    """
    return _OF_WORKER.sub("", process)


class Leaks:
    """Check that later runs leave no more behind than the first one.

    It counts what this process and its children hold. Some things are made only once and kept, such
    as the selector of the fork server.
    """

    def __init__(self) -> None:
        self._before: dict[str, list[str]] | None = None

    def require(self, others: Mapping[str, int]) -> None:
        """Raise ChaosError if something is left after a moment.

        The processes `others` must be gone, too.

        A run that has adopted processes does not use everything that other runs use: it is compared
        with them, but they are not compared with it.
        """
        if self._before is None and not others:
            time.sleep(0.5)
            self._before = _held()
        deadline = time.monotonic() + NOTICED_SECONDS
        while True:
            left = []
            for what, found in _held().items() if self._before is not None else ():
                if more := set(found) - set(self._before[what]):
                    left.append(f"{len(more)} more {what} ({', '.join(sorted(more)[:5])})")
            left += [
                f"process {pid} of worker {name}" for name, pid in others.items() if lives(pid)
            ]
            if not left:
                return
            if time.monotonic() > deadline:
                raise ChaosError(f"left after a run: {'; '.join(left)}")
            time.sleep(0.05)


def require_no_litter(out: Path) -> None:
    """Raise ChaosError if a run leaves files that nobody needs."""
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir())
    litter = [name for name in names if not KEPT.fullmatch(name)]
    if litter:
        raise ChaosError(f"{out}: holds {', '.join(litter[:5])}")


def lives(pid: int) -> bool:
    """Return whether a process runs. A zombie process does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def below(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    try:
        mine = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended
        return []
    return [process for child in mine for process in (child, *below(child))]


def workers_below(*pids: int) -> dict[str, int]:
    """Return the processes of workers below the given processes, by name of worker.

    For a worker of several ranks, this is the first process found.
    """
    found: dict[str, int] = {}
    for pid in (process for top in pids for process in below(top)):
        with contextlib.suppress(OSError):
            role, _, worker = Path(f"/proc/{pid}/comm").read_text().strip().partition("-")
            if role == "worker" and lives(pid):
                found.setdefault(worker_of(worker), pid)
    return found


def _held() -> dict[str, list[str]]:
    """Return processes, threads and their open descriptors, each with a unique name."""
    processes = below(os.getpid())
    return {
        "processes": [str(pid) for pid in processes],
        "threads": [f"{thread.name} {thread.ident}" for thread in threading.enumerate()],
        "descriptors": [
            descriptor for pid in (os.getpid(), *processes) for descriptor in _descriptors(pid)
        ],
    }


def _descriptors(pid: int) -> list[str]:
    """Return the open descriptors of a process, numbered within each kind."""
    counts: Counter[str] = Counter()
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                counts[str(path.readlink()).partition(":")[0]] += 1
            except FileNotFoundError:  # of this very look
                continue
    except OSError:  # the process has ended
        return []
    return [
        f"{target} {number} of {pid}" for target, count in counts.items() for number in range(count)
    ]
