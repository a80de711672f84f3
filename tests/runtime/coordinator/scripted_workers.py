"""Workers that only count, and fail as their world was told."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from slipstream.runtime.protocol.to_coordinator import (
    Checksum,
    FetchFailed,
    IterationReport,
    Paused,
    SampleDigest,
    StepValidated,
)
from slipstream.runtime.protocol.to_worker import EndOrder, ReportCheckpoints, StepFactor
from slipstream.runtime.replay.recorder import OpTime
from slipstream.runtime.run_identity import NO_IDENTITY, RunIdentity
from slipstream.schedules.codec import decode
from slipstream.schedules.schedule import COMPUTE_KINDS, Worker
from slipstream.schedules.timing import period_at
from tests.runtime.coordinator.counting_workers import Apart
from tests.runtime.coordinator.transcribing import RIGHT

OTHER = RIGHT + 1
"""Checksum of a wrong copy, and digest of a wrong sample."""


@dataclass
class Faults:
    """What goes wrong, as commands have said."""

    identities: dict[Worker, RunIdentity] = field(default_factory=dict)
    fetch_failures: dict[Worker, str] = field(default_factory=dict)
    """Why these cannot get the layers of a fetch."""
    slow: dict[Worker, float] = field(default_factory=dict)
    """How many times as long as usual their ops take."""
    reads: dict[Worker, tuple[int, ...]] = field(default_factory=dict)
    """Checkpoints that these can read, if not all."""
    hanging: set[Worker] = field(default_factory=set)
    """Workers that never find out which checkpoints there are."""
    damaged: set[int] = field(default_factory=set)
    """Checkpoints."""
    flipped: dict[Worker, str] = field(default_factory=dict)
    """What is wrong in the copies of these: parameters, state or digest."""
    flips_again: bool = False
    """True if it is wrong again after a return to a checkpoint."""
    overflows: dict[int, int] = field(default_factory=dict)
    """How often the losses of these iterations will not be finite."""
    misread: tuple[Worker, int] | None = None
    """Who reads another sample, and in which iteration."""
    misdealt: tuple[Worker, int] | None = None
    data_end: int | None = None
    is_deaf: bool = False
    """True if none reaches any other, and each blames itself."""
    cuts: set[tuple[Worker, Worker]] = field(default_factory=set)
    """Pairs that never reach each other, both ways."""
    unwritable: dict[Worker, Worker] = field(default_factory=dict)
    """Writers that never get their layers at the end of a run, and from whom."""


class Scripted(Apart):
    """A worker that fails as its world was told."""

    def __init__(self, worker, world) -> None:
        self.faults, self.found_damaged, self.has_doubts = world.faults, set(), False
        self.trusted_from = 0
        super().__init__(worker, world)

    def ready(self, report):
        identity = self.faults.identities.get(self.worker, NO_IDENTITY)
        return replace(super().ready(report), identity=identity)

    def hear(self) -> None:
        message = self.inbox[0]
        if isinstance(message, ReportCheckpoints) and self.worker in self.faults.hanging:
            self.inbox.popleft()
            return
        if isinstance(message, EndOrder):
            self.has_doubts = message.doubted
        super().hear()

    def fetched(self, message):
        reason = self.faults.fetch_failures.get(self.worker)
        if reason is not None:
            return FetchFailed(self.worker, message.number, reason)
        return super().fetched(message)

    def readable(self):
        """It no longer says that it can read a checkpoint found damaged."""
        readable = self.faults.reads.get(self.worker, tuple(sorted(set(self.world.checkpoints))))
        return tuple(iteration for iteration in readable if iteration not in self.found_damaged)

    def train(self, order) -> None:
        if order.restore is not None and not self.faults.flips_again:
            self.faults.flipped.pop(self.worker, None)
        self.has_doubts, self.trusted_from = False, order.trusted_from
        super().train(order)

    def begin(self) -> None:
        if self.order.restore is not None and self.order.first_iteration in self.faults.damaged:
            self.layers.clear()
            self.found_damaged.add(self.order.first_iteration)
            self.pause(f"checkpoint {self.order.first_iteration} is damaged")
            return
        unreached = [other for other in self.members if self.world.is_cut(self.worker, other)]
        if self.faults.is_deaf:
            self.pause("no interface", (self.worker,))
        elif unreached:
            self.pause(f"receiving from worker {unreached[0]} failed", (self.worker, unreached[0]))
        else:
            super().begin()

    def validated(self):
        """The factor of its last step, where gradients are clipped."""
        return StepFactor(self.reached, 1.0) if self.world.clips and self.reached >= 0 else None

    def pause(self, reason=None, named=(), data_end=None) -> None:
        before = len(self.said)
        super().pause(reason, named)
        if len(self.said) > before:
            self.said.append(
                replace(self.said.pop(), validated=self.validated(), data_end=data_end)
            )

    def known(self):
        return replace(
            super().known(),
            validated=self.validated(),
            doubted=self.has_doubts,
            trusted_from=self.trusted_from,
        )

    def step(self) -> None:
        end = self.faults.data_end
        if end is not None and self.begun == end and not self.paused and not self.lacking:
            self.pause(f"the data have no samples for iteration {end}", data_end=end)
        else:
            super().step()

    def checksums(self):
        """Of all that it holds."""
        flip = self.faults.flipped.get(self.worker)
        parameters = OTHER if flip == "parameters" else RIGHT
        state = OTHER if flip in ("parameters", "state") else RIGHT
        checksums = []
        for layer in sorted(self.layers):
            for includes_state in (False, True):
                sums = (state if includes_state else parameters,)
                checksums.append(Checksum(layer, 0, 1, includes_state, sums))
        return tuple(checksums)

    def finished(self, message):
        """If it cannot get what it is to write, it reports that instead."""
        source = self.faults.unwritable.get(self.worker)
        if source in self.world.workers:
            blamed = self.worker, source
            holding, reason = self.holding(), "fetching layers failed"
            return Paused(self.worker, message.order, holding, None, reason, blamed)
        digest = str(OTHER if self.faults.flipped.get(self.worker) == "digest" else RIGHT)
        return replace(
            super().finished(message),
            digests={f"{self.worker.column}.weight": digest},
            checksums=self.checksums(),
        )

    def report(self) -> None:
        here, is_first = (self.worker, self.reached), self.worker == self.members[0]
        if self.world.clips and is_first:
            self.world.happens(StepValidated(self.order.order, StepFactor(self.reached, 1.0)))
        schedule = decode(bytes(self.order.schedule))
        report = IterationReport(
            self.worker,
            self.order.order,
            self.reached,
            float(self.reached) if is_first else 0.0,
            period_at(schedule, self.faults.slow) / 100,
            times=self.times(schedule),
            deal=str(OTHER if self.faults.misdealt == here else RIGHT),
        )
        if is_first and self.faults.overflows.get(self.reached, 0):
            self.faults.overflows[self.reached] -= 1
            report = replace(report, loss=None)
        if self.world.compares:
            digest = str(OTHER if self.faults.misread == here else RIGHT)
            sample = SampleDigest(self.worker.pipeline, 0, digest)
            report = replace(report, checksums=self.checksums(), samples=(sample,))
        self.said.append(report)

    def times(self, schedule):
        """What its ops have taken, where speeds are measured."""
        if not self.world.rules.plans_for_speeds:
            return ()
        program = schedule.programs[schedule.seat_of[self.worker].program]
        ops = [(op.kind, op.slice) for op in program if op.kind in COMPUTE_KINDS]
        layer_seconds = self.faults.slow.get(self.worker, 1.0) / 100
        times = []
        for kind, slice_ in sorted(set(ops)):
            start, stop = schedule.layers_of(slice_)
            seconds = layer_seconds * (stop - start)
            times.append(OpTime(kind, slice_, ops.count((kind, slice_)), seconds))
        return tuple(times)
