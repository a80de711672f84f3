"""Provide published orders of ops in closed form, and simulate when the ops run.

An order is a list of ops for each worker of one pipeline. Virtual stages are numbered along the
route of a micro-batch. With two directions, the stages of the second follow those of the first.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from slipstream.schedules.memory import CHANGING_AT_START, memory_change
from slipstream.schedules.schedule import OpKind


class OrderedOp(NamedTuple):
    """Op of a micro-batch at a virtual stage. Its kind is F, I, W, or B (I, then W)."""

    kind: str
    stage: int
    microbatch: int


Orders = list[list[OrderedOp]]
"""Ops of each worker of one pipeline in order, [workers][ops]."""


def one_f_one_b(stages: int, microbatches: int) -> Orders:
    """Return each worker's ops, in order, in 1F1B (Narayanan et al. 2021, arXiv 2104.04473).

    Another name of it is PipeDream-flush.
    """
    orders = []
    for worker in range(stages):
        warmup = min(stages - worker - 1, microbatches)
        ops = [OrderedOp("F", worker, number) for number in range(warmup)]
        for number in range(microbatches):
            if number + warmup < microbatches:
                ops.append(OrderedOp("F", worker, number + warmup))
            ops.append(OrderedOp("B", worker, number))
        orders.append(ops)
    return orders


def interleaved_1f1b(stages: int, microbatches: int, chunks: int) -> Orders:
    """Return each worker's ops, in order, in interleaved 1F1B (Narayanan et al. 2021).

    The order is that of Megatron-LM, with `chunks` virtual stages on each of `stages` workers. The
    number of micro-batches must be a multiple of the number of workers.
    """
    total = microbatches * chunks

    def make_op(kind: str, place: int, worker: int) -> OrderedOp:
        # Micro-batches go in groups of as many as there are workers, through one virtual stage
        # after the other; backward, through the last one first.
        group, place_in_group = divmod(place, stages * chunks)
        chunk, number = divmod(place_in_group, stages)
        return OrderedOp(
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

    The order is that of 1F1B, but worker n, counted from 0, runs each W only after the I of n
    further micro-batches, so that memory is that of 1F1B.
    """
    orders = []
    for worker in range(stages):
        # The later a worker, the fewer micro-batches it warms up with: it may delay more W.
        warmup, lag = min(stages - worker - 1, microbatches), worker
        ops = [OrderedOp("F", worker, number) for number in range(warmup)]
        for number in range(microbatches):
            if number + warmup < microbatches:
                ops.append(OrderedOp("F", worker, number + warmup))
            ops.append(OrderedOp("I", worker, number))
            if number >= lag:
                ops.append(OrderedOp("W", worker, number - lag))
        ops += [
            OrderedOp("W", worker, number)
            for number in range(max(0, microbatches - lag), microbatches)
        ]
        orders.append(ops)
    return orders


