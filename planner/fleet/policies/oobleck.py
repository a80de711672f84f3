"""Oobleck (SOSP 2023): pipelines of several lengths, from templates planned ahead."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, combinations
from typing import NamedTuple

from planner.fleet.availability import Change
from planner.fleet.policy import Cause, Phase, Policy, Setting
from planner.job.file import Job

PIECES = 8
"""Layers that a stage is taken to consist of, where the job does not say."""
MOST_LAYERS = 128
"""Beyond it, layers are taken together."""


class Template(NamedTuple):
    """A pipeline of some length: an iteration of n micro-batches takes `fill` + n x `step` seconds."""

    step: float
    """Of the slowest stage, forward and backward."""
    fill: float

    def seconds(self, microbatches: int) -> float:
        """Time of an iteration without all-reduce and optimizer."""
        return self.fill + microbatches * self.step if microbatches else 0.0


def layers_of(job: Job) -> tuple[float, ...]:
    """Forward and backward seconds of each layer: equal parts of its stage."""
    depth = job.depth
    pieces = max(1, min(PIECES, MOST_LAYERS // depth))
    counts = [pieces] * depth
    if job.layers and sum(job.layers[:depth]) <= MOST_LAYERS:
        counts = [max(1, count) for count in job.layers[:depth]]
    totals = (sum(times) for times in zip(job.time.forward[:depth], job.time.backward_input[:depth],
                                          job.time.backward_weight[:depth], strict=True))
    return tuple(total / count for total, count in zip(totals, counts, strict=True) for _ in range(count))


@lru_cache(maxsize=1024)
def template(layers: tuple[float, ...], nodes: int) -> Template:
    """The best contiguous split of layers (forward + backward seconds each) over nodes, by Oobleck's formula.

    With c_i the time of stage i = 0..S-1 and k* the slowest, the least T = T1 + T2 + T3 where

        T1 = sum of c_i;  T2 = (N - S + k* - 1) c_k*;  T3 = sum of c_i for i >= k*;  N = 4 S micro-batches.

    Exact: every range of layers is tried as the slowest stage, with as few stages before it as can do.
    """
    stages = min(nodes, len(layers))
    prefix = [0.0, *accumulate(layers)]
    least = _least_stages(prefix)
    best, found = math.inf, None
    parts = combinations(range(len(layers) + 1), 2)
    for first, last in sorted(parts, key=lambda part: prefix[part[1]] - prefix[part[0]]):
        slowest = prefix[last] - prefix[first]
        if prefix[-1] + (3 * stages - 1) * slowest >= best:
            break
        after = least(last, len(layers), slowest)
        before = max(least(0, first, slowest), stages - 1 - (len(layers) - last))
        if before > first or after > stages - 1 - before:
            continue
        tail = prefix[-1] - prefix[first]
        total = prefix[-1] + (3 * stages + before - 1) * slowest + tail
        if total < best:
            best, found = total, Template(slowest, prefix[-1] + (before - stages - 1) * slowest + tail)
    assert found is not None
    return found


def _least_stages(prefix: Sequence[float]) -> Callable[[int, int, float], int]:
    """A function: how many stages of at most so many seconds layers first..last - 1 need at least."""
    def least(first: int, last: int, seconds: float) -> int:
        count, position = 0, first
        while position < last:
            end = bisect_right(prefix, prefix[position] + seconds * (1 + 1e-9), position, last + 1) - 1
            if end == position:
                return len(prefix)  # a layer longer than that
            count, position = count + 1, end
        return count

    return least


class Oobleck(Policy):
    """Pipelines shrink, borrow or merge at a failure; only the split of the batch is solved anew."""

    name = "oobleck"
    title = "Oobleck: pipelines of several lengths"
    assumes = ("starts as the job's grid, its stages cut into layers; a pipeline needs at least half the nodes it "
               "starts with; the batch is split for the shortest iteration; who joins waits for the next failure; a "
               "failure loses half an iteration and the published reconfiguration time; parameters survive while "
               "some pipeline can be formed")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._nodes: list[list[int]] = []
        self._idle: list[int] = []
        self._least = -(-setting.stages // 2)

    @property
    def whole_rate(self) -> float:
        """1F1B on the job's own grid."""
        return self.speeds.usual(self.setting.pipelines)

    def steady(self, failures: int) -> float:
        """The better of failures spread over pipelines and failures that take whole pipelines away."""
        pipelines, stages = self.setting.pipelines, self.setting.stages
        return max(self.rate(sizes) for sizes in (spread_sizes(pipelines, stages, failures),
                                                  stacked_sizes(pipelines, stages, failures))
                   if all(size == 0 or size >= self._least for size in sizes)) if failures else self.whole_rate

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Pipelines of the job's length where all of their machines are there, what is left over dealt to them."""
        self._idle = sorted(live)
        self._nodes = []
        self._instantiate()
        return self.train(0.0, self.rate([len(nodes) for nodes in self._nodes]))

    def change(self, change: Change, left: Sequence[Phase]) -> Sequence[Phase]:
        """Newcomers wait; at a failure in a pipeline, instantiate templates of the new lengths."""
        gone = set(change.removed)
        hit = any(gone.intersection(nodes) for nodes in self._nodes)
        self._idle = [machine for machine in (*self._idle, *change.added) if machine not in gone]
        self._nodes = [[machine for machine in nodes if machine not in gone] for nodes in self._nodes]
        waiting = left[0].cause is Cause.WAIT
        if not hit and not waiting:
            return left
        self._instantiate()
        rate = self.rate([len(nodes) for nodes in self._nodes])
        if self.stopped(left):
            return self.restart(change.seconds, rate)
        return self.train(change.seconds, rate, Phase(Cause.SWITCH, self.costs.oobleck_seconds),
                          lost_samples=self.lost_samples(left, hit=hit))

    def _instantiate(self) -> None:
        """New lengths: idle nodes fill short pipelines or form new ones; too short ones borrow, or merge."""
        idle, self._idle = self._idle, []
        self._nodes = [nodes for nodes in self._nodes if nodes]
        for nodes in sorted(self._nodes, key=len):
            while idle and len(nodes) < self.setting.stages:
                nodes.append(idle.pop())
        while len(idle) >= self._least and len(self._nodes) < self.setting.pipelines:
            self._nodes.append(idle[:self.setting.stages])
            del idle[:self.setting.stages]
        self._mend()
        if not self._nodes:
            self._idle = idle
            return
        for machine in idle:
            min(self._nodes, key=len).append(machine)

    def _mend(self) -> None:
        """Pipelines with too few nodes borrow from the largest, or else give theirs away."""
        for nodes in sorted(self._nodes, key=len):
            while len(nodes) < self._least and len(largest := max(self._nodes, key=len)) > self._least:
                nodes.append(largest.pop())
            if len(nodes) < self._least:
                self._nodes.remove(nodes)
                for machine in nodes:
                    if self._nodes:
                        min(self._nodes, key=len).append(machine)
                    else:
                        self._idle.append(machine)

    def rate(self, sizes: Sequence[int]) -> float:
        """Samples per second of pipelines with so many nodes, the batch split for the shortest iteration."""
        job = self.speeds.job
        counts = Counter(size for size in sizes if size)
        if not counts:
            return 0.0
        layers, microbatches = layers_of(job), sum(job.microbatches)
        whole = _iteration(layers, ((self.setting.stages, self.setting.pipelines),), microbatches)
        clock = job.time
        step = max(map(sum, zip(clock.all_reduce, clock.optimizer, strict=True)))
        now = _iteration(layers, tuple(sorted(counts.items())), microbatches)
        return self.whole_rate * (whole + step) / (now + step)


