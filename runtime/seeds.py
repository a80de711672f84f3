"""Draw random numbers that depend on their use, not on the worker or the time."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class GeneratorLock:
    """Lock for torch's default generators, which belong to the process and not to a thread.

    A thread holds the lock while it seeds the generators or may seed them, and while it changes
    torch's default dtype, which also belongs to the process. The holder may enter again. A thread
    that hangs in a call and is abandoned (`runtime.replay.stuck_calls`) can lose the lock; it then
    leaves the context without changing anything.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._thread: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._condition:
            self._condition.wait_for(lambda: self._thread in (None, me))
            self._thread = me
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        # A thread that has lost the lock must not release that of another thread.
        with self._condition:
            if self.is_owned:
                self._depth -= 1
                if self._depth == 0:
                    self.release_from(threading.get_ident())

    @property
    def is_owned(self) -> bool:
        """True if the calling thread holds the lock and has not lost it."""
        return self._thread == threading.get_ident()

    def release_from(self, thread: int) -> None:
        """Release the lock for a thread, by its identifier, if that thread holds it."""
        with self._condition:
            if self._thread == thread:
                self._thread, self._depth = None, 0
                self._condition.notify_all()


GENERATOR_LOCK = GeneratorLock()
"""The one `GeneratorLock` of this process."""


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2^63) computed from all parts, alike on every machine."""
    # Types are hashed, too, so that 1 and "1" give different seeds.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's generators of CPU and `device` within the context; then restore their states.

    Meanwhile, other threads wait to seed them (`restoring_generators`).
    """
    with restoring_generators(device) as seed_them:
        seed_them(seed)
        yield


@contextmanager
def restoring_generators(device: torch.device | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch's generators of CPU and `device`.

    It takes the seed, and may be called any number of times. The context holds `GENERATOR_LOCK`.
    When it ends, the generators get back the states that they had before, unless another thread may
    be using them by then.
    """
    # Saving and restoring the states takes longer than seeding, so callers seed often within one.
    generators = _default_generators(device)

    def seed_them(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    with GENERATOR_LOCK:
        states = [generator.get_state() for generator in generators]
        try:
            yield seed_them
        finally:
            # After a loss of the lock, another thread may be using the generators.
            if GENERATOR_LOCK.is_owned:
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)


def get_generator_states(device: torch.device | None = None) -> list[torch.Tensor]:
    """Return the states of torch's generators of CPU and `device`.

    Must be called within `restoring_generators`.
    """
    return [generator.get_state() for generator in _default_generators(device)]


@contextmanager
def with_generator_states(
    states: Sequence[torch.Tensor], device: torch.device | None = None
) -> Iterator[None]:
    """Set torch's generators to states within the context, as `restoring_generators` does.

    The `states` are those of `get_generator_states` for the same `device`.
    """
    with restoring_generators(device):
        for generator, state in zip(_default_generators(device), states, strict=True):
            generator.set_state(state)
        yield


def _default_generators(device: torch.device | None) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before it there are no generators
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
