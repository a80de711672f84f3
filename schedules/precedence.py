"""State which op of a micro-batch must end before another one may start.

The graph of a schedule, the arrays of the planner, the CP-SAT model and the timeline page are
derived from `RULES`. The checker states the rules again, because it judges what is derived from
these.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

from slipstream.schedules.schedule import Op, OpKind

Tensor = Literal["activation", "gradient"]
OpKey = tuple[OpKind, int, int, int]
"""Identity of a compute op: (kind, slice, pipeline, microbatch)."""


class Rule(NamedTuple):
    """Rule that an op of `kind` waits for the op `awaited` of the same micro-batch.

    That op is at the slice `step` (-1, 0 or 1) further on the route. If the route has no such
    slice, the op waits for nothing.
    """

    kind: OpKind
    position: Literal["first", "last", "any"]
    """Slices of a route to which the rule applies."""
    awaited: OpKind
    step: Literal[-1, 0, 1]
    tensor: Tensor | None
    """Tensor taken from the awaited op; between workers it takes `times.transfer`. Or None."""

    def positions_in_route(self, depth: int) -> range:
        """Return the positions in a route of `depth` slices at which this rule counts."""
        first, last = {"first": (0, 0), "last": (depth - 1, depth - 1), "any": (0, depth - 1)}[
            self.position
        ]
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
    """Return a compute op's key (kind, slice, pipeline, microbatch), on any worker."""
    assert op.slice is not None and op.pipeline is not None and op.microbatch is not None
    return (op.kind, op.slice, op.pipeline, op.microbatch)


def producers_with_rules(key: OpKey, path: Sequence[int]) -> Iterator[tuple[OpKey, Rule]]:
    """Iterate over the ops that this op waits for, each with its `Rule`.

    Ops are given by key, and the rules are of `RULES`; `path` is the slices of the micro-batch's
    route, in order. An op at a slice that is not in it waits for nothing.
    """
    kind, slice, pipeline, microbatch = key
    if slice not in path:
        return
    position = path.index(slice)
    for rule in _rules_of(kind, position, len(path)):
        yield (rule.awaited, path[position + rule.step], pipeline, microbatch), rule


def producer_keys(key: OpKey, path: Sequence[int]) -> Iterator[OpKey]:
    """Iterate over the keys of ops that an op on `path` must wait for."""
    return (producer for producer, _ in producers_with_rules(key, path))


def consumers_with_rules(key: OpKey, path: Sequence[int]) -> Iterator[tuple[OpKey, Rule]]:
    """Iterate over the ops that wait for this op, each with its `Rule`.

    Ops are given by key, and the rules are of `RULES`; `path` is the slices of the micro-batch's
    route, in order.
    """
    kind, slice, pipeline, microbatch = key
    if slice not in path:
        return
    position = path.index(slice)
    for rule in _rules_awaiting(kind, position, len(path)):
        yield (rule.kind, path[position - rule.step], pipeline, microbatch), rule


@cache
def _rules_awaiting(kind: OpKind, position: int, length: int) -> tuple[Rule, ...]:
    """Return the `RULES` by which other ops wait for an op of this kind."""
    return tuple(rule for rule in RULES if rule.awaited == kind
                 and position - rule.step in rule.positions_in_route(length))


@cache
def _rules_of(kind: OpKind, position: int, length: int) -> tuple[Rule, ...]:
    """Return the `RULES` by which an op of this kind waits for others."""
    return tuple(
        rule for rule in RULES if rule.kind == kind and position in rule.positions_in_route(length)
    )
