"""Answer for every placement: orders of columns, numbers of stages, divisions of the layers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, permutations
from typing import Any

from tests.exact.answer import Answer, answer
from tests.exact.model import EFFORT
from tests.exact.question import NotCoveredError, Question, read_question


def answer_any_placement(
    job: Mapping[str, Any],
    *,
    backward: str,
    optimizer: str,
    at_most: Fraction | None = None,
    effort: float = EFFORT,
) -> Answer:
    """Return the shortest period over all placements of a job's layers, with all workers alive.

    The placements that are left share the effort that is left.
    Raises NotCoveredError if the first stage alone has no I: it moves with the first layers.
    """
    question = read_question(job, scope="own micro-batches", backward=backward, optimizer=optimizer)
    inputs = [part.costs["backward_input"] for part in question.parts]
    if not inputs[0] and any(inputs):
        raise NotCoveredError(
            "time.backward_input is 0 for the first stage only, which moves with its place"
        )
    best = Answer(lower=Fraction(0), is_impossible=True)
    lower, taken = [], 0.0
    placements = list(_place(question))
    for number, placed in enumerate(placements):
        if best.upper is not None:
            at_most = best.upper - question.tick
        share = max(0.0, effort - taken) / (len(placements) - number)
        result = answer(placed, at_most=at_most, effort=share)
        taken += result.effort
        lower.append(result.lower)
        if result.upper is not None:
            best = result
        elif best.upper is None and not result.is_impossible:
            best = replace(best, is_impossible=False)
    if best.upper is not None:
        lower.append(best.upper)
    return replace(best, lower=min(lower), effort=taken)


def _place(question: Question) -> Iterator[Question]:
    """Yield the question of each placement."""
    columns, depth_of_all = range(question.columns), len(question.layers)
    for chunks in range(1, depth_of_all // question.columns + 1):
        orders = sorted(set(permutations([*columns] * chunks)))
        directions = [(order,) for order in orders]
        if chunks == 1 and question.columns % 2 == 0:
            directions.append((tuple(columns), tuple(reversed(columns))))
        for cuts in combinations(range(1, depth_of_all), question.columns * chunks - 1):
            stages = tuple(pairwise((0, *cuts, depth_of_all)))
            for chains in directions:
                yield replace(question, chains=chains, stages=stages)
