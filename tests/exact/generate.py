"""Draw random tiny jobs: every scope, placement and corner, one job for one seed."""

from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

from tests.exact.question import Worker

SCOPES = (
    "own micro-batches",
    "whole stages",
    "layers in place",
    "roles",
    "any layers",
    "any placement",
)
LARGEST = 30
"""Largest number of compute ops of a drawn job, which is still solved in seconds."""
WHOLE = (0, 1, 1, 1, 2, 3)
ODD = (0, 0.1, 0.34, 0.87, 1, 1.7, 0.333333333333, 2.000001)
"""Times that have no coarse common divisor."""
SPEEDS = (0.5, 1.001, 1.337, 2, 3)


class Case(NamedTuple):
    """Tiny job, what is down, and what is asked."""

    scope: str
    job: Mapping[str, Any]
    failed: tuple[Worker, ...] = ()
    backward: str = "split"
    optimizer: str = "staggered"

    @property
    def text(self) -> str:
        """Job file."""
        lines = [
            f"{key} = {toml(value)}"
            for key, value in self.job.items()
            if not isinstance(value, dict)
        ]
        for table, values in self.job.items():
            if isinstance(values, dict):
                lines += [
                    f"[{table}]",
                    *(f"{key} = {toml(value)}" for key, value in values.items()),
                ]
        return "\n".join(lines) + "\n"

    @property
    def options(self) -> list[str]:
        """Options of `slipstream plan` that ask the question."""
        asked = {
            "roles": ["--normalise"],
            "any layers": ["--layers", "move", "--from-checkpoint"],
            "any placement": ["--placement", "any"],
        }
        down = [
            option
            for pipeline, column in self.failed
            for option in ("--failed", f"{pipeline}.{column}")
        ]
        return [
            *asked.get(self.scope, []),
            *down,
            "--backward",
            self.backward,
            "--optimizer",
            self.optimizer,
        ]

    @property
    def command(self) -> str:
        """Command that plans it, for the file `job.toml`."""
        return " ".join(["slipstream plan job.toml", *self.options])


def toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {toml(entry)}' for key, entry in value.items()) + "}"
    if isinstance(value, bool | str):
        return repr(value).lower() if isinstance(value, bool) else f'"{value}"'
    return repr(list(value) if isinstance(value, tuple) else value)


def draw_case(seed: int, scope: str) -> Case:
    """Return the job of a seed for a scope, small enough for the reference."""
    random = Random(f"{scope} {seed}")
    while True:
        case = _Draw(random, scope).case()
        batches = case.job["microbatches"]
        total = sum(batches) if isinstance(batches, list) else batches * case.job["pipelines"]
        parts = sum(case.job.get("placement", {}).get("layers", ())) if scope in SCOPES[2:] else 0
        if total * max(parts, _depth(case.job)) * 3 <= (
            LARGEST if scope != "any placement" else LARGEST // 2
        ):
            return case


def _depth(job: Mapping[str, Any]) -> int:
    placement = job.get("placement", {})
    return int(job["stages"] * placement.get("chunks", 1))


