"""Answer for every placement: orders of columns, numbers of stages, divisions of the layers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations
from typing import Any

from tests.exact.answer import Answer, answer
from tests.exact.model import EFFORT
from tests.exact.question import NotCoveredError, Part, Question, read_question

BETTER = 1 - Fraction(1, 10**9)
"""Share of a period that another placement must not exceed to be better."""


def answer_any_placement(job: Mapping[str, Any], *, backward: str, optimizer: str,
                         at_most: Fraction | None = None, effort: float = EFFORT) -> Answer:
    """Return the shortest period over all placements of a job's layers, with all workers alive.

    The placements that are left share the effort that is left.
    Raises NotCoveredError if the first stage alone has no I: it moves with the first layers.
    """
    given = read_question(job, scope="own micro-batches", backward=backward, optimizer=optimizer)
    layers = read_question(job, scope="any layers").parts
    if not given.parts[0].times["I"] and any(part.times["I"] for part in given.parts):
        raise NotCoveredError(
            "time.backward_input is 0 for the first stage only, which moves with its place"
        )
    best = Answer(lower=Fraction(0), upper=None, schedule=None, is_impossible=True)
    lower, taken = [], 0.0
    placements = list(_placements(given, layers))
    for number, question in enumerate(placements):
        share = max(0.0, effort - taken) / (len(placements) - number)
        found = answer(question, at_most=at_most if best.upper is None else best.upper * BETTER,
                       effort=share)
        taken += found.effort
        lower.append(found.lower)
        if found.upper is not None and (best.upper is None or found.upper < best.upper):
            best = found
        elif not found.is_impossible and best.upper is None:
            best = replace(best, is_impossible=False)
    least = min(lower) if best.upper is None else min(best.upper, *lower)
    return replace(best, lower=least, effort=taken)


def _placements(given: Question, layers: Sequence[Part]) -> Iterator[Question]:
    """Yield the question of each placement, with the room that is left."""
    for chunks in range(1, len(layers) // given.columns + 1):
        depth = given.columns * chunks
        orders = set(permutations(list(range(given.columns)) * chunks))
        chains = [(order,) for order in sorted(orders)]
        if chunks == 1 and given.columns % 2 == 0:
            chains.append((tuple(range(given.columns)), tuple(reversed(range(given.columns)))))
        for cuts in combinations(range(1, len(layers)), depth - 1):
            ends = (*cuts, len(layers))
            stages = tuple(zip((0, *cuts), ends, strict=True))
            parts = tuple(_join(layers[first:end]) for first, end in stages)
            for columns in chains:
                yield _placed(given, columns, stages, parts)


def _join(layers: Sequence[Part]) -> Part:
    """Return the stage of some layers."""
    def total(values: Iterator[Fraction]) -> Fraction:
        return sum(values, Fraction(0))

    return Part(layers[0].first, layers[-1].end,
                {kind: total(layer.times[kind] for layer in layers) for kind in layers[0].times},
                total(layer.activation for layer in layers), total(layer.stash for layer in layers),
                total(layer.weights for layer in layers))


def _placed(given: Question, chains: tuple[tuple[int, ...], ...],
            stages: tuple[tuple[int, int], ...], parts: tuple[Part, ...]) -> Question:
    """Return the question with other stages, in the same total memory of each worker."""
    held = tuple(frozenset(stage for chain in chains for stage, owner in enumerate(chain)
                           if owner == column) for column in range(given.columns))
    placed = replace(given, chains=chains, stages=stages, parts=parts, held=held, has_layers=True)
    if given.capacity is None:
        return placed
    return replace(placed, capacity=tuple(
        room + given.weights(column) - placed.weights(column)
        for column, room in enumerate(given.capacity)))
