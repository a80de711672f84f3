"""Random numbers that depend on what they are for, not on which worker draws them or when."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

GENERATORS = threading.RLock()
"""Held while torch's default generators, which belong to the process, are seeded or may be."""


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
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before it there are no generators
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])

    def seed_them(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    with GENERATORS:
        states = [generator.get_state() for generator in generators]
        try:
            yield seed_them
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
