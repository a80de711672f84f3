"""Read job files: TOML into a checked `Job`, in the user's units.

Times are in seconds, memory in any one unit. An error is one line that names the file, the key, the
value and what was expected.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import msgspec

from slipstream.planner.job.megatron import read_layout
from slipstream.planner.job.network import Network, read_network
from slipstream.planner.job.run_keys import RunKeys, read_run_keys
from slipstream.planner.job.toml import JobError as JobError
from slipstream.planner.job.toml import (
    TomlTable,
    checked_count,
    checked_number,
    job_text,
    shorten_repr,
)
from slipstream.schedules.files import read_at_most
from slipstream.schedules.schedule import MAX_MICROBATCHES, MAX_WORKERS, Worker

# --- Which workers share a node (a machine), and so fail together: `[topology]` -------------------


Nodes = tuple[tuple[Worker, ...], ...]
"""Workers of each node (machine), sorted, by the node's number. Each worker is in one node."""
_FORM = 'a list of nodes, each a list of its workers, such as [["0.0", "0.1"], ["1.0", "1.1"]]'


def read_nodes(table: TomlTable, pipelines: int, stages: int) -> Nodes:
    """Return the workers of each node, as a `[topology]` table gives them.

    Raises JobError unless the table has either `workers_per_node`, or lists of workers in `node`
    with each worker once.
    """
    size, listed = table.take_value("workers_per_node"), table.take_value("node")
    table.refuse_unknown_keys()
    if (size is None) == (listed is None):
        number = "neither" if size is None else "both"
        raise JobError(
            f"topology has {number} of the keys 'workers_per_node' and 'node'; expected one of them"
        )
    if size is not None:
        size = checked_count("topology.workers_per_node", size, 1, pipelines * stages)
        return _nodes_of_size(size, pipelines, stages)
    if not isinstance(listed, list):
        raise JobError(f"topology.node is {shorten_repr(listed)}; expected {_FORM}")
    return _read_node_list(listed, pipelines, stages)


def topology_table(nodes: Nodes, pipelines: int, stages: int) -> dict[str, Any]:
    """Return the contents of the `[topology]` table for `nodes`; empty if there are none."""
    if not nodes:
        return {}
    if nodes == _nodes_of_size(len(nodes[0]), pipelines, stages):
        return {"workers_per_node": len(nodes[0])}
    return {"node": [list(map(str, node)) for node in nodes]}


def workers_of_nodes(nodes: Nodes, numbers: Iterable[int], option: str) -> tuple[Worker, ...]:
    """Return all workers of the nodes with these numbers, sorted.

    Raises JobError for an unknown node, or if there are no `nodes`; its message names the
    command-line `option`.
    """
    chosen = sorted(set(numbers))
    if chosen and not nodes:
        raise JobError(
            f"{option}: the job file does not say which workers share a node; add [topology] "
            "workers_per_node = N"
        )
    for node in chosen:
        if not 0 <= node < len(nodes):
            raise JobError(f"{option} {node}: expected a node of the job, 0 to {len(nodes) - 1}")
    return tuple(sorted(worker for node in chosen for worker in nodes[node]))


def require_in_grid(name: str, worker: Worker, pipelines: int, stages: int) -> None:
    """Raise JobError unless a job's grid has this worker.

    `name` is the key or option that names the worker, for the message.
    """
    if worker.pipeline >= pipelines or worker.column >= stages:
        raise JobError(
            f"{name}: the job has no worker {worker}; expected pipeline 0 to {pipelines - 1} "
            f"and stage 0 to {stages - 1}"
        )


def _nodes_of_size(size: int, pipelines: int, stages: int) -> Nodes:
    """Return nodes of `size` workers, filled pipeline by pipeline; the last may have fewer."""
    workers = _all_workers(pipelines, stages)
    return tuple(tuple(workers[first : first + size]) for first in range(0, len(workers), size))


