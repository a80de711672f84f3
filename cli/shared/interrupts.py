"""Ctrl-C during imports and long work: noted, and acted upon at a safe place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.planner.budget import interruptible


@contextmanager
def importing() -> Iterator[None]:
    """For imports. Ctrl-C is acted upon after them: some modules swallow it, and are then half imported."""
    with interruptible() as interrupted:
        yield
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def checking_interrupts() -> Iterator[Callable[[], None]]:
    """For long work: gives a function that raises KeyboardInterrupt after a Ctrl-C. A second one raises it at once."""
    with interruptible() as interrupted:
        def check_interrupt() -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt

        yield check_interrupt