class _Draw:
    """Draws of one job."""

    def __init__(self, random: Random, scope: str) -> None:
        self.random, self.scope = random, scope
        self.pipelines = random.choice(
            (1, 1, 2) if scope.startswith(("own", "any")) else (1, 2, 2, 3)
        )
        self.stages = random.choice((1, 2, 2, 3))
        self.numbers = WHOLE if random.random() < 0.75 else ODD

    def case(self) -> Case:
        """Return the job with all that is asked of it."""
        chances = self._chance
        placement, depth = self._placement()
        layers = sum(placement.get("layers", [1] * depth))
        job: dict[str, Any] = {
            "pipelines": self.pipelines,
            "stages": self.stages,
            "microbatches": self._microbatches(),
        }
        if placement:
            job["placement"] = placement
        job["time"] = self._times(depth)
        if chances(0.5):
            job["memory"] = self._memory(depth)
        if "layers" in placement and chances(0.5):
            keys = (
                "forward",
                "backward_input",
                "backward_weight",
                "optimizer",
                "all_reduce",
                "activation",
                "weights",
            )
            job["layers"] = {
                key: self._values((0, 1, 1, 2, 3), layers) for key in keys if chances(0.5)
            }
        if self.scope != "any placement" and chances(0.2):
            job["network"] = {"overlap": True}
        failed = self._failures()
        backward = "fused" if chances(0.2) else "split"
        optimizer = "synchronous" if chances(0.2) else "staggered"
        return Case(self.scope, job, failed, backward, optimizer)

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _values(self, numbers: tuple[float, ...], length: int) -> list[float]:
        """Return one number for all, or each its own."""
        if self._chance(0.5):
            return [self.random.choice(numbers)] * length
        return [self.random.choice(numbers) for _ in range(length)]

    def _microbatches(self) -> int | list[int]:
        largest = self.random.choice((1, 2, 3, 4))
        if self.scope in ("own micro-batches", "any placement") or self._chance(0.5):
            return largest
        return [self.random.randint(1, largest) for _ in range(self.pipelines)]

    def _placement(self) -> tuple[dict[str, Any], int]:
        """Return the table `[placement]` and the number of stages that a micro-batch passes."""
        random = self.random
        order = random.choice(
            (
                "linear",
                "linear",
                "linear",
                "interleaved",
                "v",
                "list",
                *([] if self.stages % 2 else ["bidirectional"] * 2),
            )
        )
        chunks = random.choice((1, 2)) if order in ("interleaved", "v", "list") else 1
        depth = self.stages * chunks
        placement: dict[str, Any] = {} if order == "linear" else {"order": order}
        if order == "list":
            columns = list(range(self.stages)) * chunks
            random.shuffle(columns)
            placement["order"] = columns
        if chunks > 1:
            placement["chunks"] = chunks
        cut = self.scope in ("layers in place", "any placement") or (
            self.scope in ("roles", "any layers") and self._chance(0.5)
        )
        if cut:
            placement["layers"] = [random.choice((1, 1, 2)) for _ in range(depth)]
        return placement, depth

    def _times(self, depth: int) -> dict[str, Any]:
        forward = self._values(self.numbers, depth)
        times: dict[str, Any] = {"forward": forward if any(forward) else [1] * depth}
        times |= {
            key: self._values(self.numbers, depth) for key in ("backward_input", "backward_weight")
        }
        inputs = times["backward_input"]
        if self.scope == "any placement" and not inputs[0] and any(inputs):
            inputs[0] = max(inputs)  # else the layers that come first have no I, wherever they are
        for key in ("optimizer", "all_reduce"):
            if self._chance(0.5):
                times[key] = self._values(self.numbers, depth)
        if self._chance(0.5):
            times["transfer"] = self.random.choice(self.numbers)
        if self.scope not in ("own micro-batches", "any placement") and self._chance(0.5):
            times["slow"] = self._by_worker(SPEEDS)
        return times

    def _by_worker(self, numbers: tuple[float, ...]) -> dict[str, float]:
        workers = [
            f"{pipeline}.{column}"
            for pipeline in range(self.pipelines)
            for column in range(self.stages)
        ]
        chosen = self.random.sample(workers, min(len(workers), self.random.choice((1, 1, 2))))
        return {worker: self.random.choice(numbers) for worker in chosen}

    def _memory(self, depth: int) -> dict[str, Any]:
        sizes = (0.94, 1, 1, 2) if self.numbers is WHOLE else (0.333333333333, 0.94, 1)
        activation, stash = self._values(sizes, depth), self._values((0, 0, 0.5, *sizes), depth)
        least = max(*activation, *stash) * (depth // self.stages)
        rooms = (least, least, 1.5 * least, 2 * least + 0.1)
        memory: dict[str, Any] = {
            "capacity": self._values(rooms, self.stages),
            "activation": activation,
            "weight_stash": stash,
        }
        if self.scope != "own micro-batches" and self._chance(0.4):
            memory["weights"] = self._values((0, 0.5, 1, 2), depth)
        if self.scope not in ("own micro-batches", "any placement") and self._chance(0.3):
            memory["capacity_of"] = self._by_worker((*rooms, 0, least / 2))
        return memory

    def _failures(self) -> tuple[Worker, ...]:
        """Return some workers, seldom all of a column."""
        if self.scope in ("own micro-batches", "any placement") or (
            self.scope == "whole stages" and self._chance(0.3)
        ):
            return ()
        down: set[Worker] = set()
        for _ in range(self.random.choice((0, 1, 1, 2) if self.scope != "roles" else (1, 1, 2))):
            down.add((self.random.randrange(self.pipelines), self.random.randrange(self.stages)))
        alive = self.pipelines * self.stages - len(down)
        return tuple(sorted(down)) if alive else ()
