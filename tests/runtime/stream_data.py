"""Data that are read in order, as from a loader.

Each sample is the one before, and something more.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.runtime.api import RunConfig


class Stream:
    """Tokens that depend on all tokens before.

    Each process writes down the iterations that it has read.
    """

    digest = "stream"

    def __init__(self, config: RunConfig) -> None:
        self.batch, self.context = config.training.batch, config.model.context
        self.reads = (
            Path(config.training.options["reads"]) if "reads" in config.training.options else None
        )
        self.next, self.value, self.states = 0, 1, dict[int, int]()

    def samples(self, iteration: int, count: int) -> list[tuple[Tensor, Tensor]]:
        if iteration < self.next:
            self.load_state_dict(
                iteration if iteration in self.states else 0,
                {"value": self.states.get(iteration, 1)},
            )
        samples = list[tuple[Tensor, Tensor]]()
        while self.next <= iteration:
            self.states[self.next] = self.value
            samples = list(self._read(count))
            if self.reads is not None:
                with self.reads.open("a") as file:
                    file.write(f"{os.getpid()} {self.next}\n")
            self.next += 1
        return samples

    def state_dict(self, iteration: int) -> dict[str, Any] | None:
        value = self.value if iteration == self.next else self.states.get(iteration)
        return None if value is None else {"value": value}

    def load_state_dict(self, iteration: int, state: dict[str, Any]) -> None:
        self.next, self.value = iteration, state["value"]

    def _read(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(count):
            tokens = []
            for _ in range(self.batch * (self.context + 1)):
                self.value = self.value * 48271 % (2**31 - 1)
                tokens.append(self.value % 256)
            rows = torch.tensor(tokens).view(self.batch, self.context + 1)
            yield rows[:, :-1], rows[:, 1:]


def reads_in(path: Path) -> dict[int, list[int]]:
    """The iterations that each process has read, in order."""
    reads = dict[int, list[int]]()
    for line in path.read_text().splitlines():
        pid, iteration = map(int, line.split())
        reads.setdefault(pid, []).append(iteration)
    return reads
