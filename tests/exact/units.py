"""Whole numbers for the solver: ticks and units of memory that make a question's numbers whole.

Finer numbers are rounded. Rounded up, every solution is one of the question; rounded down, every bound is.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from tests.exact.question import Question, Worker

FINEST = 10**6
"""Largest number of ticks of the longest op, and of units in the largest amount of memory."""


@dataclass(frozen=True, slots=True)
class Units:
    """Whole numbers of one question, rounded to one side."""

    question: Question
    up: bool
    tick: Fraction
    unit: Fraction
    is_exact: bool
    """True if nothing is rounded, and so both sides are the same."""

    def ticks(self, kind: str, part: int, worker: Worker | None = None) -> int:
        """Return the ticks of an op of a part; A and O take no worker, and slow ones compute longer."""
        if kind == "B":
            return self.ticks("I", part, worker) + self.ticks("W", part, worker)
        usual = self.whole(self.question.parts[part].ticks[kind] / self.tick)
        factor = Fraction(1) if worker is None else self.question.slow.get(worker, Fraction(1))
        return self.whole(usual * factor)

    @property
    def transfer(self) -> int:
        """Ticks of a transfer."""
        return self.whole(self.question.transfer / self.tick)

    def need(self, amount: Fraction) -> int:
        """Return an amount of memory that is taken, in units."""
        return self.whole(amount / self.unit)

    def room(self, amount: Fraction) -> int:
        """Return an amount of memory that is there, in units: rounded to the other side."""
        return math.floor(amount / self.unit) if self.up else math.ceil(amount / self.unit)

    def activation(self, part: int) -> int:
        """Return the memory of a part from F to I, in units."""
        return self.need(self.question.parts[part].activation)

    def stash(self, part: int) -> int:
        """Return the memory of a part from I to W, in units.

        A slice of several layers frees all of its activations at once. If a layer's stash takes more
        than its activation, single layers may then hold more than the slice. For a bound (not `up`),
        such a stash is counted as the activation, which no schedule can exceed by that.
        """
        if self.question.backward == "fused":
            return 0
        own = self.question.parts[part]
        return self.need(own.stash if self.up or self.are_cuts_free else min(own.stash, own.activation))

    @property
    def are_cuts_free(self) -> bool:
        """True if cutting a slice into its parts takes no more memory."""
        question = self.question
        return len(question.parts) == question.depth or question.backward == "fused" or all(
            part.stash <= part.activation for part in question.parts)

    def whole(self, value: Fraction) -> int:
        """Round a number to this side."""
        return math.ceil(value) if self.up else math.floor(value)


def units_of(question: Question, *, up: bool) -> Units:
    """Choose the coarsest tick and unit that make all numbers of a question whole, within limits."""
    factors = {Fraction(1), *question.slow.values()}
    times = [part.ticks[kind] for part in question.parts for kind in "AO"] + [question.transfer]
    times += [part.ticks[kind] * factor for part in question.parts for kind in "FIW" for factor in factors]
    sizes = [amount for part in question.parts for amount in (part.activation, part.stash, part.weights)]
    sizes += [*(question.capacity or ()), *question.capacity_of.values()]
    tick, is_whole = _coarsest(times)
    unit, are_sizes_whole = _coarsest(sizes)
    exact = Units(question, up, tick, unit, is_exact=is_whole and are_sizes_whole)
    return exact if exact.are_cuts_free else Units(question, up, tick, unit, is_exact=False)


def _coarsest(values: Iterable[Fraction]) -> tuple[Fraction, bool]:
    """Return the greatest common divisor of the values, or a coarser unit, and whether it divides all."""
    positive = [value for value in values if value]
    if not positive:
        return Fraction(1), True
    common = math.lcm(*(value.denominator for value in positive))
    divisor = Fraction(math.gcd(*(int(value * common) for value in positive)), common)
    finest = max(positive) / FINEST
    return max(divisor, finest), divisor >= finest
