"""Random numbers that depend on what they are for, not on which worker draws them or when."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class Generators:
    """torch's default generators, which belong to the process: a lock for threads that seed them, or may.

    Also for those that change torch's default dtype, which belongs to the process, too.

    A thread may enter it again. One that is stuck in a call, and that nobody waits for any more
    (`runtime.replay.stuck_calls`), can lose it to the others; it then leaves without a change.
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
        with self._condition:
            if self.mine:
                self._depth -= 1
                if self._depth == 0:
                    self.take_from(threading.get_ident())

    @property
    def mine(self) -> bool:
        """Whether this thread has them, and has not lost them."""
        return self._thread == threading.get_ident()

    def take_from(self, thread: int) -> None:
        """Others may have them now, if a thread has them."""
        with self._condition:
            if self._thread == thread:
                self._thread, self._depth = None, 0
                self._condition.notify_all()


GENERATORS = Generators()
"""Of this process."""


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) that depends on all parts and their order, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw from torch's default generators, of the CPU and of `device`, as if freshly seeded; then put them back."""
    with seeding(device) as seed_them:
        seed_them(seed)
        yield


@contextmanager
def seeding(device: torch.device | None = None) -> Iterator[Callable[[int], None]]:
    """Seed torch's default generators, of the CPU and of `device`, as often as is wanted; then put them back.

    To save and restore them takes longer than to seed them.
    """
    generators = _generators(device)

    def seed_them(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    with GENERATORS:
        states = [generator.get_state() for generator in generators]
        try:
            yield seed_them
        finally:
            if GENERATORS.mine:
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)


def generator_states(device: torch.device | None = None) -> list[torch.Tensor]:
    """Those of torch's default generators, of the CPU and of `device`; to be asked for within `seeding`."""
    return [generator.get_state() for generator in _generators(device)]


@contextmanager
def drawing_from(states: Sequence[torch.Tensor], device: torch.device | None = None) -> Iterator[None]:
    """Draw from torch's default generators as they were when these were their states; then put them back."""
    with seeding(device):
        for generator, state in zip(_generators(device), states, strict=True):
            generator.set_state(state)
        yield


def _generators(device: torch.device | None) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before it there are no generators
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
