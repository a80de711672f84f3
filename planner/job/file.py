"""The job file: TOML to a checked `Job`, in the user's units (seconds, any one unit of memory).

Whatever is wrong is refused in one line that names the file, the key, the value and what was expected.
"""

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from schedules.codec import MAX_MICROBATCHES, MAX_WORKERS
from schedules.files import read_at_most
from schedules.schedule import Worker

MAX_JOB_BYTES = 2**20
MAX_NUMBER = 1e18
_T = TypeVar("_T")


class JobError(ValueError):
    """A job that cannot be used. The message is one line."""


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: one value per virtual stage, `transfer` one hop between two workers, `slow` factors of slow workers."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    optimizer: tuple[float, ...]
    all_reduce: tuple[float, ...]
    transfer: float
    slow: tuple[tuple[Worker, float], ...] = ()


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Any one unit: `capacity` one per worker column, the others one per virtual stage."""

    capacity: tuple[float, ...]
    activation: tuple[float, ...]
    weight_stash: tuple[float, ...]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training job: pipelines x stages of workers, its times and its memory."""

    name: str
    pipelines: int
    stages: int
    """Workers a pipeline (columns)."""
    microbatches: tuple[int, ...]
    """Per iteration, one number a pipeline."""
    time: StageTimes
    memory: StageMemory | None = None
    columns: tuple[int, ...]
    """The worker column of each virtual stage."""
    chains: int = 1
    """Runs of equal length that the virtual stages fall into; each micro-batch visits one (see `Grid`)."""
    layers: tuple[int, ...] | None = None
    """Model layers of each virtual stage, where the job says so."""
    model: Mapping[str, Any] = {}
    """The `[model]` table as it stands; the runtime reads it."""
    training: Mapping[str, Any] = {}
    """The `[training]` table as it stands; the runtime reads it."""

    @property
    def depth(self) -> int:
        """Virtual stages that a micro-batch visits: those of one chain."""
        return len(self.columns) // self.chains


def read_job(path: Path) -> Job:
    """Read a job file. Raises JobError."""
    return parse_job(read_job_text(path), str(path))


def read_job_text(path: Path) -> str:
    """The text of a job file, to be parsed. Raises JobError."""
    try:
        return read_at_most(path, MAX_JOB_BYTES, JobError, "; a job file is a page of TOML").decode()
    except UnicodeDecodeError:
        raise JobError(f"{path}: not UTF-8 text; a job file is TOML") from None