def _read_node_list(listed: Sequence[object], pipelines: int, stages: int) -> Nodes:
    """Return the workers of each node. Raises JobError unless each is listed once."""
    node_of: dict[Worker, int] = {}
    for node, names in enumerate(listed):
        path = f"topology.node[{node}]"
        if not isinstance(names, list) or not names:
            raise JobError(f"{path} is {shorten_repr(names)}; expected {_FORM}")
        for name in names:
            worker = _parse_worker(path, name)
            require_in_grid(path, worker, pipelines, stages)
            # A worker runs on one machine, with which it fails.
            if worker in node_of:
                raise JobError(
                    f"{path}: worker {worker} is in node {node_of[worker]} already; "
                    "expected each worker once"
                )
            node_of[worker] = node
    # A worker without a node would never fail.
    for worker in _all_workers(pipelines, stages):
        if worker not in node_of:
            raise JobError(
                f"topology.node: worker {worker} is in no node; expected each worker once"
            )
    nodes: list[list[Worker]] = [[] for _ in listed]
    for worker in sorted(node_of):
        nodes[node_of[worker]].append(worker)
    return tuple(map(tuple, nodes))


def _parse_worker(path: str, name: object) -> Worker:
    """Parse the name of a worker, such as "0.1"; `path` is the key in errors."""
    if not isinstance(name, str):
        raise JobError(
            f"{path} has {shorten_repr(name)}; expected a worker as a text, PIPELINE.STAGE"
        )
    try:
        return Worker.parse(name)
    except ValueError as error:
        raise JobError(f"{path}: {error}") from None


def _all_workers(pipelines: int, stages: int) -> list[Worker]:
    return [Worker(pipeline, column) for pipeline in range(pipelines) for column in range(stages)]


# --- The job --------------------------------------------------------------------------------------


MAX_JOB_BYTES = 2**20
"""Largest size of a job file in bytes."""
EXTENDS = "extends"
"""Key of a job file that names another one, whose values it overrides."""
MAX_BASES = 8
"""Largest number of files that a job file extends, directly or through others."""
MAX_RANKS = 1024
"""Largest number of ranks of a worker in a plan; a run allows fewer (`runtime.config`)."""


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the `[time]` table: seconds, one value per virtual stage.

    `all_reduce` and `transfer` may follow from `[network]` instead.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    optimizer: tuple[float, ...]
    all_reduce: tuple[float, ...]
    transfer: float
    """Seconds to send an activation or gradient between two workers, for all stages."""
    slow: tuple[tuple[Worker, float], ...] = ()
    """Workers of unusual speed, each with the factor by which its compute ops take longer."""


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the `[memory]` table, in any one unit: one value per virtual stage."""

    capacity: tuple[float, ...]
    """Memory of a worker that is free for activations, one value per column."""
    activation: tuple[float, ...]
    weight_stash: tuple[float, ...]
    weights: tuple[float, ...] = ()
    """Memory of parameters, gradients, optimizer state and undo copies of a stage.

    `capacity` excludes these weights. A worker that takes over layers has less room by their
    weights. Empty if layers weigh nothing.
    """
    unit_bytes: float = 1.0
    """Number of bytes in the job's unit of memory, over all GPUs of a worker."""
    recomputed: tuple[float, ...] = ()
    """Memory held from F to I if activations are recomputed. Empty if the job does not say."""
    state: tuple[float, ...] = ()
    """Optimizer state of a whole stage, including undo copies, if its holders share it.

    They share it with `[training] shard_optimizer`. `weights` then include each worker's share,
    while all workers are alive. Empty if the state is not shared.
    """
    capacity_of: tuple[tuple[Worker, float], ...] = ()
    """Workers whose `capacity` is unlike that of their column, each with its own."""
    reserve: tuple[float, ...] = ()
    """Memory kept for a layer being recomputed, which `capacity` excludes, one value per column.

    Set by `planner.recompute` only.
    """

    def with_equal_rooms(self, pipelines: int) -> "StageMemory":
        """Return a copy without `capacity_of`, for a job with this number of pipelines.

        The room of a column is the usual one, or the largest if all its workers have their own.
        """
        capacity = list(self.capacity)
        for column in range(len(capacity)):
            rooms = [room for worker, room in self.capacity_of if worker.column == column]
            if len(rooms) == pipelines:
                capacity[column] = max(rooms)
        return msgspec.structs.replace(self, capacity=tuple(capacity), capacity_of=())


