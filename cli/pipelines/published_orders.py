"""Orders of ops as others publish them, in closed form, and when the ops run.

Each is a list of ops for each worker of one pipeline. Virtual stages are numbered along a micro-batch's way; of two
directions, those of the second one follow those of the first.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec


class Op(NamedTuple):
    """F, I, W, or B, which is I and then W, of a micro-batch at a virtual stage."""

    kind: str
    stage: int
    microbatch: int


Orders = list[list[Op]]
"""[worker] its ops."""


def one_f_one_b(stages: int, microbatches: int) -> Orders:
    """1F1B (PipeDream-flush; Narayanan et al. 2021, arXiv 2104.04473)."""
    orders = []
    for worker in range(stages):
        ahead = min(stages - worker - 1, microbatches)
        ops = [Op("F", worker, number) for number in range(ahead)]
        for number in range(microbatches):
            if number + ahead < microbatches:
                ops.append(Op("F", worker, number + ahead))
            ops.append(Op("B", worker, number))
        orders.append(ops)
    return orders


def interleaved(stages: int, microbatches: int, chunks: int) -> Orders:
    """Interleaved 1F1B (Narayanan et al. 2021), as Megatron-LM runs it. Micro-batches are a multiple of the workers."""
    total = microbatches * chunks

    def op(kind: str, place: int, worker: int) -> Op:
        group, within = divmod(place, stages * chunks)
        chunk, number = divmod(within, stages)
        return Op(kind, (chunks - 1 - chunk if kind == "B" else chunk) * stages + worker, group * stages + number)

    orders = []
    for worker in range(stages):
        ahead = min(total, 2 * (stages - worker - 1) + (chunks - 1) * stages)
        ops = [op("F", place, worker) for place in range(ahead)]
        for place in range(total):
            if place + ahead < total:
                ops.append(op("F", place + ahead, worker))
            ops.append(op("B", place, worker))
        orders.append(ops)
    return orders


def zero_bubble_h1(stages: int, microbatches: int) -> Orders:
    """ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B in which W of a worker is as many micro-batches late as workers
    are before it, so that memory is that of 1F1B."""
    orders = []
    for worker in range(stages):
        ahead, late = min(stages - worker - 1, microbatches), worker
        ops = [Op("F", worker, number) for number in range(ahead)]
        for number in range(microbatches):
            if number + ahead < microbatches:
                ops.append(Op("F", worker, number + ahead))
            ops.append(Op("I", worker, number))
            if number >= late:
                ops.append(Op("W", worker, number - late))
        ops += [Op("W", worker, number) for number in range(max(0, microbatches - late), microbatches)]
        orders.append(ops)
    return orders


class _Counted:
    """Ops of one worker, micro-batches in turn for each kind and virtual stage."""

    def __init__(self, offset: Mapping[int, int] | None = None) -> None:
        self.ops: list[Op] = []
        self._next: dict[tuple[str, int], int] = {}
        self._offset = offset or {}

    def add(self, kinds: str, stage: int) -> None:
        """The next op of each of these kinds; B is the next I and W."""
        for kind in kinds:
            parts = "IW" if kind == "B" else kind
            numbers = [self._next.get((part, stage), self._offset.get(stage, 0)) for part in parts]
            self.ops.append(Op(kind, stage, numbers[0]))
            assert len(set(numbers)) == 1
            self._next |= {(part, stage): numbers[0] + 1 for part in parts}

    def done(self, kind: str, stage: int) -> int:
        """How many there are."""
        return self._next.get((kind, stage), self._offset.get(stage, 0)) - self._offset.get(stage, 0)


def zero_bubble_v(stages: int, microbatches: int) -> Orders:
    """ZB-V (Qi et al. 2024, arXiv 2405.15362): a V of two virtual stages. At least twice as many micro-batches as
    workers."""
    orders = []
    for worker in range(stages):
        down, up, made = worker, 2 * stages - 1 - worker, _Counted()
        for _ in range(2 * (stages - worker) - 1):
            made.add("F", down)
        for _ in range(worker):
            made.add("F", up)
            made.add("F", down)
        for _ in range(stages - worker):
            made.add("FIW", up)
        while made.done("F", up) < made.done("F", down) or made.done("F", down) < microbatches:
            if made.done("F", down) < microbatches:
                made.add("F", down)
            made.add("IW", down)
            made.add("FIW", up)
        for _ in range(worker):
            made.add("I", down)
            made.add("I", up)
        for _ in range(stages - worker):
            made.add("IW", down)
        for stage in (up, down):
            while made.done("W", stage) < made.done("I", stage):
                made.add("W", stage)
        orders.append(made.ops)
    return orders


def dual_pipe(stages: int, microbatches: int) -> Orders:
    """DualPipe (DeepSeek-V3, arXiv 2412.19437): micro-batches of both directions at once, in eight steps.

    An even number of workers, and at least twice as many micro-batches, evenly over both directions.
    """
    half, orders = microbatches // 2, []
    for worker in range(stages):
        # The first direction of a worker is that whose way begins at the nearer end.
        mirrored = worker >= stages // 2
        near = min(worker, stages - 1 - worker)
        first, second = (worker, 2 * stages - 1 - worker)[::-1 if mirrored else 1]
        made = _Counted({stage: half for stage in (first, second) if stage >= stages})
        inner = stages // 2 - near - 1
        for _ in range(2 * inner):
            made.add("F", first)
        for _ in range(near + 1):
            made.add("F", first)
            made.add("F", second)
        for _ in range(inner):
            made.add("IW", second)
            made.add("F", second)
        for _ in range(half - stages + near + 1):
            made.add("F", first)
            made.add("B", second)
            made.add("F", second)
            made.add("B", first)
        late: list[int] = []
        for _ in range(inner):
            made.add("B", second)
            made.add("F", second)
            made.add("B", first)
        for step in range(2 * (near + 1)):
            stage, split = (second, first)[step % 2], step > near
            made.add("I" if split else "B", stage)
            late += [stage] * split
        for _ in range(inner):
            made.add("W", late.pop(0))
            made.add("I", first)
            late.append(first)
        for stage in late:
            made.add("W", stage)
        orders.append(made.ops)
    return orders


# --- When they run ----------------------------------------------------------------------------------------------------


class StageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Of the virtual stages, one value each."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    activation: Sequence[float]
    weight_stash: Sequence[float]
    transfer: float = 0.0
    depth: int
    """Virtual stages that a micro-batch passes: those of one direction."""


class Run(NamedTuple):
    """When the ops of an iteration ran."""

    end: float
    """Of the last one; the first begins at 0."""
    peaks: list[float]
    """[worker] the most that micro-batches held of its memory."""


def run(orders: Orders, costs: StageCosts) -> Run | None:
    """Each op as soon as its worker and what it waits for allow; None where ops wait for each other."""
    worker_of = {op.stage: worker for worker, ops in enumerate(orders) for op in ops}
    ends: dict[Op, float] = {}
    places, free = [0] * len(orders), [0.0] * len(orders)
    events: list[list[tuple[float, float]]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for worker, ops in enumerate(orders):
            while places[worker] < len(ops):
                op = ops[places[worker]]
                ready = _ready(op, ends, worker_of, costs)
                if ready is None:
                    break
                begin = max(free[worker], ready)
                end = begin + _seconds(op, costs)
                ends[op._replace(kind="I") if op.kind == "B" else op] = end
                events[worker] += _held(op, begin, end, costs)
                free[worker] = end
                places[worker] += 1
                moved = True
    if any(place < len(ops) for place, ops in zip(places, orders, strict=True)):
        return None
    return Run(max(free), [_peak(one) for one in events])


def _ready(op: Op, ends: Mapping[Op, float], worker_of: Mapping[int, int], costs: StageCosts) -> float | None:
    """When what an op waits for is there; None where that has not run."""
    place = op.stage % costs.depth
    if op.kind == "W":
        return ends.get(op._replace(kind="I"))
    if op.kind == "F":
        if not place:
            return 0.0
        before = op._replace(stage=op.stage - 1)
    elif place == costs.depth - 1:
        return ends.get(op._replace(kind="F"))
    else:
        before = Op("I", op.stage + 1, op.microbatch)
    end = ends.get(before)
    hop = costs.transfer if worker_of[before.stage] != worker_of[op.stage] else 0.0
    return None if end is None else end + hop


def _seconds(op: Op, costs: StageCosts) -> float:
    parts = {"F": (costs.forward,), "I": (costs.backward_input,), "W": (costs.backward_weight,),
             "B": (costs.backward_input, costs.backward_weight)}[op.kind]
    return sum(part[op.stage] for part in parts)


def _held(op: Op, begin: float, end: float, costs: StageCosts) -> list[tuple[float, float]]:
    """Changes of what a worker holds: (when, how much)."""
    activation, stash = costs.activation[op.stage], costs.weight_stash[op.stage]
    return {"F": [(begin, activation)], "B": [(end, -activation)], "I": [(end, stash - activation)],
            "W": [(end, -stash)]}[op.kind]


def _peak(events: Sequence[tuple[float, float]]) -> float:
    held = most = 0.0
    for _, change in sorted(events):  # at the same time, what is freed first
        held += change
        most = max(most, held)
    return most