def parse_job(text: str, source: str = "job") -> Job:
    """Read a job from TOML text; `source` names it in errors. Raises JobError."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise JobError(f"{source}: not readable as TOML: {error}") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise JobError(f"{source}: not readable as TOML: {error}") from None
    try:
        return _job(_Table("", table))
    except JobError as error:
        raise JobError(f"{source}: {error}") from None


class _Table:
    """One TOML table, read key by key; what is left over at the end is unknown."""

    def __init__(self, name: str, values: object) -> None:
        if not isinstance(values, dict):
            raise JobError(f"{name} is {_show(values)}; expected a table")
        self._name = name
        self._left = dict(values)
        self._known: list[str] = []

    def path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def take(self, key: str, default: Any = None) -> Any:
        self._known.append(key)
        return self._left.pop(key, default)

    def table(self, key: str) -> "_Table":
        return _Table(self.path(key), self.take(key, {}))

    def has(self, key: str) -> bool:
        return key in self._left

    def number(self, key: str, default: float | None = None, *, low: float = 0.0) -> float:
        return _number(self.path(key), self.take(key, default), low)

    def count(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        return _count(self.path(key), self.take(key, default), low, high)

    def counts(self, key: str, length: int, per: str, *, low: int, high: int) -> tuple[int, ...]:
        path = self.path(key)
        return _spread(path, self.take(key), length, per, lambda name, value: _count(name, value, low, high))

    def numbers(self, key: str, length: int, per: str, default: float | None = None) -> tuple[float, ...]:
        return _spread(self.path(key), self.take(key, default), length, per, lambda name, value: _number(name, value))

    def finish(self) -> None:
        for key in self._left:
            near = difflib.get_close_matches(key, self._known, 1)
            hint = f"did you mean {self.path(near[0])!r}?" if near else f"known: {', '.join(sorted(self._known))}"
            raise JobError(f"unknown key {self.path(key)!r}; {hint}")


def _job(table: _Table) -> Job:
    name = table.take("name", "job")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 200:
        raise JobError(f"name is {_show(name)}; expected a text of 1 to 200 printable characters")
    pipelines = table.count("pipelines", high=MAX_WORKERS)
    stages = table.count("stages", high=MAX_WORKERS // pipelines)
    microbatches = table.counts("microbatches", pipelines, "pipeline", low=1, high=MAX_MICROBATCHES)
    placement = table.table("placement")
    columns, chains = _columns(placement, stages)
    # Copies of a stage are alike, so lists in the file have one value for all of them.
    virtual = len(columns) // chains
    layers = None
    if placement.has("layers"):
        layers = placement.counts("layers", virtual, "virtual stage", low=0, high=MAX_WORKERS) * chains
    placement.finish()
    time = _times(table.table("time"), virtual, chains, pipelines, stages)
    memory = _memory(table.table("memory"), virtual, chains, stages) if table.has("memory") else None
    model, training = table.take("model", {}), table.take("training", {})
    for key, value in (("model", model), ("training", training)):
        if not isinstance(value, dict):
            raise JobError(f"{key} is {_show(value)}; expected a table")
    table.finish()
    return Job(name=name, pipelines=pipelines, stages=stages, microbatches=microbatches, time=time, memory=memory,
               columns=columns, chains=chains, layers=layers, model=model, training=training)


_ORDERED: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "linear": lambda stages, chunks: tuple(index // chunks for index in range(chunks * stages)),
    "interleaved": lambda stages, chunks: tuple(index % stages for index in range(chunks * stages)),
    "v": lambda stages, chunks: tuple(index % stages if index // stages % 2 == 0 else stages - 1 - index % stages
                                      for index in range(chunks * stages)),
}
"""The column of each virtual stage, given stages and chunks."""
ORDERS = (*_ORDERED, "bidirectional")


def placement(job: Job) -> dict[str, Any]:
    """The `[placement]` table that gives a job's columns, chains and layers; empty where the defaults do."""
    table: dict[str, Any] = {}
    chunks = job.depth // job.stages
    if chunks > 1:
        table["chunks"] = chunks
    if job.chains > 1:
        table["order"] = "bidirectional"
    elif job.columns != _ORDERED["linear"](job.stages, chunks):
        names = (name for name, order in _ORDERED.items() if order(job.stages, chunks) == job.columns)
        table["order"] = next(names, list(job.columns))
    if job.layers is not None:
        table["layers"] = list(job.layers[:job.depth])
    return table


def _columns(table: _Table, stages: int) -> tuple[tuple[int, ...], int]:
    """The column of each virtual stage, and the number of chains."""
    given = table.has("chunks")
    chunks = table.count("chunks", 1, high=64)
    order = table.take("order", "linear")
    if isinstance(order, list):
        columns = tuple(_count("placement.order", column, 0, stages - 1) for column in order)
        if sorted(columns) != sorted(list(range(stages)) * chunks):
            raise JobError(f"placement.order is {_show(order)}; expected each of the {stages} columns {chunks} times "
                           "(chunks)")
        return columns, 1
    if order == "bidirectional":
        if given or stages % 2:
            clash = f"chunks = {chunks}" if given else f"{stages} stages"
            raise JobError(f"placement.order is 'bidirectional' with {clash}; expected an even number of stages, and "
                           "no chunks: a worker holds one stage of each direction")
        return (*range(stages), *reversed(range(stages))), 2
    if isinstance(order, str) and order in _ORDERED:
        return _ORDERED[order](stages, chunks), 1
    raise JobError(f"placement.order is {_show(order)}; expected one of {', '.join(ORDERS)}, or a list of columns")


