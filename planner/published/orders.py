"""Provide published orders of ops in closed form, and simulate when the ops run.

An order is a list of ops for each worker of one pipeline. Virtual stages are numbered along the
route of a micro-batch. With two directions, the stages of the second follow those of the first.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from slipstream.schedules.memory import CHANGING_AT_START, memory_change
from slipstream.schedules.schedule import OpKind


class Op(NamedTuple):
    """Op of a micro-batch at a virtual stage.

    F, I, W, or B, which is I and then W.
    """

    kind: str
    stage: int
    microbatch: int


Orders = list[list[Op]]
"""Ops of each worker of one pipeline in order, [workers][ops]."""


def one_f_one_b(stages: int, microbatches: int) -> Orders:
    """Return each worker's ops, in order, in 1F1B (PipeDream-flush; Narayanan et al.

    2021, arXiv 2104.04473).
    """
    orders = []
    for worker in range(stages):
        warmup = min(stages - worker - 1, microbatches)
        ops = [Op("F", worker, number) for number in range(warmup)]
        for number in range(microbatches):
            if number + warmup < microbatches:
                ops.append(Op("F", worker, number + warmup))
            ops.append(Op("B", worker, number))
        orders.append(ops)
    return orders


def interleaved_1f1b(stages: int, microbatches: int, chunks: int) -> Orders:
    """Return each worker's ops, in order, in interleaved 1F1B (Narayanan et al.

    2021) as Megatron-LM runs it, with `chunks` virtual stages on each of `stages` workers. The
    number of micro-batches must be a multiple of the number of workers.
    """
    total = microbatches * chunks

    def make_op(kind: str, place: int, worker: int) -> Op:
        group, place_in_group = divmod(place, stages * chunks)
        chunk, number = divmod(place_in_group, stages)
        return Op(
            kind,
            (chunks - 1 - chunk if kind == "B" else chunk) * stages + worker,
            group * stages + number,
        )

    orders = []
    for worker in range(stages):
        warmup = min(total, 2 * (stages - worker - 1) + (chunks - 1) * stages)
        ops = [make_op("F", place, worker) for place in range(warmup)]
        for place in range(total):
            if place + warmup < total:
                ops.append(make_op("F", place + warmup, worker))
            ops.append(make_op("B", place, worker))
        orders.append(ops)
    return orders


def zero_bubble_h1(stages: int, microbatches: int) -> Orders:
    """Return each worker's ops, in order, in ZB-H1 (Qi et al. 2023, arXiv 2401.10241).

    It is 1F1B, but worker n, counted from 0, runs each W only after the I of n further
    micro-batches, so that memory is that of 1F1B.
    """
    orders = []
    for worker in range(stages):
        warmup, lag = min(stages - worker - 1, microbatches), worker
        ops = [Op("F", worker, number) for number in range(warmup)]
        for number in range(microbatches):
            if number + warmup < microbatches:
                ops.append(Op("F", worker, number + warmup))
            ops.append(Op("I", worker, number))
            if number >= lag:
                ops.append(Op("W", worker, number - lag))
        ops += [
            Op("W", worker, number) for number in range(max(0, microbatches - lag), microbatches)
        ]
        orders.append(ops)
    return orders


class _OpSequence:
    """Builder of one worker's sequence of ops.

    It numbers the micro-batches of each kind of op at each virtual stage consecutively.
    """

    def __init__(self, offset: Mapping[int, int] | None = None) -> None:
        self.ops: list[Op] = []
        self._next: dict[tuple[str, int], int] = {}
        self._offset = offset or {}

    def add(self, kinds: str, stage: int) -> None:
        """Append one op for each kind in `kinds`, such as `FB`, at a virtual stage.

        Each has the next micro-batch of its kind. B counts as one I and one W, whose next
        micro-batch must be the same.
        """
        for kind in kinds:
            parts = "IW" if kind == "B" else kind
            numbers = [self._next.get((part, stage), self._offset.get(stage, 0)) for part in parts]
            self.ops.append(Op(kind, stage, numbers[0]))
            assert len(set(numbers)) == 1
            self._next |= {(part, stage): numbers[0] + 1 for part in parts}

    def count_ops(self, kind: str, stage: int) -> int:
        """Return the number of ops of a kind that were appended at a virtual stage.

        The kind is F, I or W; a B counts as I and as W.
        """
        return self._next.get((kind, stage), self._offset.get(stage, 0)) - self._offset.get(
            stage, 0
        )


def zero_bubble_v(stages: int, microbatches: int) -> Orders:
    """Return each worker's ops, in order, in ZB-V (Qi et al. 2024, arXiv 2405.15362).

    Each of `stages` workers has two virtual stages, placed as a V. There must be at least twice as
    many micro-batches as workers.
    """
    orders = []
    for worker in range(stages):
        down, up, order = worker, 2 * stages - 1 - worker, _OpSequence()
        for _ in range(2 * (stages - worker) - 1):
            order.add("F", down)
        for _ in range(worker):
            order.add("F", up)
            order.add("F", down)
        for _ in range(stages - worker):
            order.add("FIW", up)
        while (
            order.count_ops("F", up) < order.count_ops("F", down)
            or order.count_ops("F", down) < microbatches
        ):
            if order.count_ops("F", down) < microbatches:
                order.add("F", down)
            order.add("IW", down)
            order.add("FIW", up)
        for _ in range(worker):
            order.add("I", down)
            order.add("I", up)
        for _ in range(stages - worker):
            order.add("IW", down)
        for stage in (up, down):
            while order.count_ops("W", stage) < order.count_ops("I", stage):
                order.add("W", stage)
        orders.append(order.ops)
    return orders


def dual_pipe(stages: int, microbatches: int) -> Orders:
    """Return each worker's ops, in order, in DualPipe (DeepSeek-V3, arXiv 2412.19437).

    Micro-batches enter the pipeline from both ends. The order is built in the eight steps of its
    authors. The number of workers, `stages`, must be even, with at least twice as many
    micro-batches, divided evenly over both directions.
    """
    half, orders = microbatches // 2, []
    for worker in range(stages):
        # The first direction of a worker is that whose way begins at the nearer end.
        mirrored = worker >= stages // 2
        near = min(worker, stages - 1 - worker)
        first, second = (worker, 2 * stages - 1 - worker)[::-1 if mirrored else 1]
        order = _OpSequence({stage: half for stage in (first, second) if stage >= stages})
        inner = stages // 2 - near - 1
        for _ in range(2 * inner):
            order.add("F", first)
        for _ in range(near + 1):
            order.add("F", first)
            order.add("F", second)
        for _ in range(inner):
            order.add("IW", second)
            order.add("F", second)
        for _ in range(half - stages + near + 1):
            order.add("F", first)
            order.add("B", second)
            order.add("F", second)
            order.add("B", first)
        delayed_weights: list[int] = []
        for _ in range(inner):
            order.add("B", second)
            order.add("F", second)
            order.add("B", first)
        for step in range(2 * (near + 1)):
            stage, split = (second, first)[step % 2], step > near
            order.add("I" if split else "B", stage)
            delayed_weights += [stage] * split
        for _ in range(inner):
            order.add("W", delayed_weights.pop(0))
            order.add("I", first)
            delayed_weights.append(first)
        for stage in delayed_weights:
            order.add("W", stage)
        orders.append(order.ops)
    return orders


# --- When they run --------------------------------------------------------------------------------


class StageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Times and memory of the ops of each virtual stage, in any units.

    One value per stage.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    activation: Sequence[float]
    weight_stash: Sequence[float]
    transfer: float = 0.0
    depth: int
    """Number of virtual stages that a micro-batch passes, which are those of one direction."""


class SimulatedRun(NamedTuple):
    """Length of a simulated iteration, and the peak activation memory of each worker."""

    end: float
    """Time at which the last op ends, in the unit of the costs. The first one begins at 0."""
    peaks: list[float]
    """Peak memory of each worker's activations, in the unit of the costs."""