@lru_cache(maxsize=65536)
def _iteration(layers: tuple[float, ...], lengths: tuple[tuple[int, int], ...], microbatches: int) -> float:
    """Seconds of the longest pipeline, for (nodes, how many such pipelines), micro-batches dealt for the least."""
    kinds = [(template(layers, nodes), count) for nodes, count in lengths]

    def room(seconds: float) -> int:
        return sum(count * max(0, math.floor((seconds - kind.fill) / kind.step + 1e-9)) for kind, count in kinds)

    low, high = 0.0, min(kind.seconds(-(-microbatches // count)) for kind, count in kinds)
    for _ in range(60):
        middle = (low + high) / 2
        if room(middle) >= microbatches:
            high = middle
        else:
            low = middle
    return high


def spread_sizes(pipelines: int, stages: int, failures: int) -> list[int]:
    """Nodes by pipeline when failures are spread over pipelines."""
    return [stages - failures // pipelines - (index < failures % pipelines) for index in range(pipelines)]


def stacked_sizes(pipelines: int, stages: int, failures: int) -> list[int]:
    """Nodes by pipeline when failures take whole pipelines away; what is left of the last broken one joins others."""
    gone, rest = divmod(failures, stages)
    sizes = [stages] * (pipelines - gone - (rest > 0))
    for index in range(stages - rest if rest else 0):
        if sizes:
            sizes[index % len(sizes)] += 1
    return sizes
