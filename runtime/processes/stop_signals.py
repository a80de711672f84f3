"""What schedulers send before they take a machine, SIGTERM, SIGUSR1 or SIGUSR2, and Ctrl-C: the first asks for a good
end, the next one ends at once."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""What a job asks SLURM to send before its time is over, or it is preempted (`sbatch --signal`), to all processes or to
some. Workers need not know: their launchers end the run."""
FROM_SCHEDULERS = (signal.SIGTERM, *WARNINGS)
SIGNALS = (signal.SIGINT, *FROM_SCHEDULERS)
REPEATED_SECONDS: dict[int, float] = {signal.SIGINT: 0.5}
OTHERS_REPEATED_SECONDS = 5.0
"""So soon after another, a signal is the same one: schedulers send SIGTERM to all processes, and torchrun passes it on
to its own; a terminal and torchrun do so with Ctrl-C; Linux tells of a parent's death once for each of its threads."""
GRACE_SECONDS = 20.0
"""How long a run may take to end well: torchrun, SLURM and Kubernetes kill after 30 s unless told otherwise."""


class RunStopped(KeyboardInterrupt):
    """A run, or one node's part in it, that was told to end. The message is one line."""

    def __init__(self, number: signal.Signals, text: str) -> None:
        super().__init__(text)
        self.number = number
        """The signal."""


class StopSignals:
    """What the signals do while a run takes place: they raise RunStopped, or ask for a good end first."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that asked for the end."""
        self._ask: Callable[[], object] | None = None
        self._handled: float | None = None

    @contextmanager
    def asking(self, ask: Callable[[], object]) -> Iterator[None]:
        """In this block the first signal calls a function, in the main thread and at any moment, and raises nothing."""
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def handle(self, number: int, _: object) -> None:
        """For signal.signal."""
        now = time.monotonic()
        if self._handled is not None and now - self._handled < REPEATED_SECONDS.get(number, OTHERS_REPEATED_SECONDS):
            return
        self._handled = now
        if self._ask is None or self.received is not None:
            raise RunStopped(signal.Signals(number), f"interrupted by {signal.Signals(number).name}")
        self.received = signal.Signals(number)
        self._ask()


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Take the signals over until the end of the block. Only the main thread of a program gets any."""
    stop = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