def simulate(orders: Orders, costs: StageCosts) -> SimulatedRun | None:
    """Simulate an iteration, and return its length and each worker's peak activation memory.

    None if the ops wait for each other in a circle. The argument `orders` has each worker's ops, in
    order, and `costs` the times and memory of the ops of each stage. An op runs as soon as its
    worker is free and its inputs have arrived.
    """
    worker_of = {op.stage: worker for worker, ops in enumerate(orders) for op in ops}
    ends: dict[Op, float] = {}
    next_index, free_at = [0] * len(orders), [0.0] * len(orders)
    events: list[list[tuple[float, float]]] = [[] for _ in orders]
    has_progress = True
    while has_progress:
        has_progress = False
        for worker, ops in enumerate(orders):
            while next_index[worker] < len(ops):
                op = ops[next_index[worker]]
                ready = _earliest_start(op, ends, worker_of, costs)
                if ready is None:
                    break
                begin = max(free_at[worker], ready)
                end = begin + _op_seconds(op, costs)
                ends[op._replace(kind="I") if op.kind == "B" else op] = end
                kind = OpKind(op.kind)
                events[worker].append((begin if kind in CHANGING_AT_START else end, memory_change(
                    kind, costs.activation[op.stage], costs.weight_stash[op.stage])))
                free_at[worker] = end
                next_index[worker] += 1
                has_progress = True
    if any(place < len(ops) for place, ops in zip(next_index, orders, strict=True)):
        return None
    return SimulatedRun(max(free_at), list(map(_peak_memory, events)))


def _earliest_start(
    op: Op, ends: Mapping[Op, float], worker_of: Mapping[int, int], costs: StageCosts
) -> float | None:
    """Return the time at which the inputs of an op are available.

    Transfers are included. None if the ops that make the inputs have not run yet. The argument
    `ends` has the end of each op that has run, and `worker_of` the worker of each virtual stage.
    """
    place = op.stage % costs.depth
    if op.kind == "W":
        return ends.get(op._replace(kind="I"))
    if op.kind == "F":
        if not place:
            return 0.0
        source = op._replace(stage=op.stage - 1)
    elif place == costs.depth - 1:
        return ends.get(op._replace(kind="F"))
    else:
        source = Op("I", op.stage + 1, op.microbatch)
    end = ends.get(source)
    hop = costs.transfer if worker_of[source.stage] != worker_of[op.stage] else 0.0
    return None if end is None else end + hop


def _op_seconds(op: Op, costs: StageCosts) -> float:
    parts = {"F": (costs.forward,), "I": (costs.backward_input,), "W": (costs.backward_weight,),
             "B": (costs.backward_input, costs.backward_weight)}[op.kind]
    return sum(part[op.stage] for part in parts)


def _peak_memory(events: Sequence[tuple[float, float]]) -> float:
    amount = peak = 0.0
    for _, change in sorted(events):  # at the same time, what is freed first
        amount += change
        peak = max(peak, amount)
    return peak