class LayerValues(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the `[layers]` table: how a stage's values are divided over its layers.

    A stage's value is divided in proportion to the layers' values here; None: evenly. See
    `planner.job.layers`.
    """

    forward: tuple[float, ...] | None = None
    backward_input: tuple[float, ...] | None = None
    backward_weight: tuple[float, ...] | None = None
    optimizer: tuple[float, ...] | None = None
    all_reduce: tuple[float, ...] | None = None
    activation: tuple[float, ...] | None = None
    weight_stash: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    recomputed: tuple[float, ...] | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Training job: a grid of pipelines x stages workers, with their times and memory."""

    name: str
    pipelines: int
    stages: int
    """Number of workers of a pipeline, and so of columns."""
    microbatches: tuple[int, ...]
    """Number of micro-batches per iteration, one value per pipeline."""
    time: StageTimes
    memory: StageMemory | None = None
    columns: tuple[int, ...]
    """Column of each virtual stage."""
    chains: int = 1
    """Number of directions of micro-batches: 2 in bidirectional pipelines, else 1.

    The virtual stages are those of one direction, then those of the other. A micro-batch passes the
    stages of its own direction.
    """
    layers: tuple[int, ...] | None = None
    """Number of model layers of each virtual stage; None if the job does not say."""
    layer_values: LayerValues | None = None
    """Contents of the `[layers]` table: how values of a stage are divided over its layers."""
    network: Network = Network()
    """Contents of the `[network]` table: the links between workers."""
    nodes: Nodes = ()
    """Workers of each node, which fail together; empty if the job does not say."""
    model: Mapping[str, Any] = {}
    """Contents of the `[model]` table, which the runtime checks. Plans read `run_keys` instead."""
    training: Mapping[str, Any] = {}
    """Contents of the `[training]` table, of which only `tensor_parallel` is checked here."""

    @property
    def ranks(self) -> int:
        """Number of processes of a worker, one device each: `[training] tensor_parallel`.

        Times are those of a worker. Memory, transfers and all-reduces are those of a rank: rank r
        of one worker sends to rank r of another and reduces with it, all ranks at the same time.
        """
        return self.run_keys.tensor_parallel

    @property
    def run_keys(self) -> RunKeys:
        """Keys of `[model]` and `[training]` that plans and simulations depend on."""
        return read_run_keys(self.model, self.training)

    def with_ranks(self, ranks: int) -> "Job":
        """Return a copy of this job with another number of processes of a worker."""
        return msgspec.structs.replace(self, training={**self.training, "tensor_parallel": ranks})

    @property
    def depth(self) -> int:
        """Number of virtual stages that a micro-batch passes."""
        return len(self.columns) // self.chains


def read_job(path: Path, settings: Sequence[str] = ()) -> Job:
    """Read a job file, with `settings` (KEY=VALUE) that override its keys. Raises JobError."""
    return parse_job(read_job_text(path, settings), str(path))


def read_job_text(path: Path, settings: Sequence[str] = ()) -> str:
    """Return the text of a job file, with `settings` (KEY=VALUE) applied. Raises JobError.

    If the file extends another, or keys are overridden, the text is a new one, without comments,
    that needs no other file. It has no byte-order mark. It may be malformed; `parse_job` then
    raises the error.
    """
    text = _read_text(path)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError):  # `parse_job` raises the error
        return text
    if EXTENDS not in table and not settings:
        return text
    # The text must mean the same anywhere: merged, it needs no other file.
    tables = _merge_bases(path, table, (path,))
    for setting in settings:
        tables = _merge_tables(tables, _parse_setting(setting))
    return job_text(tables, {})


