"""Export planned and measured ops as Chrome trace events.

ui.perfetto.dev and chrome://tracing open them. A pipeline is a process, a worker a thread, an op a
complete event ("X"), and a tensor that crosses between two workers a flow ("s" to "f"). Perfetto
binds the end of a flow to the op around its timestamp, so both ends lie in the middle of their op.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from slipstream.schedules.layers import compact_layers_text
from slipstream.schedules.measured_trace import TICK_SECONDS, MeasuredIteration, placed_ops
from slipstream.schedules.precedence import op_key, producers_with_rules
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind, Schedule, Worker

LINK_THREADS = 10**6
"""Difference between the thread ids of a worker and of its links, where reductions overlap."""

Event = dict[str, Any]
Programs = Mapping[Worker, Sequence[Op]]

NAMES = {
    OpKind.F: "forward",
    OpKind.I: "backward_input",
    OpKind.W: "backward_weight",
    OpKind.B: "backward",
    OpKind.A: "all_reduce",
    OpKind.O: "optimizer",
}


def perfetto_trace(schedule: Schedule, measured: Sequence[MeasuredIteration] = ()) -> bytes:
    """Return the trace-event JSON of a schedule and of measured iterations of its workers."""
    # Flows are numbered over all iterations, since their numbers must differ.
    flows = count(1)
    planned = {seat.worker: schedule.ops(seat.worker) for seat in schedule.seats}
    events = list(_process_events(schedule, "planned", 0, planned, schedule.tick_seconds, flows))
    for index, iteration in enumerate(measured, start=1):
        title = "measured" if len(measured) == 1 else f"measured iteration {iteration.iteration}"
        events += _process_events(
            schedule, title, index, placed_ops(iteration), TICK_SECONDS, flows
        )
    return (
        json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")).encode()
        + b"\n"
    )


def _process_events(
    schedule: Schedule,
    title: str,
    block: int,
    programs: Programs,
    tick_seconds: float,
    flows: Iterator[int],
) -> Iterator[Event]:
    """Yield all trace events of one planned or measured iteration, the `block`-th."""

    def process(worker: Worker) -> int:
        return block * schedule.grid.pipelines + worker.pipeline + 1

    # Rows with their names, then ops, then the tensors between them.
    yield from _name_rows(schedule, title, programs, process)
    for worker, ops in programs.items():
        for op in ops:
            yield _op_event(op, schedule, process(worker), tick_seconds)
    for producer, consumer in _crossing_tensors(programs, schedule):
        flow = {
            "name": "activation" if consumer.kind is OpKind.F else "gradient",
            "cat": "transfer",
            "id": next(flows),
        }
        yield flow | {"ph": "s"} | _flow_point(producer, process(producer.worker), tick_seconds)
        yield (
            flow
            | {"ph": "f", "bp": "e"}
            | _flow_point(consumer, process(consumer.worker), tick_seconds)
        )


def _name_rows(
    schedule: Schedule, title: str, programs: Programs, process: Callable[[Worker], int]
) -> Iterator[Event]:
    for pipeline, pid in sorted({(worker.pipeline, process(worker)) for worker in programs}):
        yield _metadata_event("process_name", pid, 0, {"name": f"{title} pipeline {pipeline}"})
        yield _metadata_event("process_sort_index", pid, 0, {"sort_index": pid})
    for worker in programs:
        pid, tid = process(worker), worker.column + 1
        seat = schedule.seat_of[worker]
        remark = (
            f", holds layers {compact_layers_text(schedule.held_layers_of_seat(seat))}"
            if schedule.has_moved_layers(seat)
            else ""
        )
        yield _metadata_event("thread_name", pid, tid, {"name": f"worker {worker}{remark}"})
        yield _metadata_event("thread_sort_index", pid, tid, {"sort_index": 2 * worker.column})
        # Reductions run beside other ops, and so have a row of their own under their worker's.
        if schedule.has_overlap:
            yield _metadata_event(
                "thread_name", pid, tid + LINK_THREADS, {"name": f"links of {worker}"}
            )
            yield _metadata_event(
                "thread_sort_index", pid, tid + LINK_THREADS, {"sort_index": 2 * worker.column + 1}
            )


def _metadata_event(name: str, pid: int, tid: int, args: Mapping[str, object]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _op_event(op: Op, schedule: Schedule, pid: int, tick_seconds: float) -> Event:
    begin, end = (
        _to_nanoseconds(op.start_ticks, tick_seconds),
        _to_nanoseconds(op.end_ticks, tick_seconds),
    )
    whole = op.slice is not None and op.slice < len(schedule.grid.stages)
    layers = None if op.slice is None else compact_layers_text([schedule.layers_of(op.slice)])
    origin = schedule.origin(op)
    # Perfetto shows these when an op is chosen.
    args = {
        "stage": op.slice if whole else None,
        "layers": layers,
        "pipeline": op.pipeline,
        "microbatch": op.microbatch,
        "rerouted": origin == "rerouted",
        "shed": origin == "shed",
    }
    micro = f" {op.pipeline}.{op.microbatch}" if op.microbatch is not None else ""
    if op.slice is not None and not whole:
        micro += f" layers {layers}"
    thread = (
        op.worker.column + 1 + (LINK_THREADS if schedule.has_overlap and op.kind is OpKind.A else 0)
    )
    return {
        "ph": "X",
        "name": f"{op.kind}{micro}",
        "cat": NAMES[op.kind],
        "pid": pid,
        "tid": thread,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": {key: value for key, value in args.items() if value is not None},
    }


def _flow_point(op: Op, pid: int, tick_seconds: float) -> Event:
    # Perfetto binds a flow to the op that contains this time.
    middle = (
        _to_nanoseconds(op.start_ticks, tick_seconds) + _to_nanoseconds(op.end_ticks, tick_seconds)
    ) // 2
    return {"pid": pid, "tid": op.worker.column + 1, "ts": middle / 1000}


def _to_nanoseconds(ticks: int, tick_seconds: float) -> int:
    return round(ticks * tick_seconds * 1e9)


def _crossing_tensors(programs: Programs, schedule: Schedule) -> Iterator[tuple[Op, Op]]:
    """Yield the producing and the consuming op of each tensor that goes to another worker."""
    # Ops without a duration are not drawn, so no flow can begin or end there.
    by_key = {
        op_key(op): op
        for ops in programs.values()
        for op in ops
        if op.kind in COMPUTE_KINDS and op.end_ticks > op.start_ticks
    }
    for key, op in by_key.items():
        path = schedule.route_of(key.pipeline, key.microbatch)
        for source, rule in producers_with_rules(key, path):
            producer = by_key.get(source)
            if rule.tensor and producer is not None and producer.worker != op.worker:
                yield producer, op
