"""Bound the effect of links that plans do not count, from replays.

    python -m benchmarks.links [--preset llama-3-8b ...] [--steps 400000] [--failed 2.1 ...]

A preset's plan with `[network] overlap` is replayed, with each worker's ops in their order and its
first op when planned, with

- *queued*: a worker sends one transfer at a time, receives one at a time, and neither while it
  reduces. A transfer that comes during a reduction waits for all of it, while real links share:
  this is an upper limit.
- *free*: transfers that take no time, as if all neighbours shared a node with unlimited links: a
  lower limit of what links within a node could gain for these orders.

The benchmark prints periods relative to the plan's; the share of the period in which parameters are
gathered if state is sharded (the optimizer step of such a job includes it, and none of it overlaps
with the next iteration); and for how many iterations a link is busy with what the busiest worker
receives when layers move.
"""

import argparse
from collections import defaultdict
from heapq import heappop, heappush

from msgspec.structs import replace

from slipstream.planner import parse_job
from slipstream.planner.job.presets import ESTIMATED, preset_text
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.planner.report import compute_transition
from slipstream.schedules.precedence import (
    OpKey,
    consumers_with_rules,
    op_key,
    producers_with_rules,
)
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind, Schedule, Worker


def replayed(schedule: Schedule, transfer: int, *, queued: bool) -> int:
    """Return the longest window of a worker, in ticks."""
    programs = {}
    for worker in schedule.members:
        programs[worker] = [op for op in schedule.ops(worker) if op.kind in COMPUTE_KINDS]
    host = {op_key(op): worker for worker, ops in programs.items() for op in ops}
    paths = _paths(schedule, host)
    lacking = {}
    for key in host:
        producers = producers_with_rules(key, paths[key.pipeline, key.microbatch])
        lacking[key] = sum(awaited in host for awaited, _ in producers)
    ready: dict[OpKey, int] = defaultdict(int)
    free = {worker: schedule.ops(worker)[0].start_ticks for worker in programs}
    first, turn = dict(free), dict.fromkeys(programs, 0)
    out, into = defaultdict[Worker, int](int), defaultdict[Worker, int](int)
    reductions = _Reductions(schedule)
    # (tick, 0: an op is over; 1: a reduction may begin, which).
    events: list[tuple[int, int, OpKey | int]] = []
    running: set[Worker] = set()

    def begin(worker: Worker) -> None:
        if worker in running or turn[worker] == len(programs[worker]):
            return
        op = programs[worker][turn[worker]]
        if not lacking[op_key(op)]:
            running.add(worker)
            heappush(
                events,
                (
                    max(free[worker], ready[op_key(op)]) + op.end_ticks - op.start_ticks,
                    0,
                    op_key(op),
                ),
            )

    for worker in programs:
        begin(worker)
    while events:
        tick, kind, what = heappop(events)
        if kind:
            assert isinstance(what, int)
            sharers = reductions.sharers(what)
            used_links = (out, into) if queued else (out,)
            start = max([tick, *(link[worker] for worker in sharers for link in used_links)])
            for worker in sharers:
                out[worker] = into[worker] = reductions.done[worker] = start + reductions.ticks(
                    what
                )
            continue
        assert isinstance(what, OpKey)
        worker = host[what]
        running.discard(worker)
        free[worker] = tick
        turn[worker] += 1
        if what.kind in (OpKind.W, OpKind.B):
            for number in reductions.after(what):
                heappush(events, (tick, 1, number))
        for key, rule in consumers_with_rules(what, paths[what.pipeline, what.microbatch]):
            if key not in host:
                continue
            arrives = tick
            if rule.tensor and host[key] != worker:
                sends = max(tick, out[worker], into[host[key]]) if queued else tick
                arrives = sends + transfer
                if queued:
                    out[worker] = into[host[key]] = arrives
            lacking[key] -= 1
            ready[key] = max(ready[key], arrives)
            begin(host[key])
        begin(worker)
    return max(
        max(free[worker], reductions.done[worker]) + _step(schedule, worker) - first[worker]
        for worker in programs
    )