def extended_files(path: Path) -> tuple[Path, ...]:
    """Return the files that a job file extends, nearest first.

    Files that these extend in turn are included, as far as they can be read.
    """
    bases: list[Path] = []
    with suppress(JobError, ValueError, RecursionError):
        while (
            isinstance(name := tomllib.loads(_read_text(path)).get(EXTENDS), str)
            and len(bases) < MAX_BASES
        ):
            path = path.parent / name
            bases.append(path)
    return tuple(bases)


def _merge_bases(path: Path, table: Mapping[str, Any], seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return `table`, that of the file `path`, merged over the files that it extends.

    `seen` has the files on the way from the job file to `path`. Raises JobError if one of them
    is extended, if there are more than `MAX_BASES`, or if a file cannot be read.
    """
    own_keys = {key: value for key, value in table.items() if key != EXTENDS}
    if EXTENDS not in table:
        return own_keys
    name = table[EXTENDS]
    if not isinstance(name, str) or not name:
        raise JobError(
            f"{path}: {EXTENDS} is {shorten_repr(name)}; expected the path of a job file, from "
            "this one's folder"
        )
    # Paths are relative to the file that states them.
    base = path.parent / name
    # `seen` has the files on the way from the job file to this one.
    if len(seen) > MAX_BASES or any(base.resolve() == file.resolve() for file in seen):
        raise JobError(
            f"{path}: {EXTENDS} is {shorten_repr(name)}, which is circular or too deep; expected "
            f"a file that does not extend this one, over {MAX_BASES} files at most"
        )
    try:
        base_table = tomllib.loads(_read_text(base))
    except (ValueError, RecursionError) as error:
        reason = (
            str(error) if isinstance(error, JobError) else f"{base}: not readable as TOML: {error}"
        )
        raise JobError(f"{path}: {EXTENDS}: {reason}") from None
    return _merge_tables(_merge_bases(base, base_table, (*seen, base)), own_keys)


def _merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `below` in which values of `above` are added or take precedence."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = (
            _merge_tables(old, value)
            if isinstance(old, dict) and isinstance(value, dict)
            else value
        )
    return merged


def _parse_setting(text: str) -> dict[str, Any]:
    """Parse KEY=VALUE, and return nested tables that hold this value alone. Raises JobError."""
    key, equals, value = text.partition("=")
    # A value that is no TOML, such as a bare word, is a text.
    for written in (value, msgspec.json.encode(value).decode()):
        try:
            if equals and "\n" not in text:
                return tomllib.loads(f"{key} = {written}")
        except (ValueError, RecursionError):
            continue
    raise JobError(f"--set {text}: expected KEY=VALUE, for example training.learning_rate=1e-4")


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises JobError if it is unreadable, too large, or not UTF-8."""
    try:
        return read_at_most(path, MAX_JOB_BYTES, JobError, "; a job file is a page of TOML").decode(
            "utf-8-sig"
        )
    except UnicodeDecodeError:
        raise JobError(f"{path}: not UTF-8 text; a job file is TOML") from None


def parse_job(text: str, source: str = "job") -> Job:
    """Parse a job from TOML text. Raises JobError, whose message names `source`."""
    try:
        return _read_job_table(TomlTable("", parse_job_tables(text)))
    except JobError as error:
        raise JobError(f"{source}: {error}") from None


def parse_job_tables(text: str) -> dict[str, Any]:
    """Return the unchecked tables of a job file. Raises JobError if `text` is not TOML."""
    try:
        return tomllib.loads(text)
    # TOMLDecodeError, or an integer of more than 4,300 digits.
    except (ValueError, RecursionError) as error:
        raise JobError(f"not readable as TOML: {error}") from None


def _read_job_table(table: TomlTable) -> Job:
    """Read a job from the table of a whole file."""
    name = table.take_value("name", "job")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 200:
        raise JobError(
            f"name is {shorten_repr(name)}; expected a text of 1 to 200 printable characters"
        )
    pipelines = table.take_count("pipelines", high=MAX_WORKERS)
    stages = table.take_count("stages", high=MAX_WORKERS)
    if pipelines * stages > MAX_WORKERS:
        raise JobError(
            f"pipelines x stages is {pipelines} x {stages} = {pipelines * stages} workers; "
            f"expected at most {MAX_WORKERS}"
        )
    microbatches = table.take_counts(
        "microbatches", pipelines, "pipeline", low=1, high=MAX_MICROBATCHES
    )
    columns, chains, layers = _read_placement(table.take_table("placement"), stages)
    # Copies of a stage are equal, so a list in the file has one value for all copies.
    virtual = len(columns) // chains
    # Costs, first as the file gives them: per stage.
    times = table.take_table("time", required=True)
    measured = [key for key in ("all_reduce", "transfer") if times.has_key(key)]
    time = _read_times(times, virtual, chains, pipelines, stages)
    memory, layer_values = None, None
    nodes: Nodes = ()
    if table.has_key("memory"):
        memory = _read_memory(table.take_table("memory"), virtual, chains, (pipelines, stages))
    if table.has_key("layers"):
        # Without a division, each stage is one layer.
        layer_count = virtual if layers is None else sum(layers[:virtual])
        layer_values = _read_layer_values(table.take_table("layers"), layer_count)
    if table.has_optional("topology"):
        nodes = read_nodes(table.take_table("topology"), pipelines, stages)
    network = Network()
    if table.has_optional("network"):
        per = "virtual stage" if virtual != stages else "stage"
        network = read_network(table.take_table("network"), virtual, chains, per, measured)
        time = _with_network_times(time, network, pipelines * chains)
    # The runtime's own tables: a plan needs only that they are tables.
    model, training = table.take_value("model", {}), table.take_value("training", {})
    for key, value in (("model", model), ("training", training)):
        if not isinstance(value, dict):
            raise JobError(f"{key} is {shorten_repr(value)}; expected a table")
    checked_count("training.tensor_parallel", training.get("tensor_parallel", 1), 1, MAX_RANKS)
    table.refuse_unknown_keys()
    return Job(
        name=name,
        pipelines=pipelines,
        stages=stages,
        microbatches=microbatches,
        time=time,
        memory=memory,
        columns=columns,
        chains=chains,
        layers=layers,
        layer_values=layer_values,
        network=network,
        nodes=nodes,
        model=model,
        training=training,
    )


def _with_network_times(time: StageTimes, network: Network, holders: int) -> StageTimes:
    """Return the times, with transfers and reductions by `holders` workers computed from sizes."""
    # A group of `holders` workers reduces each stage's gradients together.
    if network.gradients:
        reductions = tuple(
            checked_number(
                "what a reduction takes by network.gradients and network.bandwidth",
                network.reduction_seconds(size, holders),
            )
            for size in network.gradients
        )
        time = msgspec.structs.replace(time, all_reduce=reductions)
    if network.activation is not None:
        transfer = checked_number(
            "what a transfer takes by network.activation and network.bandwidth",
            network.transfer_seconds(),
        )
        time = msgspec.structs.replace(time, transfer=transfer)
    return time


def _place_in_v(stages: int, chunks: int) -> tuple[int, ...]:
    there = range(stages)
    return tuple(chain.from_iterable(islice(cycle((there, there[::-1])), chunks)))


_COLUMNS_BY_ORDER: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "linear": lambda stages, chunks: tuple(index // chunks for index in range(chunks * stages)),
    "interleaved": lambda stages, chunks: tuple(range(stages)) * chunks,
    "v": _place_in_v,
}
"""Functions that return the column of each virtual stage, by name of the order.

Their arguments are the number of columns and the number of virtual stages per column.
"""
ORDERS = (*_COLUMNS_BY_ORDER, "bidirectional")
"""Names that are allowed for `[placement] order` in a job file."""


def placement_columns(order: str, stages: int, chunks: int) -> tuple[int, ...]:
    """Return the column of each virtual stage: `chunks` stages for each of `stages` columns.

    For the order "bidirectional", these are the virtual stages of the first direction. Raises
    KeyError for a name that is not in `ORDERS`.
    """
    return _COLUMNS_BY_ORDER["linear" if order == "bidirectional" else order](stages, chunks)


def placement_table(job: Job) -> dict[str, Any]:
    """Return the contents of a job file's `[placement]` table; empty for the default."""
    table: dict[str, Any] = {}
    chunks = job.depth // job.stages
    if chunks > 1:
        table["chunks"] = chunks
    if job.chains > 1:
        table["order"] = "bidirectional"
    # A name is shorter in a file than its list of columns.
    elif job.columns != _COLUMNS_BY_ORDER["linear"](job.stages, chunks):
        table["order"] = list(job.columns)
        for name, order in _COLUMNS_BY_ORDER.items():
            if order(job.stages, chunks) == job.columns:
                table["order"] = name
                break
    if job.layers is not None:
        table["layers"] = list(job.layers[: job.depth])
    return table


def _read_placement(
    table: TomlTable, stages: int
) -> tuple[tuple[int, ...], int, tuple[int, ...] | None]:
    """Return columns of virtual stages, number of directions, and layers by stage or None."""
    layers = None
    # A Megatron-LM layout is a text that decides all of the placement.
    if isinstance(layout := table.peek_value("layers"), str):
        columns, layers = _read_megatron_layout(table, layout, stages)
        chains = 1
    else:
        columns, chains = _read_columns(table, stages)
        if table.has_key("layers"):
            layers = (
                table.take_counts(
                    "layers", len(columns) // chains, "virtual stage", low=0, high=MAX_WORKERS
                )
                * chains
            )
    table.refuse_unknown_keys()
    return columns, chains, layers


def _read_megatron_layout(
    table: TomlTable, layout: str, stages: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return each virtual stage's column and number of layers, by a Megatron-LM layout."""
    layers = tuple(map(len, read_layout("placement.layers", layout)))
    for key in ("chunks", "order"):
        if table.has_key(key):
            raise JobError(
                f"placement.{key} conflicts with the layout in placement.layers, which sets it; "
                "remove it"
            )
    table.take_value("layers")
    chunks, remainder = divmod(len(layers), stages)
    if remainder:
        raise JobError(
            f"placement.layers has {len(layers)} stages for {stages} workers; "
            "expected the same number of stages for each"
        )
    # Megatron-LM assigns stages to columns round-robin.
    return _COLUMNS_BY_ORDER["interleaved"](stages, chunks), layers


def _read_columns(table: TomlTable, stages: int) -> tuple[tuple[int, ...], int]:
    """Return the column of each virtual stage, and the number of directions."""
    has_chunks = table.has_key("chunks")
    chunks = table.take_count("chunks", 1, high=64)
    order = table.take_value("order", "linear")
    # Any order of columns is allowed, as long as all have equally many stages.
    if isinstance(order, list):
        columns = tuple(checked_count("placement.order", column, 0, stages - 1) for column in order)
        if sorted(columns) != sorted(list(range(stages)) * chunks):
            raise JobError(
                f"placement.order is {shorten_repr(order)}; expected each of the {stages} columns "
                f"{'once' if chunks == 1 else f'{chunks} times'} (chunks = {chunks})"
            )
        return columns, 1
    # The two directions are two chains of stages, in mirrored columns.
    if order == "bidirectional":
        if has_chunks or stages % 2:
            clash = f"chunks = {chunks}" if has_chunks else f"{stages} stages"
            raise JobError(
                f"placement.order is 'bidirectional' with {clash}; expected an even number "
                "of stages, and no chunks: a worker holds one stage of each direction"
            )
        return (*range(stages), *reversed(range(stages))), 2
    if isinstance(order, str) and order in _COLUMNS_BY_ORDER:
        return _COLUMNS_BY_ORDER[order](stages, chunks), 1
    raise JobError(
        f"placement.order is {shorten_repr(order)}; expected one of {', '.join(ORDERS)}, "
        "or a list of columns"
    )


def _read_times(
    table: TomlTable, virtual: int, chains: int, pipelines: int, stages: int
) -> StageTimes:
    """Read the `[time]` table; its lists of `virtual` values are repeated `chains` times."""
    per = "virtual stage" if virtual != stages else "stage"
    ops, closing = ("forward", "backward_input", "backward_weight"), ("optimizer", "all_reduce")
    times = StageTimes(
        **{key: table.take_numbers(key, virtual, per) * chains for key in ops},
        **{key: table.take_numbers(key, virtual, per, 0.0) * chains for key in closing},
        transfer=table.take_number("transfer", 0.0),
        slow=_read_slow_workers(table, pipelines, stages),
    )
    table.refuse_unknown_keys()
    if not any(times.forward + times.backward_input + times.backward_weight):
        raise JobError(
            "time: every op takes 0 seconds; "
            "expected some stage whose forward or backward takes longer"
        )
    return times


def _read_slow_workers(
    table: TomlTable, pipelines: int, stages: int
) -> tuple[tuple[Worker, float], ...]:
    """Return workers of unusual speed, each with the factor of its op times.

    Factors are multiples of 0.001 from 0.001 to 1000; 1.5: its ops take 1.5 times as long. Raises
    JobError for other values.
    """
    slow = _read_numbers_by_worker(table, "slow", pipelines, stages, 0.001)
    for worker, factor in slow:
        if factor > 1000:
            raise JobError(f"time.slow.{worker} is {factor:g}; expected a factor of at most 1000")
        if round(factor, 3) != factor:
            raise JobError(
                f"time.slow.{worker} is {factor!r}; expected whole thousandths, such as "
                f"{max(0.001, round(factor, 3))}"
            )
    return slow


def _read_numbers_by_worker(
    table: TomlTable, key: str, pipelines: int, stages: int, low: float = 0.0
) -> tuple[tuple[Worker, float], ...]:
    """Return each worker with its number, at least `low`, under `key`, sorted. Raises JobError."""
    path, values = table.key_path(key), table.take_value(key, {})
    if not isinstance(values, dict):
        raise JobError(
            f"{path} is {shorten_repr(values)}; expected a table of workers and numbers, such as "
            '{"1.2" = 1.5}'
        )
    numbers = []
    for name, value in values.items():
        try:
            worker = Worker.parse(name)
        except ValueError as error:
            raise JobError(f"{path}: {error}") from None
        require_in_grid(path, worker, pipelines, stages)
        numbers.append((worker, checked_number(f"{path}.{name}", value, low)))
    return tuple(sorted(numbers))


def _read_memory(table: TomlTable, virtual: int, chains: int, grid: tuple[int, int]) -> StageMemory:
    """Read the `[memory]` table; its lists of `virtual` values are repeated `chains` times."""
    pipelines, stages = grid
    per = "virtual stage" if virtual != stages else "stage"
    # A list has one value for both directions, whose stages are copies.
    memory = StageMemory(
        capacity=table.take_numbers("capacity", stages, "stage"),
        activation=table.take_numbers("activation", virtual, per, 1.0) * chains,
        weight_stash=table.take_numbers("weight_stash", virtual, per, 0.0) * chains,
        unit_bytes=table.take_number("unit_bytes", 1.0),
        **{
            key: table.take_numbers(key, virtual, per) * chains
            for key in ("weights", "recomputed", "state")
            if table.has_optional(key)
        },
        capacity_of=_read_numbers_by_worker(table, "capacity_of", pipelines, stages),
    )
    table.refuse_unknown_keys()
    return memory


def _read_layer_values(table: TomlTable, layers: int) -> LayerValues:
    """Read the `[layers]` table of a job whose model has this number of layers."""
    values = {
        key: table.take_numbers(key, layers, "layer")
        for key in LayerValues.__struct_fields__
        if table.has_optional(key)
    }
    table.refuse_unknown_keys()
    return LayerValues(**values)


def require_workers(failed: Sequence[Worker], job: Job, name: str = "failed") -> None:
    """Raise JobError unless the job has each of these workers.

    `name` is the argument or option that gives the workers, for the message.
    """
    for worker in failed:
        require_in_grid(name, worker, job.pipelines, job.stages)
