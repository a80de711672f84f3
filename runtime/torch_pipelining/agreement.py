"""Agreement of all live processes on who goes on, by keys of a store.

A generation begins with a decision that is made once: which processes are its members, and how many
iterations are committed. All processes that are alive say how far they are: each puts its *voice*
into the store. A process that sees that all others are dead, late or have a voice there proposes,
and the first proposal is the decision. A process that the decision leaves out has to end.

A store may outlive a run: torchrun's does where it starts all processes anew. A run whose members
are all dead is over, and the next process begins another one, under keys of its own.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from socket import socket

import msgspec

from slipstream.runtime.replay.torch_groups import PrefixStore, Store
from slipstream.runtime.torch_pipelining.watch import connect, has_ended, is_dead
from slipstream.schedules.schedule import Worker

POLL_SECONDS = 0.005


class LeftOutError(RuntimeError):
    """Error, in one line, for a process that the others go on without."""


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """What a process tells the others of itself before a generation."""

    address: str
    committed: int | None
    """Number of iterations that the process has committed; None if it has no state yet."""
    sums: tuple[str, ...] = ()
    """Sums that its last `Place.commit` returned, by `float.hex`: JSON has no NaN or infinity."""


class Joiner(msgspec.Struct, frozen=True):
    """Process that asks to become a member, by name, and its voice."""

    process: str
    voice: Voice


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Decision on the members of a generation, and on the processes that asked to join."""

    voices: dict[str, Voice]
    """Voices of the members, by name: `WORKER:RANK`."""
    joiners: int
    """Number of processes that had asked to become members before this decision."""
    settled: int
    """Joiners with numbers up to this are members or dead, and not read again."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers of all members, sorted."""
        return tuple(sorted({worker_of(process) for process in self.voices}))

    @property
    def latest(self) -> Voice:
        """Voice of a member that has committed the most iterations."""
        return max(
            self.voices.values(),
            key=lambda voice: -1 if voice.committed is None else voice.committed,
        )

    @property
    def newcomers(self) -> tuple[Worker, ...]:
        """Workers with a member that has no state yet, sorted."""
        workers = {
            worker_of(process) for process, voice in self.voices.items() if voice.committed is None
        }
        return tuple(sorted(workers))


_VOICES = msgspec.json.Decoder(Voice)
_JOINERS = msgspec.json.Decoder(Joiner)
_DECISIONS = msgspec.json.Decoder(Decision)
_NOBODY = Decision(voices={}, joiners=0, settled=0)
"""Decision without members, which marks a run that never begins."""


def worker_of(process: str) -> Worker:
    """Return the worker of a process with this name, `WORKER:RANK`."""
    return Worker.parse(process.partition(":")[0])