def _times(table: _Table, virtual: int, chains: int, pipelines: int, stages: int) -> StageTimes:
    per = "virtual stage" if virtual != stages else "stage"
    times = StageTimes(
        forward=table.numbers("forward", virtual, per) * chains,
        backward_input=table.numbers("backward_input", virtual, per) * chains,
        backward_weight=table.numbers("backward_weight", virtual, per) * chains,
        optimizer=table.numbers("optimizer", virtual, per, 0.0) * chains,
        all_reduce=table.numbers("all_reduce", virtual, per, 0.0) * chains,
        transfer=table.number("transfer", 0.0),
        slow=_slow(table.take("slow", {}), pipelines, stages))
    table.finish()
    if not any(times.forward + times.backward_input + times.backward_weight):
        raise JobError("time: every op takes 0 seconds; expected some stage whose forward or backward takes longer")
    return times


def _slow(table: object, pipelines: int, stages: int) -> tuple[tuple[Worker, float], ...]:
    if not isinstance(table, dict):
        raise JobError(f'time.slow is {_show(table)}; expected a table of workers and factors, such as {{"1.2" = 1.5}}')
    slow = []
    for name, factor in table.items():
        try:
            worker = Worker.parse(name)
        except ValueError as error:
            raise JobError(f"time.slow: {error}") from None
        require_in_grid("time.slow", worker, pipelines, stages)
        value = _number(f"time.slow.{name}", factor, 0.001)
        if value > 1000:
            raise JobError(f"time.slow.{name} is {_show(factor)}; expected a factor of at most 1000")
        slow.append((worker, value))
    return tuple(sorted(slow))


def _memory(table: _Table, virtual: int, chains: int, stages: int) -> StageMemory:
    per = "virtual stage" if virtual != stages else "stage"
    memory = StageMemory(capacity=table.numbers("capacity", stages, "stage"),
                         activation=table.numbers("activation", virtual, per, 1.0) * chains,
                         weight_stash=table.numbers("weight_stash", virtual, per, 0.0) * chains)
    table.finish()
    return memory


def require_in_grid(name: str, worker: Worker, pipelines: int, stages: int) -> None:
    """Raise JobError unless the job has this worker."""
    if worker.pipeline >= pipelines or worker.column >= stages:
        raise JobError(f"{name}: the job has no worker {worker}; expected pipeline 0 to {pipelines - 1} and stage 0 to "
                       f"{stages - 1}")


def _spread(path: str, value: object, length: int, per: str, read: Callable[[str, object], _T]) -> tuple[_T, ...]:
    """One value for all, or a list with one a stage."""
    if not isinstance(value, list):
        return (read(path, value),) * length
    if len(value) != length:
        raise JobError(f"{path} has {len(value)} values; expected {length}, one a {per}, or a single number")
    return tuple(read(f"{path}[{index}]", item) for index, item in enumerate(value))


def _number(path: str, value: object, low: float = 0.0) -> float:
    if value is None:
        raise JobError(f"key {path!r} is missing; expected a number of at least {low:g}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < low:
        raise JobError(f"{path} is {_show(value)}; expected a finite number of at least {low:g}")
    if value > MAX_NUMBER:
        raise JobError(f"{path} is {_show(value)}; expected a number of at most {MAX_NUMBER:g}")
    return float(value)


def _count(path: str, value: object, low: int, high: int) -> int:
    if value is None:
        raise JobError(f"key {path!r} is missing; expected a whole number, {low} to {high}")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise JobError(f"{path} is {_show(value)}; expected a whole number, {low} to {high}")
    return value


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def require_known(failed: Sequence[Worker], job: Job) -> None:
    """Raise JobError unless the job has each of these workers."""
    for worker in failed:
        require_in_grid("--failed", worker, job.pipelines, job.stages)
