"""Read job files: TOML into a checked `Job`, in the user's units (seconds, any one unit of memory).

Errors are one line that names the file, the key, the value and what was expected.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from slipstream.planner.job.megatron import read_layout
from slipstream.planner.job.network import Network, read_network
from slipstream.planner.job.run_keys import RunKeys, read_run_keys
from slipstream.planner.job.toml import JobError as JobError
from slipstream.planner.job.toml import TomlTable, checked_count, checked_number, job_text, shorten_repr
from slipstream.schedules.files import read_at_most
from slipstream.schedules.schedule import MAX_MICROBATCHES, MAX_WORKERS, Worker

# --- Which workers share a node (a machine), and so fail together: `[topology]` ---------------------------------------


Nodes = tuple[tuple[Worker, ...], ...]
"""Workers of each node (machine), sorted; the index is the node's number. Each worker of the job is
in one node."""
_FORM = 'a list of nodes, each a list of its workers, such as [["0.0", "0.1"], ["1.0", "1.1"]]'


def read_nodes(table: TomlTable, pipelines: int, stages: int) -> Nodes:
    """Read a `[topology]` table: return the workers of each node, from `workers_per_node` or from
    lists in `node`.

    Raises JobError.
    """
    size, listed = table.take_value("workers_per_node"), table.take_value("node")
    table.refuse_unknown_keys()
    if (size is None) == (listed is None):
        raise JobError(f"topology has {'neither' if size is None else 'both'} of the keys 'workers_per_node' and "
                       "'node'; expected one of them")
    if size is not None:
        return _nodes_of_size(checked_count("topology.workers_per_node", size, 1, pipelines * stages), pipelines,
                              stages)
    if not isinstance(listed, list):
        raise JobError(f"topology.node is {shorten_repr(listed)}; expected {_FORM}")
    return _read_node_list(listed, pipelines, stages)


def topology_table(nodes: Nodes, pipelines: int, stages: int) -> dict[str, Any]:
    """Return the contents of the `[topology]` table of a job file: the workers of each node. It is
    empty if there are no `nodes`."""
    if not nodes:
        return {}
    if nodes == _nodes_of_size(len(nodes[0]), pipelines, stages):
        return {"workers_per_node": len(nodes[0])}
    return {"node": [[str(worker) for worker in node] for node in nodes]}


def workers_of_nodes(nodes: Nodes, numbers: Iterable[int], option: str) -> tuple[Worker, ...]:
    """Return all workers of the nodes with these numbers, sorted.

    Raises JobError, which names the command-line `option` that gave the numbers, for an unknown
    node.
    """
    chosen = sorted(set(numbers))
    if chosen and not nodes:
        raise JobError(f"{option}: the job file does not say which workers share a node; add [topology] "
                       "workers_per_node = N")
    for node in chosen:
        if not 0 <= node < len(nodes):
            raise JobError(f"{option} {node}: expected a node of the job, 0 to {len(nodes) - 1}")
    return tuple(sorted(worker for node in chosen for worker in nodes[node]))


def require_in_grid(name: str, worker: Worker, pipelines: int, stages: int) -> None:
    """Raise JobError, which names the key or option `name`, unless the job has this worker."""
    if worker.pipeline >= pipelines or worker.column >= stages:
        raise JobError(f"{name}: the job has no worker {worker}; expected pipeline 0 to {pipelines - 1} and stage 0 to "
                       f"{stages - 1}")


def _nodes_of_size(size: int, pipelines: int, stages: int) -> Nodes:
    """Return nodes of `size` workers each, filled pipeline by pipeline. The last node may have
    fewer."""
    workers = _all_workers(pipelines, stages)
    return tuple(tuple(workers[first:first + size]) for first in range(0, len(workers), size))


def _read_node_list(listed: Sequence[object], pipelines: int, stages: int) -> Nodes:
    """Return the workers of each node that `topology.node` lists. Raises JobError unless each
    worker is listed once."""
    node_of: dict[Worker, int] = {}
    for node, names in enumerate(listed):
        path = f"topology.node[{node}]"
        if not isinstance(names, list) or not names:
            raise JobError(f"{path} is {shorten_repr(names)}; expected {_FORM}")
        for name in names:
            worker = _parse_worker(path, name)
            require_in_grid(path, worker, pipelines, stages)
            if worker in node_of:
                raise JobError(f"{path}: worker {worker} is in node {node_of[worker]} already; expected each worker "
                               "once")
            node_of[worker] = node
    for worker in _all_workers(pipelines, stages):
        if worker not in node_of:
            raise JobError(f"topology.node: worker {worker} is in no node; expected each worker once")
    return tuple(tuple(sorted(worker for worker, own_node in node_of.items() if own_node == node))
                 for node in range(len(listed)))


def _parse_worker(path: str, name: object) -> Worker:
    """Parse the name of a worker, such as "0.1". Raises JobError, which names the key `path`."""
    if not isinstance(name, str):
        raise JobError(f"{path} has {shorten_repr(name)}; expected a worker as a text, PIPELINE.STAGE")
    try:
        return Worker.parse(name)
    except ValueError as error:
        raise JobError(f"{path}: {error}") from None


def _all_workers(pipelines: int, stages: int) -> list[Worker]:
    """Return all workers of the job, ascending."""
    return [Worker(pipeline, column) for pipeline in range(pipelines) for column in range(stages)]


# --- The job ----------------------------------------------------------------------------------------------------------


MAX_JOB_BYTES = 2**20
EXTENDS = "extends"
"""Key of a job file that names another job file, whose tables apply wherever the first does not
override them."""
MAX_BASES = 8
MAX_RANKS = 1024
"""Largest number of processes (ranks) of a worker in a plan. A run allows fewer
(`runtime.config`)."""


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the `[time]` table: times in seconds, one value per virtual stage unless noted
    otherwise."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    optimizer: tuple[float, ...]
    all_reduce: tuple[float, ...]
    transfer: float
    """Seconds to send one activation or gradient between two workers; the same for all stages."""
    slow: tuple[tuple[Worker, float], ...] = ()
    """Slow workers, each with the factor by which its ops take longer."""


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the `[memory]` table, in any one unit of memory. One value per virtual stage
    unless noted otherwise."""

    capacity: tuple[float, ...]
    """Memory of a worker that is free for activations, one value per column."""
    activation: tuple[float, ...]
    weight_stash: tuple[float, ...]
    weights: tuple[float, ...] = ()
    """Memory of parameters, gradients, optimizer state and undo copies of a stage, which `capacity`
    excludes.

    A worker that takes over layers loses room by their weights. If empty, layers weigh nothing.
    """
    unit_bytes: float = 1.0
    """Number of bytes in the job's unit of memory, over all GPUs of a worker."""
    recomputed: tuple[float, ...] = ()
    """Memory held from F to I of a micro-batch if the stage recomputes its activations. Empty if
    the job does not say."""
    state: tuple[float, ...] = ()
    """Optimizer state of a stage, whole, if its holders keep parts of it each (`[training]
    shard_optimizer`).

    It includes undo copies; `weights` include each worker's share while all are alive. Empty if not
    sharded.
    """
    capacity_of: tuple[tuple[Worker, float], ...] = ()
    """Workers with a `capacity` other than that of their column, each with it."""
    reserve: tuple[float, ...] = ()
    """Part of `capacity` that is kept for a layer being recomputed, one value per column. Set by
    `planner.recompute` only."""