class Agreement:
    """A process's part in deciding who takes part in each generation of a run.

    In all methods, `voice` is what this process tells the others of itself. They raise torch's
    DistError if the store is gone, and OSError as `watch.connect` does.

    Parameters
    ----------
    store
        Store that all processes share, also those of earlier runs.
    process
        Name of this process, `WORKER:RANK`.
    ranks
        Number of processes of each worker; only whole workers are members.
    patience
        Seconds after which a process that lives but says nothing is left out.
    """

    def __init__(self, store: Store, process: str, ranks: int, patience: float) -> None:
        self._shared, self._process, self._ranks, self._patience = store, process, ranks, patience
        self._set_run(1)

    @property
    def store(self) -> Store:
        """Part of the shared store with the keys of this run."""
        return self._store

    def has_begun(self) -> bool:
        """Find the run to take part in; return whether it has begun without this process.

        From then on, `store` has the keys of that run.
        """
        while True:
            # A run that has begun goes on as long as one of its members lives.
            if self._store.check(["decision/1"]):
                if self._has_live_members():
                    return True
                self._set_run(self._run + 1)
            elif self._store.check([f"voice/1/{self._process}"]):
                # This process was here before, and died before the run began: so it never does.
                self._store.compare_set("decision/1", "", _encode(_NOBODY))
            else:
                return False

    def end(self, number: int) -> None:
        """Tell all members that generation `number` has ended."""
        self._store.set(f"end/{number}", "")

    def has_ended(self, number: int) -> bool:
        """Return whether a member has ended generation `number`."""
        return self._store.check([f"end/{number}"])

    def count_joiners(self) -> int:
        """Return how many processes have ever asked to become members in this run."""
        return self._store.add("joiners", 0)

    def start(self, voice: Voice, workers: Sequence[Worker]) -> Decision:
        """Begin the first generation with all processes of `workers`; return the decision on it.

        Raises TimeoutError if one of the processes does not come, and LeftOutError if a run has
        begun without this process.
        """
        while not self.has_begun():
            decision = self._agree(voice, dict.fromkeys(self._processes_of(workers)), 0)
            if decision != _NOBODY:
                return self._require_taken(decision, voice)
        raise LeftOutError(
            f"the others have begun without {self._process}; start it again to return"
        )

    def join(self, voice: Voice) -> Decision:
        """Ask to become a member; return the first decision by which this process is one.

        Raises TimeoutError after `patience` seconds.
        """
        # Counted only once its voice can be read, as members act on the count.
        number = self._store.add("joiner numbers", 1)
        self._store.set(f"joiner/{number}", _encode(Joiner(self._process, voice)))
        self._store.add("joiners", 1)
        deadline = time.monotonic() + self._patience
        while True:
            self.number += 1
            while not self._store.check([f"decision/{self.number}"]):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"no generation began with {self._process} in "
                        f"{self._patience:g} s; expected the others to commit: is "
                        "their loop running?"
                    )
                time.sleep(POLL_SECONDS)
            # Earlier generations of the run are without this process.
            decision = self._read_decision(self.number)
            if decision.voices.get(self._process) == voice:
                return decision

    def go_on(self, voice: Voice, before: Decision) -> Decision:
        """Decide on the generation after `before`, with the processes that live or ask to join.

        Ends the present generation. Raises LeftOutError if the others go on without this process.
        """
        self.end(self.number)
        addresses = {process: other.address for process, other in before.voices.items()}
        return self._require_taken(self._agree(voice, addresses, before.settled), voice)

    def _set_run(self, number: int) -> None:
        # Numbered here: each agent of torchrun counts restarts by itself, so that number cannot
        # name the run.
        self._run, self._store = number, PrefixStore(f"slipstream {number}", self._shared)
        # Of the generation; 0 before the first.
        self.number = 0

    def _has_live_members(self) -> bool:
        last = 1
        while self._store.check([f"decision/{last + 1}"]):
            last += 1
        voices = self._read_decision(last).voices
        return any(
            not is_dead(voice.address)
            for process, voice in voices.items()
            if process != self._process
        )

    def _require_taken(self, decision: Decision, voice: Voice) -> Decision:
        """Return `decision`. Raises LeftOutError unless it has this process's present `voice`."""
        if decision.voices.get(self._process) != voice:
            raise LeftOutError(
                f"the others go on without {self._process}, which was silent for "
                "too long or has lost a rank; end this process, and start it again "
                "to return"
            )
        return decision

    def _agree(self, voice: Voice, addresses: Mapping[str, str | None], settled: int) -> Decision:
        # Others act on this voice only; then look for theirs, and for who is dead.
        self.number += 1
        self._store.set(f"voice/{self.number}/{self._process}", _encode(voice))
        with ExitStack() as connections:

            @cache  # one connection a process, however often it is looked at
            def probe(address: str) -> socket | None:
                connection = connect(address)
                return connection and connections.enter_context(connection)

            self._await_decision(addresses, probe, settled)
        return self._read_decision(self.number)

    def _await_decision(
        self,
        addresses: Mapping[str, str | None],
        probe: Callable[[str], socket | None],
        settled: int,
    ) -> None:
        """Wait for a decision; propose one once all `addresses` have spoken, ended or are late."""
        deadline, spoken = time.monotonic() + self._patience, {self._process}
        while not self._store.check([f"decision/{self.number}"]):
            spoken |= {
                other
                for other in addresses.keys() - spoken
                if self._store.check([f"voice/{self.number}/{other}"])
            }
            missing = addresses.keys() - spoken
            is_late = time.monotonic() > deadline
            if missing and self.number == 1 and is_late:
                raise TimeoutError(
                    f"{', '.join(sorted(missing))} did not start in "
                    f"{self._patience:g} s; expected all processes, or routes "
                    "without these workers"
                )
            # Before the first generation addresses are unknown, so only lateness counts.
            missing_at = [addresses[other] for other in missing]
            if is_late or all(address and has_ended(probe(address)) for address in missing_at):
                if self.number == 1 and self._are_dead(spoken - {self._process}):
                    # They spoke at an earlier start, which failed: so that run never begins.
                    self._store.compare_set("decision/1", "", _encode(_NOBODY))
                else:
                    self._propose(spoken, settled)
            else:
                time.sleep(POLL_SECONDS)

    def _propose(self, spoken: set[str], settled: int) -> None:
        """Propose as members those in `spoken` and all live joiners, of complete workers."""
        voices = {other: self._read_voice(other) for other in spoken}
        count = self.count_joiners()  # before they are read, so that none is counted and not seen
        last = self._store.add("joiner numbers", 0)
        asking = {number: self._read_joiner(number) for number in range(settled + 1, last + 1)}
        for joiner in filter(None, asking.values()):
            if not is_dead(joiner.voice.address):
                voices.setdefault(joiner.process, joiner.voice)
        # A worker with a rank missing waits for it, and is proposed later.
        whole = sorted(
            process
            for process in voices
            if voices.keys() >= set(self._processes_of([worker_of(process)]))
        )
        partial = voices.keys() - whole
        # Look again at the first joiner that may still become a member, and at all after it.
        open_numbers = [
            number
            for number, joiner in asking.items()
            if joiner is None or joiner.process in partial
        ]
        decision = Decision(
            voices={process: voices[process] for process in whole},
            joiners=count,
            settled=min(open_numbers, default=last + 1) - 1,
        )
        # The first proposal counts; this does nothing if there is one.
        self._store.compare_set(f"decision/{self.number}", "", _encode(decision))

    def _are_dead(self, others: Collection[str]) -> bool:
        return bool(others) and all(is_dead(self._read_voice(other).address) for other in others)

    def _read_voice(self, process: str) -> Voice:
        return _VOICES.decode(self._store.get(f"voice/{self.number}/{process}"))

    def _read_joiner(self, number: int) -> Joiner | None:
        """Return the process that asks under a number; None if it has not spoken yet."""
        key = f"joiner/{number}"
        return _JOINERS.decode(self._store.get(key)) if self._store.check([key]) else None

    def _read_decision(self, number: int) -> Decision:
        return _DECISIONS.decode(self._store.get(f"decision/{number}"))

    def _processes_of(self, workers: Sequence[Worker]) -> list[str]:
        return [f"{worker}:{rank}" for worker in workers for rank in range(self._ranks)]


def _encode(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
