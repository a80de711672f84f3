"""Which of some numbers are joined by pairs, directly or through others."""

from collections.abc import Iterable


def joined(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """[number] the least of all that a number is joined with: union-find with path halving.

    networkx has one, too, but a plan should not wait a tenth of a second for its import.
    """
    above = list(range(count))

    def top(number: int) -> int:
        while above[number] != number:
            above[number] = number = above[above[number]]
        return number

    for one, other in pairs:
        first, second = top(one), top(other)
        above[max(first, second)] = min(first, second)
    return [top(number) for number in range(count)]
