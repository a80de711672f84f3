"""Handle the signals that schedulers send before they take a machine, and Ctrl-C.

The first signal asks for an orderly end; the next one ends the run at once.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that SLURM sends before it ends a job (`sbatch --signal`), to any process."""
SCHEDULER_SIGNALS = (signal.SIGTERM, *WARNING_SIGNALS)
SIGNALS = (signal.SIGINT, *SCHEDULER_SIGNALS)
REPEAT_SECONDS: dict[int, float] = {signal.SIGINT: 0.5}
DEFAULT_REPEAT_SECONDS = 5.0
"""Interval within which a second signal counts as a repetition of the first."""
# Schedulers send SIGTERM to all processes, and torchrun passes it on to its own; a terminal and
# torchrun do so with Ctrl-C; Linux reports a parent's death once for each of the parent's threads.
GRACE_SECONDS = 20.0
"""Time for an orderly end: torchrun, SLURM and Kubernetes kill after 30 s by default."""


class RunStopped(KeyboardInterrupt):
    """Error, in one line, for a run (or a node's part) that a signal stopped."""

    def __init__(self, number: signal.Signals, text: str) -> None:
        super().__init__(text)
        self.number = number
        """Signal that stopped the run."""


class StopSignals:
    """Handler of SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGUSR2, all of the same effect.

    Within `call_at_first_signal`, the first signal calls a function that asks for an orderly end,
    and the next one raises RunStopped. Elsewhere, the first signal raises it. Signals within 0.5 s
    (Ctrl-C) or 5 s (the others) after one that was handled count as its repetition, and are
    ignored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """Signal that asked for the orderly end."""
        self._ask: Callable[[], object] | None = None
        self._handled: float | None = None

    @contextmanager
    def call_at_first_signal(self, ask: Callable[[], object]) -> Iterator[None]:
        """Call `ask` in the main thread at the first signal, instead of raising RunStopped."""
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def handle_signal(self, number: int, _: object) -> None:
        """Handle signal `number` as the class describes; a function for `signal.signal`."""
        now = time.monotonic()
        if self._handled is not None and now - self._handled < REPEAT_SECONDS.get(
            number, DEFAULT_REPEAT_SECONDS
        ):
            return
        self._handled = now
        if self._ask is None or self.received is not None:
            raise RunStopped(
                signal.Signals(number), f"interrupted by {signal.Signals(number).name}"
            )
        self.received = signal.Signals(number)
        self._ask()


@contextmanager
def handle_stop_signals() -> Iterator[StopSignals]:
    """Yield a handler of signals, active in the context and in the main thread only."""
    stop = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle_signal) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