class LayerValues(msgspec.Struct, frozen=True, kw_only=True):
    """Relative weights by which each value of a stage is divided over its layers, one weight per
    layer of the model.

    None: values are divided evenly. See `planner.job.layers`.
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
    """Training job: a grid of pipelines x stages of workers, with its times and its memory."""

    name: str
    pipelines: int
    stages: int
    """Number of workers of a pipeline (columns)."""
    microbatches: tuple[int, ...]
    """Number of micro-batches per iteration, one value per pipeline."""
    time: StageTimes
    memory: StageMemory | None = None
    columns: tuple[int, ...]
    """Worker column of each virtual stage."""
    chains: int = 1
    """Number of directions in which micro-batches pass the columns: 2 in bidirectional pipelines,
    else 1.

    The virtual stages are those of one direction, then as many of the other; a micro-batch passes
    those of its direction.
    """
    layers: tuple[int, ...] | None = None
    """Number of model layers of each virtual stage. None if the job does not say."""
    layer_values: LayerValues | None = None
    """Contents of the `[layers]` table: how values of a stage are divided over its layers."""
    network: Network = Network()
    """Contents of the `[network]` table: the links between workers."""
    nodes: Nodes = ()
    """Workers of each node, which fail together. Empty if the job does not say."""
    model: Mapping[str, Any] = {}
    """Contents of the `[model]` table, which the runtime checks and reads. Plans read `run_keys`
    instead."""
    training: Mapping[str, Any] = {}
    """Contents of the `[training]` table, unchecked except for `tensor_parallel`, for the runtime
    like `model`."""

    @property
    def ranks(self) -> int:
        """Number of processes of a worker, one device each: `[training] tensor_parallel`.

        Times are those of a worker. Memory, transfers and all-reduces are those of a rank: rank r
        of one worker sends to rank r of another worker, and reduces with it. All ranks do so at the
        same time.
        """
        return self.run_keys.tensor_parallel

    @property
    def run_keys(self) -> RunKeys:
        """Keys of `[model]` and `[training]` that plans and simulations depend on."""
        return read_run_keys(self.model, self.training)

    def with_ranks(self, ranks: int) -> "Job":
        """Return this job with another number of processes of a worker."""
        return msgspec.structs.replace(self, training={**self.training, "tensor_parallel": ranks})

    @property
    def depth(self) -> int:
        """Number of virtual stages that a micro-batch passes, those of its direction."""
        return len(self.columns) // self.chains


def read_job(path: Path, settings: Sequence[str] = ()) -> Job:
    """Read a job file. `settings` override keys, as KEY=VALUE. Raises JobError."""
    return parse_job(read_job_text(path, settings), str(path))


def read_job_text(path: Path, settings: Sequence[str] = ()) -> str:
    """Return the text of a job file without a byte-order mark, with `settings` (KEY=VALUE) applied.
    Raises JobError.

    If it extends another file, or keys are overridden, the text is rewritten as one file that needs
    no other.
    """
    text = _read_text(path)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError):  # `parse_job` raises the error
        return text
    if EXTENDS not in table and not settings:
        return text
    tables = _merge_bases(path, table, (path,))
    for setting in settings:
        tables = _merge_tables(tables, _parse_setting(setting))
    return job_text(tables, {})


def extended_files(path: Path) -> tuple[Path, ...]:
    """Return the files that a job file extends, directly or through another one, nearest first, as
    far as they can be read."""
    found: list[Path] = []
    with suppress(JobError, ValueError, RecursionError):
        while isinstance(name := tomllib.loads(_read_text(path)).get(EXTENDS), str) and len(found) < MAX_BASES:
            path = path.parent / name
            found.append(path)
    return tuple(found)


def _merge_bases(path: Path, table: Mapping[str, Any], seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return the contents of a job file merged over those of the file that it extends, recursively.

    The argument `table` has the file's own contents, and `seen` the files on the way to it. Raises
    JobError for a cycle.
    """
    own = {key: value for key, value in table.items() if key != EXTENDS}
    if EXTENDS not in table:
        return own
    name = table[EXTENDS]
    if not isinstance(name, str) or not name:
        raise JobError(f"{path}: {EXTENDS} is {shorten_repr(name)}; expected the path of a job file, from "
                       "this one's folder")
    base = path.parent / name
    if len(seen) > MAX_BASES or any(base.resolve() == file.resolve() for file in seen):
        raise JobError(f"{path}: {EXTENDS} is {shorten_repr(name)}, which is circular or too deep; expected a file "
                       f"that does not extend this one, over {MAX_BASES} files at most")
    try:
        base_table = tomllib.loads(_read_text(base))
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, JobError) else f"{base}: not readable as TOML: {error}"
        raise JobError(f"{path}: {EXTENDS}: {reason}") from None
    return _merge_tables(_merge_bases(base, base_table, (*seen, base)), own)