class _Reductions:
    """Reductions with the ops that each of them awaits."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._sharers: dict[int, list[Worker]] = defaultdict(list)
        for worker in schedule.members:
            for op in schedule.ops(worker):
                if op.kind is OpKind.A:
                    assert op.slice is not None
                    self._sharers[op.slice].append(worker)
        self._left: dict[int, int] = defaultdict(int)
        self.done: dict[Worker, int] = defaultdict(int)
        for op in schedule.all_ops():
            if op.kind in (OpKind.W, OpKind.B):
                for number in self._of(op_key(op)):
                    self._left[number] += 1

    def _of(self, key: OpKey) -> list[int]:
        first, end = self._schedule.layers_of(key.slice)
        return [
            number
            for number in self._sharers
            if max(first, self._schedule.layers_of(number)[0])
            < min(end, self._schedule.layers_of(number)[1])
        ]

    def sharers(self, number: int) -> list[Worker]:
        return self._sharers[number]

    def ticks(self, number: int) -> int:
        return self._schedule.times.all_reduce[number]

    def after(self, key: OpKey) -> list[int]:
        """Return the reductions that no longer await anything once this W is done."""
        found = []
        for number in self._of(key):
            self._left[number] -= 1
            if not self._left[number]:
                found.append(number)
        return found


def _step(schedule: Schedule, worker: Worker) -> int:
    step: Op = schedule.ops(worker)[-1]
    assert step.kind is OpKind.O
    return step.end_ticks - step.start_ticks


def _paths(schedule: Schedule, host: dict[OpKey, Worker]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for kind, slice_, pipeline, microbatch in host:
        if kind is OpKind.F:
            found[pipeline, microbatch].append(slice_)
    return {pair: sorted(slices, key=schedule.layers_of) for pair, slices in found.items()}


def gathering(name: str) -> float:
    """Return the seconds in which a preset's slowest stage gathers its parameters.

    The preset has sharded state. This is the part of its optimizer step that exceeds its share of
    the step itself.
    """
    whole, sharded = (
        parse_job(preset_text(name, shard_optimizer=shard)) for shard in (False, True)
    )
    share = replace(ESTIMATED[name][1], shard_optimizer=True).stepped_share
    return max(
        sharded_time - share * whole_time
        for sharded_time, whole_time in zip(
            sharded.time.optimizer, whole.time.optimizer, strict=True
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset", nargs="+", default=["llama-3-8b", "llama-3-70b"], choices=sorted(ESTIMATED)
    )
    parser.add_argument("--steps", type=int, default=400_000)
    parser.add_argument("--failed", nargs="*", default=["2.1"])
    options = parser.parse_args()
    for name in options.preset:
        job = parse_job(preset_text(name))
        gather = gathering(name)
        for failed in ([], [Worker.parse(worker) for worker in options.failed]):
            schedule = plan_only(
                PlanOptions(steps=options.steps, layers="move"), job, failed
            ).schedule
            transfer, period = schedule.times.transfer, schedule.period_ticks
            as_planned = replayed(schedule, transfer, queued=False)
            queued, free = (
                replayed(schedule, transfer, queued=True),
                replayed(schedule, 0, queued=False),
            )
            moving = compute_transition(schedule, job).seconds or 0.0
            print(
                f"{name}, {len(failed)} down: period {schedule.seconds(period):.4g} s, a transfer "
                f"{schedule.seconds(transfer):.4g} s; replayed {as_planned / period:.4f}, queued "
                f"{queued / period:.4f}, free {free / period:.4f}; gathering "
                f"{gather / schedule.seconds(period):.2%} of it; what moves takes a link "
                f"{moving / schedule.seconds(period):.1f} iterations",
                flush=True,
            )


if __name__ == "__main__":
    main()
