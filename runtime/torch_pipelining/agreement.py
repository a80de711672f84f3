"""Agreement of all live processes on who goes on, by keys of a store.

A generation begins with a decision that is made once: which processes are its members, and how many
iterations are committed. All that are alive say how far they are; whoever sees that the others are
dead or have spoken proposes, and the first proposal is the decision. A process that it leaves out
has to end.
"""

import time
from collections.abc import Mapping, Sequence

import msgspec

from slipstream.runtime.torch_pipelining.watch import is_dead
from slipstream.runtime.torch_private import Store
from slipstream.schedules.schedule import Worker

POLL_SECONDS = 0.005
PROBE_SECONDS = 0.05
"""Interval between attempts to reach processes that are missing."""


class LeftOutError(RuntimeError):
    """Error for a process that the others go on without. The message is one line."""


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself."""

    address: str
    committed: int | None
    """Number of iterations that it has committed; None if it has no state yet."""
    sums: tuple[float, ...] = ()
    """Sums of its last commit."""


class Joiner(msgspec.Struct, frozen=True):
    """Process that asks to be a member."""

    process: str
    voice: Voice


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a generation."""

    voices: dict[str, Voice]
    """Members by name, `WORKER:RANK`."""
    joiners: int
    """How many have asked to be members, up to now."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers that take part, sorted."""
        return tuple(sorted({worker_of(process) for process in self.voices}))

    @property
    def latest(self) -> Voice:
        """Voice of a member that has committed most iterations."""
        return max(self.voices.values(), key=lambda voice: -1 if voice.committed is None else voice.committed)

    @property
    def newcomers(self) -> tuple[Worker, ...]:
        """Workers that have no state yet."""
        return tuple(sorted({worker_of(process) for process, voice in self.voices.items()
                             if voice.committed is None}))


def worker_of(process: str) -> Worker:
    """Return the worker of a process, given by its name."""
    return Worker.parse(process.partition(":")[0])


class Agreement:
    """The decisions on the generations of a run, as one process takes part in them.

    Parameters
    ----------
    ranks
        Number of processes of each worker; only whole workers are members.
    patience
        Seconds after which a process that lives but says nothing is left out.
    """

    def __init__(self, store: Store, process: str, ranks: int, patience: float) -> None:
        self._store, self._process, self._ranks, self._patience = store, process, ranks, patience
        self.number = 0
        """Number of the generation; 0 before the first."""

    def has_begun(self) -> bool:
        """Return whether the run has begun without this process."""
        return self._store.check(["decision/1"])

    def end(self, number: int) -> None:
        """Tell all members that a generation has ended."""
        self._store.set(f"end/{number}", "")

    def has_ended(self, number: int) -> bool:
        """Return whether a member has ended a generation."""
        return self._store.check([f"end/{number}"])

    def count_joiners(self) -> int:
        """Return how many have asked to be members."""
        return self._store.add("joiners", 0)

    def start(self, voice: Voice, workers: Sequence[Worker]) -> Decision:
        """Begin the first generation with all processes of these workers. Raises TimeoutError if one
        does not come."""
        return self._agree(voice, dict.fromkeys(self._processes_of(workers)), 0)

    def join(self, voice: Voice) -> Decision:
        """Ask to be a member, and wait until a generation begins with this process. Raises
        TimeoutError."""
        number = self._store.add("joiners", 1)
        self._store.set(f"joiner/{number}", _encode(Joiner(self._process, voice)))
        deadline = time.monotonic() + self._patience
        while True:
            self.number += 1
            while not self._store.check([f"decision/{self.number}"]):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no generation began with {self._process} in {self._patience:g} s; expected "
                                       "the others to commit: is their loop running?")
                time.sleep(POLL_SECONDS)
            decision = self._read_decision()
            if decision.voices.get(self._process) == voice:
                return decision

    def go_on(self, voice: Voice, before: Decision) -> Decision:
        """Begin the next generation with those members of the one before that live, and with those
        that ask. Raises LeftOutError."""
        self.end(self.number)
        return self._agree(voice, {process: voice.address for process, voice in before.voices.items()}, before.joiners)

    def _agree(self, voice: Voice, addresses: Mapping[str, str | None], joiners: int) -> Decision:
        self.number += 1
        self._store.set(f"voice/{self.number}/{self._process}", _encode(voice))
        deadline, spoken, probe = time.monotonic() + self._patience, {self._process}, 0.0
        while not self._store.check([f"decision/{self.number}"]):
            spoken |= {other for other in addresses.keys() - spoken
                       if self._store.check([f"voice/{self.number}/{other}"])}
            missing = addresses.keys() - spoken
            if time.monotonic() > deadline and self.number == 1:
                raise TimeoutError(f"{', '.join(sorted(missing))} did not start in {self._patience:g} s; expected all "
                                   "processes, or routes without these workers")
            if missing and time.monotonic() > probe:
                missing = {other for other in missing if not _is_gone(addresses[other])}
                probe = time.monotonic() + PROBE_SECONDS
            if not missing or time.monotonic() > deadline:
                self._propose(spoken, joiners)
            else:
                time.sleep(POLL_SECONDS)
        decision = self._read_decision()
        if decision.voices.get(self._process) != voice:
            raise LeftOutError(f"the others go on without {self._process}, which was silent for too long or has lost "
                               "a rank; end this process, and start it again to return")
        return decision

    def _propose(self, spoken: set[str], joiners: int) -> None:
        """Propose all that have spoken, and those that have asked, as far as their workers are whole."""
        voices = {other: msgspec.json.decode(self._store.get(f"voice/{self.number}/{other}"), type=Voice)
                  for other in spoken}
        count = self.count_joiners()
        for number in range(joiners + 1, count + 1):
            if self._store.check([f"joiner/{number}"]):
                asking = msgspec.json.decode(self._store.get(f"joiner/{number}"), type=Joiner)
                if not is_dead(asking.voice.address):
                    voices.setdefault(asking.process, asking.voice)
            else:  # it has counted itself, and not spoken yet
                count = number - 1
                break
        workers = sorted({worker_of(process) for process in voices})
        whole = {process for worker in workers
                 if voices.keys() >= set(own := self._processes_of([worker])) for process in own}
        decision = Decision(voices={process: voices[process] for process in sorted(whole)}, joiners=count)
        self._store.compare_set(f"decision/{self.number}", "", _encode(decision))

    def _read_decision(self) -> Decision:
        return msgspec.json.decode(self._store.get(f"decision/{self.number}"), type=Decision)

    def _processes_of(self, workers: Sequence[Worker]) -> list[str]:
        return [f"{worker}:{rank}" for worker in workers for rank in range(self._ranks)]


def _is_gone(address: str | None) -> bool:
    return address is not None and is_dead(address)


def _encode(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
