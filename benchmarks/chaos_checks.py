"""What must be true after each run of `benchmarks.chaos`, and what is counted."""

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

from slipstream.runtime.coordinator.decisions.recovery_clock import Recovery
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.events import Event, Failed, Joined, Noted
from slipstream.runtime.model.checkpoints.parameters import load_parameters
from slipstream.runtime.tools.reference import ReferenceResult
from slipstream.schedules.schedule import Worker

REASONS = ("SIGKILL", "stopped answering", "InjectedError", "exit status 3", "was not found by the new node 0")
"""What is said of a worker that was lost on purpose."""
KEPT = re.compile(r"losses\.jsonl|metrics\.jsonl|events\.jsonl|schedule\.json|trace\.json|schedules/[0-9a-f]{16}\.json"
                  r"|parameters/layer-\d+\.safetensors|logs/worker-\d+\.\d+(-rank-\d+)?\.log|checkpoints/iteration-\d+/[^.][^/]*")
"""What a run leaves in its folder."""
NOTICED_SECONDS = 10.0
"""A process that ends is found out in a second; on a busy machine, in a few."""
_OF_WORKER = re.compile(r"[/-].*")
"""What the name of a process has behind that of its worker."""
_BEFORE = re.compile(r"worker (\S+) .*, before it took part")


class ChaosError(RuntimeError):
    """Something that must not happen. The message is one line."""


@dataclass(slots=True)
class Tally:
    """What has happened so far."""

    recoveries: list[Recovery] = field(default_factory=list)
    lost: int = 0
    """Times that fewer workers were left than there are stages."""
    back: int = 0
    """Times that the others went back to a checkpoint, because a stage had no worker left."""
    nodes: int = 0
    """Times that all workers of a node were lost in one recovery."""
    leaders: int = 0
    """Times that node 0 was killed, and another one went on."""
    pairs: Counter[str] = field(default_factory=Counter)
    """Times that two things failed within an iteration, by what they are."""
    slowdowns: int = 0
    """Changes of workers' speeds."""
    found: int = 0
    """Changes of workers' speeds that the run has found, or taken for such."""
    left_out: int = 0
    """Times that a worker was left out as too slow."""
    deviation: float = 0.0
    """The largest, of any loss and any parameter."""
    reasons: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    told: list[str] = field(default_factory=list)
    """What a run has said besides."""

    @property
    def kills(self) -> int:
        """Workers that were lost, and connections that were."""
        return self.lost + sum(max(len(one.dead), not one.returned) for one in self.recoveries if not one.settled)

    @property
    def returns(self) -> int:
        """Workers that came in again."""
        return sum(len(one.returned) for one in self.recoveries)

    @property
    def settled(self) -> int:
        """Times that layers have moved while all trained on."""
        return sum(one.settled for one in self.recoveries)

    @property
    def events(self) -> int:
        """All that has happened to the runs from outside."""
        return self.kills + self.returns + self.leaders + self.slowdowns

    def add(self, recovery: Recovery, nodes: Sequence[Collection[Worker]] = ()) -> None:
        """Count a recovery; `nodes` are the workers of each. Raises ChaosError where a worker was lost that should not.
        """
        self.recoveries.append(recovery)
        self.nodes += sum(set(recovery.dead).issuperset(workers) for workers in nodes)
        self.back += recovery.went_back_to is not None
        for reason in recovery.reasons:
            known = next((known for known in REASONS if known in reason), None)
            if known is None:
                raise ChaosError(f"a worker was lost for no reason of ours: {reason}")
            self.reasons[known] += 1
        self.reasons["connections"] += not recovery.dead and not recovery.returned and not recovery.settled

    def add_speeds(self, event: SpeedEvent) -> None:
        """Count what was found about workers' speeds."""
        self.found += len(event.changes)
        self.left_out += len(event.left_out)

    def join(self, other: "Tally") -> None:
        """Count what another has counted, too."""
        self.recoveries += other.recoveries
        self.reasons += other.reasons
        self.pairs += other.pairs
        self.deviation = max(self.deviation, other.deviation)
        for name in ("lost", "back", "nodes", "leaders", "slowdowns", "found", "left_out", "runs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def report(self) -> str:
        """A few lines."""
        seconds = sorted(one.seconds for one in self.recoveries if one.dead or not (one.returned or one.settled))
        middle, worst = (statistics.median(seconds), seconds[-1]) if seconds else (0.0, 0.0)
        causes = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        meanwhile = sum(one.meanwhile for one in self.recoveries)
        return (f"{self.runs} runs, {self.events} events: {self.kills} kills ({causes}), {self.returns} returns, "
                f"{self.slowdowns} changes of speed, {self.nodes} nodes lost, node 0 killed {self.leaders} times\n"
                f"{self.settled} times settled, {meanwhile} iterations while layers were fetched, {self.found} changes "
                f"of speed found, {self.left_out} workers left out, {self.back} times back to a checkpoint, "
                f"{self.lost} times too few were left\n"
                f"pairs: {', '.join(f'{count} {what}' for what, count in self.pairs.most_common()) or 'none'}\n"
                f"recovery: median {middle * 1e3:.0f} ms, worst {worst * 1e3:.0f} ms\n"
                f"largest deviation {self.deviation:.3g}")

    def compare_losses(self, out: Path, reference: ReferenceResult) -> int:
        """How many iterations are on disk. Raises ChaosError."""
        lines = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
        found = [line["iteration"] for line in lines]
        place = next((place for place, iteration in enumerate(found) if place != iteration), None)
        if place is not None:
            raise ChaosError(f"{out}: losses are not those of all iterations, in order: line {place + 1} is of "
                             f"iteration {found[place]}, after {found[max(0, place - 3):place]}")
        for line in lines:
            if line["loss"] is None:
                raise ChaosError(f"{out}: the loss of iteration {line['iteration']} is not known")
            self.deviation = max(self.deviation, abs(line["loss"] - reference.losses[line["iteration"]]))
        return len(lines)

    def compare_parameters(self, out: Path, reference: ReferenceResult) -> None:
        """Raises ChaosError where some are missing."""
        parameters = load_parameters(out)
        if parameters.keys() != reference.parameters.keys():
            raise ChaosError(f"{out}: parameters are missing")
        for name, theirs in reference.parameters.items():
            self.deviation = max(self.deviation, float((parameters[name] - theirs).abs().max()))


class Survivors:
    """Sees to it that no process of a worker ends, or is replaced, that the run does not say was lost.

    `found` are the processes of workers of another node 0 that are to be found, by the workers' names; `running` gives
    those that run, so that one is known to be lost that was started and lost between two commits.
    """

    def __init__(self, found: Mapping[str, int], running: Callable[[], Mapping[str, int]] = dict) -> None:
        self._found = dict(found)
        self._running = running
        self._pids: dict[str, int] = {}
        self._ended: dict[str, float] = {}
        """Of those to be found, since when they are gone without a word."""
        self._lost: set[int] = set()
        """Those that are said to be lost; they may take a moment to end."""
        self._wrong: list[str] = []

    def observe(self, event: Event) -> None:
        """Of the run."""
        # One that joins takes the place of a process that node 0 had started, and that had not joined when node 0 died.
        worker = str(event.worker) if isinstance(event, Failed | Joined) else None
        if isinstance(event, Noted) and (match := _BEFORE.match(event.text)):
            worker = match[1]
        if worker is not None:
            for pids in (self._found, self._ended):
                for name in [name for name in pids if _worker_of(name) == worker]:
                    del pids[name]
            if not isinstance(event, Joined):
                self._lost |= {pid for pids in (self._pids, self._running()) for name, pid in pids.items()
                               if _worker_of(name) == worker}

    def look(self, pids: Mapping[str, int]) -> None:
        """Compare with the processes that there are, by the names of the workers, at a commit."""
        self._wrong += [f"worker {name} was process {self._pids[name]} and is {pid}, but was not lost"
                        for name, pid in pids.items() if self._pids.get(name, pid) not in {pid, *self._lost}]
        self._pids.update(pids)
        for name, pid in self._found.items():
            if not lives(pid):
                self._ended.setdefault(name, time.monotonic())

    def require(self) -> None:
        """Raises ChaosError."""
        late = [f"the process of worker {name} has ended, and nobody has said so" for name, at in self._ended.items()
                if time.monotonic() - at > NOTICED_SECONDS]
        if self._wrong or late:
            raise ChaosError("; ".join([*self._wrong, *late]))


def _worker_of(process: str) -> str:
    """Whose process this is, where a worker may be several, or go on as half of them; the fork server's is its own."""
    return _OF_WORKER.sub("", process)


class Leaks:
    """What this process and those below it hold after the first run, and must not hold more of after others.

    Some things are made once, and kept: the fork server's selector, say.
    """

    def __init__(self) -> None:
        self._before: dict[str, list[str]] | None = None

    def require(self, others: Mapping[str, int]) -> None:
        """Raises ChaosError where something is left after a moment; `others` are processes that must be gone, too.

        A run that has adopted these does not use all that others do: it is compared with them, and they not with it.
        """
        if self._before is None and not others:
            time.sleep(0.5)
            self._before = _held()
        deadline = time.monotonic() + NOTICED_SECONDS
        while True:
            left = [] if self._before is None else [
                f"{len(more)} more {what} ({', '.join(sorted(more)[:5])})"
                for what, found in _held().items() if (more := set(found) - set(self._before[what]))]
            left += [f"process {pid} of worker {name}" for name, pid in others.items() if lives(pid)]
            if not left:
                return
            if time.monotonic() > deadline:
                raise ChaosError(f"left after a run: {'; '.join(left)}")
            time.sleep(0.05)


def require_no_litter(out: Path) -> None:
    """Raises ChaosError where a run leaves files that nobody needs."""
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir())
    litter = [name for name in names if not KEPT.fullmatch(name)]
    if litter:
        raise ChaosError(f"{out}: holds {', '.join(litter[:5])}")


