"""Folders of runs that nobody has made, as the coordinator's event log would leave them."""

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.effects import compute_schedule_digest
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.events import (
    CheckpointWritten,
    Failed,
    FetchBegun,
    FetchProgressed,
    HandedOver,
    Iteration,
    Joined,
    OrderGiven,
    Resumed,
    RunFinished,
    SettlingChosen,
    Started,
    encode,
)
from slipstream.schedules import codec
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

DEAD = Worker(1, 1)
JOB = grid(2, 2, 4)
SAMPLES = 32


class Writer:
    """Writes a run's folder, with a clock of its own."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self.folder, self.begin, self.now, self.iteration, self.orders = folder, 1e9, 0.0, 0, 0
        self.events, self.losses = [], []
        whole, broken = (codec.encode(schedule_for(JOB, failed)) for failed in ([], [str(DEAD)]))
        with RunLog(folder) as log:
            log.store_schedule(whole)
            log.store_schedule(broken)
        self.whole, self.broken = compute_schedule_digest(whole), compute_schedule_digest(broken)

    def start(self, workers=4):
        """A start, an hour after the last one ended."""
        self.begin, self.now = self.begin + self.now + 3600, 0.0
        self.tell(
            Started(
                job="example <b>",
                workers=workers,
                iterations=1000,
                samples=SAMPLES,
                fault_free_period=1.0,
            )
        )

    def tell(self, event):
        self.events.append(
            replace(
                event,
                time=round(self.begin + self.now, 3),
                seconds=round(self.now, 3),
                iteration=self.iteration,
            )
        )

    def order(self, phase, live, period, schedule):
        self.orders += 1
        self.tell(
            OrderGiven(
                order=self.orders, schedule=schedule, live=live, planned_period=period, phase=phase
            )
        )

    def commit(self, *seconds, loss=2.0):
        for second in seconds:
            self.now += second
            self.losses.append(
                Iteration(
                    iteration=self.iteration,
                    loss=loss,
                    period=0.9 * second,
                    time=round(self.begin + self.now, 3),
                )
            )
            self.iteration += 1

    def close(self):
        for name, lines in (("events.jsonl", self.events), ("losses.jsonl", self.losses)):
            (self.folder / name).write_bytes(b"".join(encode(line) + b"\n" for line in lines))
        return self.folder


def settled_run(folder):
    """A run that settles after a death, and is then killed.

    A worker dies, layers move, it comes back; then the run is started again, and is killed.
    """
    run = Writer(folder)
    run.start()
    run.now = 5.0
    run.order("whole", 4, 1.0, run.whole)
    run.commit(3, *[2] * 10)
    run.tell(Failed(worker=DEAD, reason="worker 1.1 was killed by <SIGKILL>"))
    run.order("at once", 3, 2.0, run.broken)
    run.now += 0.25
    run.tell(Resumed(pause=0.25, live=3))
    run.commit(*[4] * 4)
    run.tell(
        SettlingChosen(
            settles=True,
            moves_bytes=10**8,
            move_seconds=8,
            present_period=2.0,
            settled_period=1.25,
            pays_after=9,
            time_to_failure=None,
        )
    )
    run.tell(FetchBegun(fetch=1, purpose="settle", layers=3, workers=(Worker(0, 1), Worker(1, 0))))
    run.commit(4)
    run.tell(FetchProgressed(fetch=1, share=0.5))
    run.commit(4)
    run.tell(HandedOver(fetch=1, order=3))
    run.order("settled", 3, 1.25, run.broken)
    run.commit(*[2.5] * 8)
    run.tell(CheckpointWritten(checkpoint=run.iteration, took=1.0))
    run.tell(RunFinished(error="node 0 was asked to end the run"))
    run.start()
    run.now = 2.0
    run.order("whole", 4, 1.0, run.whole)
    run.tell(Joined(worker=DEAD))
    run.commit(*[2] * 6)
    return run.close()


def long_run(folder, iterations, every):
    """A worker dies and comes back again and again."""
    run = Writer(folder)
    run.start()
    while run.iteration < iterations:
        run.order("whole", 4, 1.0, run.whole)
        run.commit(*[1 + index % 7 / 100 for index in range(every // 2)])
        run.tell(Failed(worker=DEAD, reason="worker 1.1 is gone"))
        run.order("at once", 3, 2.0, run.broken)
        run.commit(*[2 + index % 7 / 100 for index in range(every // 2)])
        run.tell(Joined(worker=DEAD))
    return run.close()
