"""Precedence rules: which op of a micro-batch must end before another one may start.

`RULES` is the only place that states them. The graph of a schedule, the arrays of the planner, the CP-SAT model and the
timeline page expand it. The checker has rules of its own, because it judges what is made from these.
"""

from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

from schedules.schedule import Op, OpKind

Tensor = Literal["activation", "gradient"]
OpKey = tuple[OpKind, int, int, int]
"""(kind, stage, pipeline, microbatch)."""


class Rule(NamedTuple):
    """An op of `kind` waits for the op `awaited` of the same micro-batch, `step` stages further along its chain.

    Where the chain has no such stage, there is nothing to wait for.
    """

    kind: OpKind
    position: Literal["first", "last", "any"]
    """The stages of a chain at which the rule holds."""
    awaited: OpKind
    step: Literal[-1, 0, 1]
    tensor: Tensor | None
    """What the op takes from the one it waits for: between two workers it needs `times.transfer` to arrive."""

    def positions(self, depth: int) -> range:
        """Where in a chain of so many stages an op waits by this rule."""
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
    assert op.stage is not None and op.pipeline is not None and op.microbatch is not None
    return (op.kind, op.stage, op.pipeline, op.microbatch)


def waits(key: OpKey, depth: int) -> Iterator[tuple[OpKey, Rule]]:
    """The ops that must end before this one may start, each with the rule that says so."""
    kind, stage, pipeline, microbatch = key
    for rule in _rules_of(kind, stage % depth, depth):
        yield (rule.awaited, stage + rule.step, pipeline, microbatch), rule


def producers(key: OpKey, depth: int) -> Iterator[OpKey]:
    """The ops that must end before this one may start."""
    return (producer for producer, _ in waits(key, depth))


def consumers(key: OpKey, depth: int) -> Iterator[tuple[OpKey, Rule]]:
    """The ops that may not start before this one has ended, each with the rule that says so."""
    kind, stage, pipeline, microbatch = key
    for rule in RULES:
        if rule.awaited == kind and stage % depth - rule.step in rule.positions(depth):
            yield (rule.kind, stage - rule.step, pipeline, microbatch), rule


@cache
def _rules_of(kind: OpKind, position: int, depth: int) -> tuple[Rule, ...]:
    return tuple(rule for rule in RULES if rule.kind == kind and position in rule.positions(depth))