def lives(pid: int) -> bool:
    """Whether a process runs: one that waits for its parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def below(pid: int) -> list[int]:
    """A process's children, and theirs."""
    try:
        mine = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [one for child in mine for one in (child, *below(child))]


def workers_below(*pids: int) -> dict[str, int]:
    """The processes of workers below some processes, by the workers' names; of several ranks, the first that is found.
    """
    found: dict[str, int] = {}
    for pid in (one for top in pids for one in below(top)):
        with contextlib.suppress(OSError):
            role, _, worker = Path(f"/proc/{pid}/comm").read_text().strip().partition("-")
            if role == "worker" and lives(pid):
                found.setdefault(_worker_of(worker), pid)
    return found


def _held() -> dict[str, list[str]]:
    """Processes, threads, and the open descriptors of them all, each by a name of its own."""
    processes = below(os.getpid())
    return {"processes": [str(pid) for pid in processes],
            "threads": [f"{thread.name} {thread.ident}" for thread in threading.enumerate()],
            "descriptors": [one for pid in (os.getpid(), *processes) for one in _descriptors(pid)]}


def _descriptors(pid: int) -> list[str]:
    """What a process has open; what is of one kind is numbered."""
    counts: Counter[str] = Counter()
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                counts[str(path.readlink()).partition(":")[0]] += 1
            except FileNotFoundError:  # of this very look
                continue
    except OSError:  # the process has ended
        return []
    return [f"{target} {number} of {pid}" for target, count in counts.items() for number in range(count)]