def _merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the tables `below` with `above` merged in, key by key. A value from `above`
    replaces the one from `below`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge_tables(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _parse_setting(text: str) -> dict[str, Any]:
    """Parse KEY=VALUE into tables. The key is dotted as in TOML; the value is TOML, or text if it
    is not valid TOML."""
    key, equals, value = text.partition("=")
    for written in (value, msgspec.json.encode(value).decode()):
        try:
            if equals and "\n" not in text:
                return tomllib.loads(f"{key} = {written}")
        except (ValueError, RecursionError):
            continue
    raise JobError(f"--set {text}: expected KEY=VALUE, for example training.learning_rate=1e-4")


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises JobError if it cannot be read, is too large, or is not
    UTF-8."""
    try:
        return read_at_most(path, MAX_JOB_BYTES, JobError, "; a job file is a page of TOML").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise JobError(f"{path}: not UTF-8 text; a job file is TOML") from None


def parse_job(text: str, source: str = "job") -> Job:
    """Parse a job from TOML text. `source` names it in errors. Raises JobError."""
    try:
        return _read_job_table(TomlTable("", parse_job_tables(text)))
    except JobError as error:
        raise JobError(f"{source}: {error}") from None


def parse_job_tables(text: str) -> dict[str, Any]:
    """Return the unchecked tables of a job file, to write them anew with changes. Raises JobError
    if `text` is not TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or an integer of more than 4,300 digits
        raise JobError(f"not readable as TOML: {error}") from None


def _read_job_table(table: TomlTable) -> Job:
    """Read a job from the table of a whole file. Raises JobError."""
    name = table.take_value("name", "job")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 200:
        raise JobError(f"name is {shorten_repr(name)}; expected a text of 1 to 200 printable characters")
    pipelines = table.take_count("pipelines", high=MAX_WORKERS)
    stages = table.take_count("stages", high=MAX_WORKERS)
    if pipelines * stages > MAX_WORKERS:
        raise JobError(f"pipelines x stages is {pipelines} x {stages} = {pipelines * stages} workers; expected at most "
                       f"{MAX_WORKERS}")
    microbatches = table.take_counts("microbatches", pipelines, "pipeline", low=1, high=MAX_MICROBATCHES)
    columns, chains, layers = _read_placement(table.take_table("placement"), stages)
    # Copies of a stage are equal, so a list in the file has one value for all copies.
    virtual = len(columns) // chains
    times = table.take_table("time", required=True)
    measured = [key for key in ("all_reduce", "transfer") if times.has_key(key)]
    time = _read_times(times, virtual, chains, pipelines, stages)
    memory = _read_memory(table.take_table("memory"), virtual, chains, (pipelines, stages)) \
        if table.has_key("memory") else None
    layer_values = None
    if table.has_key("layers"):
        layer_values = _read_layer_values(table.take_table("layers"), virtual if layers is None
                                          else sum(layers[:virtual]))
    nodes = read_nodes(table.take_table("topology"), pipelines, stages) if table.has_optional("topology") else ()
    per = "virtual stage" if virtual != stages else "stage"
    network = read_network(table.take_table("network"), virtual, chains, per, measured) \
        if table.has_optional("network") else Network()
    if network.gradients:
        time = msgspec.structs.replace(time, all_reduce=tuple(
            checked_number("what a reduction takes by network.gradients and network.bandwidth",
                           network.reduction_seconds(size, pipelines * chains)) for size in network.gradients))
    if network.activation is not None:
        time = msgspec.structs.replace(time, transfer=checked_number(
            "what a transfer takes by network.activation and network.bandwidth", network.transfer_seconds()))
    model, training = table.take_value("model", {}), table.take_value("training", {})
    for key, value in (("model", model), ("training", training)):
        if not isinstance(value, dict):
            raise JobError(f"{key} is {shorten_repr(value)}; expected a table")
    checked_count("training.tensor_parallel", training.get("tensor_parallel", 1), 1, MAX_RANKS)
    table.refuse_unknown_keys()
    return Job(name=name, pipelines=pipelines, stages=stages, microbatches=microbatches, time=time, memory=memory,
               columns=columns, chains=chains, layers=layers, layer_values=layer_values, network=network, nodes=nodes,
               model=model, training=training)



_COLUMNS_BY_ORDER: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "linear": lambda stages, chunks: tuple(index // chunks for index in range(chunks * stages)),
    "interleaved": lambda stages, chunks: tuple(index % stages for index in range(chunks * stages)),
    "v": lambda stages, chunks: tuple(index % stages if index // stages % 2 == 0 else stages - 1 - index % stages
                                      for index in range(chunks * stages)),
}
"""Functions from (number of columns, virtual stages per column) to the column of each virtual
stage, by name of the order."""
ORDERS = (*_COLUMNS_BY_ORDER, "bidirectional")


def placement_columns(order: str, stages: int, chunks: int) -> tuple[int, ...]:
    """Return the column of each virtual stage in the placement named `order`, with `chunks` virtual
    stages per column.

    In a bidirectional placement, these are the stages of the first direction.
    """
    return _COLUMNS_BY_ORDER["linear" if order == "bidirectional" else order](stages, chunks)


def placement_table(job: Job) -> dict[str, Any]:
    """Return the contents of a job file's `[placement]` table. Empty if the job has the default
    placement."""
    table: dict[str, Any] = {}
    chunks = job.depth // job.stages
    if chunks > 1:
        table["chunks"] = chunks
    if job.chains > 1:
        table["order"] = "bidirectional"
    elif job.columns != _COLUMNS_BY_ORDER["linear"](job.stages, chunks):
        names = (name for name, order in _COLUMNS_BY_ORDER.items() if order(job.stages, chunks) == job.columns)
        table["order"] = next(names, list(job.columns))
    if job.layers is not None:
        table["layers"] = list(job.layers[:job.depth])
    return table


def _read_placement(table: TomlTable, stages: int) -> tuple[tuple[int, ...], int, tuple[int, ...] | None]:
    """Read a `[placement]` table of a job with `stages` columns.

    Return the column of each virtual stage, the number of directions (2 in a bidirectional
    placement, else 1), and the number of layers of each virtual stage, None if not given.
    """
    layers = None
    if isinstance(layout := table.peek_value("layers"), str):
        columns, layers = _read_megatron_layout(table, layout, stages)
        chains = 1
    else:
        columns, chains = _read_columns(table, stages)
        if table.has_key("layers"):
            layers = table.take_counts("layers", len(columns) // chains, "virtual stage", low=0,
                                       high=MAX_WORKERS) * chains
    table.refuse_unknown_keys()
    return columns, chains, layers


def _read_megatron_layout(table: TomlTable, layout: str, stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the column and the number of layers of each stage of a Megatron-LM pipeline layout,
    the text `layout`.

    Megatron-LM assigns stages to columns round-robin.
    """
    layers = tuple(map(len, read_layout("placement.layers", layout)))
    for key in ("chunks", "order"):
        if table.has_key(key):
            raise JobError(f"placement.{key} conflicts with the layout in placement.layers, which sets it; remove it")
    table.take_value("layers")
    chunks, remainder = divmod(len(layers), stages)
    if remainder:
        raise JobError(f"placement.layers has {len(layers)} stages for {stages} workers; expected the same number of "
                       "stages for each")
    return _COLUMNS_BY_ORDER["interleaved"](stages, chunks), layers


def _read_columns(table: TomlTable, stages: int) -> tuple[tuple[int, ...], int]:
    """Read the placement's order: return the column of each virtual stage, and the number of
    directions of micro-batches."""
    given = table.has_key("chunks")
    chunks = table.take_count("chunks", 1, high=64)
    order = table.take_value("order", "linear")
    if isinstance(order, list):
        columns = tuple(checked_count("placement.order", column, 0, stages - 1) for column in order)
        if sorted(columns) != sorted(list(range(stages)) * chunks):
            raise JobError(f"placement.order is {shorten_repr(order)}; expected each of the {stages} columns "
                           f"{'once' if chunks == 1 else f'{chunks} times'} (chunks = {chunks})")
        return columns, 1
    if order == "bidirectional":
        if given or stages % 2:
            clash = f"chunks = {chunks}" if given else f"{stages} stages"
            raise JobError(f"placement.order is 'bidirectional' with {clash}; expected an even number of stages, and "
                           "no chunks: a worker holds one stage of each direction")
        return (*range(stages), *reversed(range(stages))), 2
    if isinstance(order, str) and order in _COLUMNS_BY_ORDER:
        return _COLUMNS_BY_ORDER[order](stages, chunks), 1
    raise JobError(f"placement.order is {shorten_repr(order)}; expected one of {', '.join(ORDERS)}, or a list of "
                   f"columns")


def _read_times(table: TomlTable, virtual: int, chains: int, pipelines: int, stages: int) -> StageTimes:
    """Read the `[time]` table of a job with `pipelines` x `stages` workers, and `virtual` virtual
    stages in each of `chains` directions. Raises JobError."""
    per = "virtual stage" if virtual != stages else "stage"
    ops, closing = ("forward", "backward_input", "backward_weight"), ("optimizer", "all_reduce")
    times = StageTimes(
        **{key: table.take_numbers(key, virtual, per) * chains for key in ops},
        **{key: table.take_numbers(key, virtual, per, 0.0) * chains for key in closing},
        transfer=table.take_number("transfer", 0.0), slow=_read_slow_workers(table, pipelines, stages))
    table.refuse_unknown_keys()
    if not any(times.forward + times.backward_input + times.backward_weight):
        raise JobError("time: every op takes 0 seconds; expected some stage whose forward or backward takes longer")
    return times


def _read_slow_workers(table: TomlTable, pipelines: int, stages: int) -> tuple[tuple[Worker, float], ...]:
    """Return the slow workers, each with the factor by which its ops take longer.

    Raises JobError unless each factor is a multiple of 0.001, from 0.001 to 1000.
    """
    slow = _read_numbers_by_worker(table, "slow", pipelines, stages, 0.001)
    for worker, factor in slow:
        if factor > 1000:
            raise JobError(f"time.slow.{worker} is {factor:g}; expected a factor of at most 1000")
        if round(factor, 3) != factor:
            raise JobError(f"time.slow.{worker} is {factor!r}; expected whole thousandths, such as "
                           f"{max(0.001, round(factor, 3))}")
    return slow


def _read_numbers_by_worker(table: TomlTable, key: str, pipelines: int, stages: int, low: float = 0.0
                            ) -> tuple[tuple[Worker, float], ...]:
    """Return pairs of a worker and its number from the table under `key`, sorted by worker; empty
    if the key is missing.

    Raises JobError for a number less than `low`.
    """
    path, values = table.key_path(key), table.take_value(key, {})
    if not isinstance(values, dict):
        raise JobError(f"{path} is {shorten_repr(values)}; expected a table of workers and numbers, such as "
                       '{"1.2" = 1.5}')
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
    """Read the `[memory]` table of a job with `virtual` virtual stages in each of `chains`
    directions; `grid` has the numbers of pipelines and stages. Raises JobError."""
    pipelines, stages = grid
    per = "virtual stage" if virtual != stages else "stage"
    memory = StageMemory(capacity=table.take_numbers("capacity", stages, "stage"),
                         activation=table.take_numbers("activation", virtual, per, 1.0) * chains,
                         weight_stash=table.take_numbers("weight_stash", virtual, per, 0.0) * chains,
                         unit_bytes=table.take_number("unit_bytes", 1.0),
                         **{key: table.take_numbers(key, virtual, per) * chains
                            for key in ("weights", "recomputed", "state")
                            if table.has_optional(key)},
                         capacity_of=_read_numbers_by_worker(table, "capacity_of", pipelines, stages))
    table.refuse_unknown_keys()
    return memory


def _read_layer_values(table: TomlTable, layers: int) -> LayerValues:
    """Read the `[layers]` table of a job whose model has this number of layers. Raises JobError."""
    values = {key: table.take_numbers(key, layers, "layer") for key in LayerValues.__struct_fields__
              if table.has_optional(key)}
    table.refuse_unknown_keys()
    return LayerValues(**values)


def require_workers(failed: Sequence[Worker], job: Job, name: str = "failed") -> None:
    """Raise JobError unless the job has each of these workers. `name` is the argument or option
    that names them."""
    for worker in failed:
        require_in_grid(name, worker, job.pipelines, job.stages)