class _OpSequence:
    """Builder of a worker's sequence of ops, which numbers micro-batches by op and stage.

    Numbers count from 0, or from the stage's value in `offset`.
    """

    def __init__(self, offset: Mapping[int, int] | None = None) -> None:
        self.ops: list[OrderedOp] = []
        self._next: dict[tuple[str, int], int] = {}
        self._offset = offset or {}

    def add(self, kinds: str, stage: int) -> None:
        """Append one op for each kind in `kinds`, such as `FB`, at a virtual stage."""
        for kind in kinds:
            # B is one I and one W, whose next micro-batch must be the same.
            parts = "IW" if kind == "B" else kind
            numbers = [self._next.get((part, stage), self._offset.get(stage, 0)) for part in parts]
            self.ops.append(OrderedOp(kind, stage, numbers[0]))
            assert len(set(numbers)) == 1
            self._next |= {(part, stage): numbers[0] + 1 for part in parts}

    def count_ops(self, kind: str, stage: int) -> int:
        """Return how many ops of a kind a virtual stage has. A B counts as I and as W."""
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
        # Warm-up: forwards down the V, then forwards up it as well.
        for _ in range(2 * (stages - worker) - 1):
            order.add("F", down)
        for _ in range(worker):
            order.add("F", up)
            order.add("F", down)
        # The first micro-batches come back up the V.
        for _ in range(stages - worker):
            order.add("FIW", up)
        # Steady state: one micro-batch down and one up in turn.
        while (
            order.count_ops("F", up) < order.count_ops("F", down)
            or order.count_ops("F", down) < microbatches
        ):
            if order.count_ops("F", down) < microbatches:
                order.add("F", down)
            order.add("IW", down)
            order.add("FIW", up)
        # Drain: the last I come first, since others wait for them, then all W that are left.
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

    Micro-batches enter the pipeline from both ends. The number of workers, `stages`, must be even,
    with at least twice as many micro-batches, divided evenly over both directions.
    """
    half, orders = microbatches // 2, []
    for worker in range(stages):
        # The first direction of a worker is that whose way begins at the nearer end.
        mirrored = worker >= stages // 2
        near = min(worker, stages - 1 - worker)
        first, second = (worker, 2 * stages - 1 - worker)[:: -1 if mirrored else 1]
        order = _OpSequence({stage: half for stage in (first, second) if stage >= stages})
        inner = stages // 2 - near - 1
        # The eight steps of its authors. 1: forwards from the nearer end.
        for _ in range(2 * inner):
            order.add("F", first)
        # 2: forwards from both ends.
        for _ in range(near + 1):
            order.add("F", first)
            order.add("F", second)
        # 3: the other direction comes back, and its W fill the bubbles.
        for _ in range(inner):
            order.add("IW", second)
            order.add("F", second)
        # 4: steady state, one F and one B of each direction in turn.
        for _ in range(half - stages + near + 1):
            order.add("F", first)
            order.add("B", second)
            order.add("F", second)
            order.add("B", first)
        # 5: the last forwards of the other direction.
        delayed_weights: list[int] = []
        for _ in range(inner):
            order.add("B", second)
            order.add("F", second)
            order.add("B", first)
        # 6: only backwards are left; from the middle on, their W are delayed.
        for step in range(2 * (near + 1)):
            stage, split = (second, first)[step % 2], step > near
            order.add("I" if split else "B", stage)
            delayed_weights += [stage] * split
        # 7: delayed W fill the bubbles between I.
        for _ in range(inner):
            order.add("W", delayed_weights.pop(0))
            order.add("I", first)
            delayed_weights.append(first)
        # 8: the rest of the W.
        for stage in delayed_weights:
            order.add("W", stage)
        orders.append(order.ops)
    return orders


# --- When they run --------------------------------------------------------------------------------


class StageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Times and memory of ops, in any units; lists have one value per virtual stage."""

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
    """Simulate an iteration; return its length and each worker's peak activation memory.

    None if ops wait for each other in a circle. The argument `orders` has each worker's ops, in
    order, and `costs` the times and memory of the ops of each stage. An op runs as soon as its
    worker is free and its inputs have arrived.
    """
    worker_of = {op.stage: worker for worker, ops in enumerate(orders) for op in ops}
    ends: dict[OrderedOp, float] = {}
    next_index, free_at = [0] * len(orders), [0.0] * len(orders)
    events: list[list[tuple[float, float]]] = [[] for _ in orders]
    # Each worker runs on as long as the inputs of its next op are known, until no worker can.
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
                events[worker].append(
                    (
                        begin if kind in CHANGING_AT_START else end,
                        memory_change(
                            kind, costs.activation[op.stage], costs.weight_stash[op.stage]
                        ),
                    )
                )
                free_at[worker] = end
                next_index[worker] += 1
                has_progress = True
    if any(place < len(ops) for place, ops in zip(next_index, orders, strict=True)):
        return None
    return SimulatedRun(max(free_at), list(map(_peak_memory, events)))


def _earliest_start(
    op: OrderedOp, ends: Mapping[OrderedOp, float], worker_of: Mapping[int, int], costs: StageCosts
) -> float | None:
    """Return when an op's inputs have arrived; None if they are not made yet."""
    place = op.stage % costs.depth
    if op.kind == "W":
        return ends.get(op._replace(kind="I"))
    if op.kind == "F":
        if not place:
            return 0.0
        source = op._replace(stage=op.stage - 1)
    # On the last stage, I follows the op's own F.
    elif place == costs.depth - 1:
        return ends.get(op._replace(kind="F"))
    else:
        source = OrderedOp("I", op.stage + 1, op.microbatch)
    end = ends.get(source)
    hop = costs.transfer if worker_of[source.stage] != worker_of[op.stage] else 0.0
    return None if end is None else end + hop


def _op_seconds(op: OrderedOp, costs: StageCosts) -> float:
    parts = {
        "F": (costs.forward,),
        "I": (costs.backward_input,),
        "W": (costs.backward_weight,),
        "B": (costs.backward_input, costs.backward_weight),
    }[op.kind]
    return sum(part[op.stage] for part in parts)


def _peak_memory(events: Sequence[tuple[float, float]]) -> float:
    amount = peak = 0.0
    for _, change in sorted(events):  # at the same time, what is freed first
        amount += change
        peak = max(peak, amount)
    return peak
