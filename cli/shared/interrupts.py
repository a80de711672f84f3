"""Delay Ctrl-C during imports and long work until it can be handled safely."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.planner.budget import defer_interrupts


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay KeyboardInterrupt until the end of the context, because some modules swallow it while they are imported,
    and are then incomplete."""
    with defer_interrupts() as interrupted:
        yield
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def watch_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed within the context. A second Ctrl-C raises
    it at once."""
    with defer_interrupts() as interrupted:
        def check_interrupt() -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt

        yield check_interrupt
