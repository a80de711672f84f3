"""Precedence rules: which op of a micro-batch must end before another one may start.

`RULES` is the only place that states them. The graph of a schedule, the arrays of the planner, the CP-SAT model and the
timeline page expand it. The checker has rules of its own, because it judges what is made from these.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

from slipstream.schedules.schedule import Op, OpKind

Tensor = Literal["activation", "gradient"]
OpKey = tuple[OpKind, int, int, int]
"""(kind, slice, pipeline, microbatch)."""


class Rule(NamedTuple):
    """An op of `kind` waits for the op `awaited` of the same micro-batch, `step` slices further along its route.

    Where the route has no such slice, there is nothing to wait for.
    """

    kind: OpKind
    position: Literal["first", "last", "any"]
    """The slices of a route at which the rule holds."""
    awaited: OpKind
    step: Literal[-1, 0, 1]
    tensor: Tensor | None
    """What the op takes from the one it waits for: between two workers it needs `times.transfer` to arrive."""

    def positions(self, depth: int) -> range:
        """Where in a route of so many slices an op waits by this rule."""
        first, last = {"first": (0, 0), "last": (depth - 1, depth - 1), "any": (0, depth - 1)}[self.position]
        return range(max(first, -self.step), min(last, depth - 1 - self.step) + 1)


RULES = (
    Rule(OpKind.F, "any", OpKind.F, -1, "activation"),
    Rule(OpKind.I, "any", OpKind.I, +1, "gradient"),
    Rule(OpKind.I, "last", OpKind.F, 0, None),
    Rule(OpKind.B, "any", OpKind.B, +1, "gradient"),
    Rule(OpKind.B, "last", OpKind.F, 0, None),
    Rule(OpKind.W, "any", OpKind.I, 0, None),
)


def op_key(op: Op) -> OpKey:
    """The identity of a compute op, on any worker."""
    assert op.slice is not None and op.pipeline is not None and op.microbatch is not None
    return (op.kind, op.slice, op.pipeline, op.microbatch)


def waits(key: OpKey, path: Sequence[int]) -> Iterator[tuple[OpKey, Rule]]:
    """The ops that must end before this one may start, each with the rule that says so.

    `path`: the slices of the micro-batch's route, in order. A slice that is not among them waits for nothing.
    """
    kind, slice, pipeline, microbatch = key
    if slice not in path:
        return
    position = path.index(slice)
    for rule in _rules_of(kind, position, len(path)):
        yield (rule.awaited, path[position + rule.step], pipeline, microbatch), rule


def producers(key: OpKey, path: Sequence[int]) -> Iterator[OpKey]:
    """The ops that must end before this one may start; `path` as for `waits`."""
    return (producer for producer, _ in waits(key, path))


def consumers(key: OpKey, path: Sequence[int]) -> Iterator[tuple[OpKey, Rule]]:
    """The ops that may not start before this one has ended, each with the rule that says so; `path` as for `waits`."""
    kind, slice, pipeline, microbatch = key
    if slice not in path:
        return
    position = path.index(slice)
    for rule in _rules_awaiting(kind, position, len(path)):
        yield (rule.kind, path[position - rule.step], pipeline, microbatch), rule


@cache
def _rules_awaiting(kind: OpKind, position: int, length: int) -> tuple[Rule, ...]:
    return tuple(rule for rule in RULES if rule.awaited == kind and position - rule.step in rule.positions(length))


@cache
def _rules_of(kind: OpKind, position: int, length: int) -> tuple[Rule, ...]:
    return tuple(rule for rule in RULES if rule.kind == kind and position in rule.positions(length))
