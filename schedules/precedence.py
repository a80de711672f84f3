"""State which op of a micro-batch must end before another one may start.

The planner, the CP-SAT model, the graph of a schedule, and the timeline page derive these waits
from `RULES`. The checker states them again on its own, because it judges the others.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

from slipstream.schedules.schedule import Op, OpKind

Tensor = Literal["activation", "gradient"]


class OpKey(NamedTuple):
    """Identity of a compute op, whichever worker runs it and whenever.

    A key equals the tuple of its fields, and has the same hash.
    """

    kind: OpKind
    slice: int
    pipeline: int
    microbatch: int


class Rule(NamedTuple):
    """Rule that an op of `kind` waits for the op `awaited` of the same micro-batch.

    The awaited op is `step` (-1, 0 or 1) slices further on the route. If there is no such slice,
    the rule does not apply.
    """

    kind: OpKind
    position: Literal["first", "last", "any"]
    """Slices of a route to which the rule applies."""
    awaited: OpKind
    step: Literal[-1, 0, 1]
    tensor: Tensor | None
    """Tensor that the op takes from the awaited op, or None.

    If another worker sends it, it takes `times.transfer` ticks.
    """

    def positions_in_route(self, depth: int) -> range:
        """Return the positions, in a route of `depth` slices, at which this rule applies."""
        first, last = {"first": (0, 0), "last": (depth - 1, depth - 1), "any": (0, depth - 1)}[
            self.position
        ]
        # Only positions from which `step` stays within the route.
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
    """Return the key of a compute op."""
    assert op.slice is not None and op.pipeline is not None and op.microbatch is not None
    return OpKey(op.kind, op.slice, op.pipeline, op.microbatch)


def producers_with_rules(key: OpKey, path: Sequence[int]) -> Iterator[tuple[OpKey, Rule]]:
    """Iterate over the ops that an op waits for, by key, each with its rule.

    The rules are of `RULES`; `path` has the slices of the micro-batch's route, in order. An op at a
    slice that is not in `path` waits for nothing.
    """
    kind, slice, pipeline, microbatch = key
    if slice not in path:
        return
    position = path.index(slice)
    for rule in _rules_of(kind, position, len(path)):
        yield OpKey(rule.awaited, path[position + rule.step], pipeline, microbatch), rule


def producer_keys(key: OpKey, path: Sequence[int]) -> Iterator[OpKey]:
    """Iterate over the keys of the ops that an op waits for. The slices of its route are `path`."""
    return (producer for producer, _ in producers_with_rules(key, path))


def consumers_with_rules(key: OpKey, path: Sequence[int]) -> Iterator[tuple[OpKey, Rule]]:
    """Iterate over the ops that wait for an op, by key, each with its rule.

    The rules are of `RULES`; `path` has the slices of the micro-batch's route, in order. Nothing
    waits for an op at a slice that is not in `path`.
    """
    kind, slice, pipeline, microbatch = key
    if slice not in path:
        return
    position = path.index(slice)
    for rule in _rules_awaiting(kind, position, len(path)):
        yield OpKey(rule.kind, path[position - rule.step], pipeline, microbatch), rule


@cache
def _rules_awaiting(kind: OpKind, position: int, length: int) -> tuple[Rule, ...]:
    """Return the `RULES` by which others await an op of `kind` at `position`."""
    return tuple(
        rule
        for rule in RULES
        if rule.awaited == kind and position - rule.step in rule.positions_in_route(length)
    )


@cache
def _rules_of(kind: OpKind, position: int, length: int) -> tuple[Rule, ...]:
    """Return the `RULES` by which an op of `kind` at `position` awaits others."""
    return tuple(
        rule for rule in RULES if rule.kind == kind and position in rule.positions_in_route(length)
    )
