"""Group failure sets into patterns that are equal up to symmetry.

A pattern is named by its key.

Pipelines are interchangeable if they read equally many micro-batches and their workers run at the
same speeds with the same room. They then form a *class*. A pattern says how many pipelines of each
class have lost which columns. Its key is text: `2+2,3` means that one pipeline has lost the worker
of column 2, and another one those of columns 2 and 3. With several classes the class comes first:
`1:2+0:2,3`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from slipstream.schedules.schedule import Grid, Memory, Times, Worker

Columns = tuple[int, ...]
"""Columns that one pipeline has lost, ascending."""
BrokenPipeline = tuple[int, Columns]
"""Pipeline with failures, as (class of interchangeable pipelines, columns that it has lost)."""
Pattern = tuple[BrokenPipeline, ...]
"""Failures of interchangeable pipelines, sorted: (class, lost columns) of each."""


def pipeline_classes(grid: Grid, times: Times, memory: Memory | None) -> tuple[int, ...]:
    """Return a class number for each pipeline: pipelines of one class are interchangeable.

    They have equal numbers of micro-batches, speeds and memory. Classes are numbered in the order
    of their first pipelines.
    """
    deviations: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for worker, per_mille in times.per_mille_of.items():
        deviations[worker.pipeline].append(("slow", worker.column, per_mille))
    for limit in (memory.capacity_of if memory else None) or ():
        deviations[limit.worker.pipeline].append(("room", limit.worker.column, limit.capacity))
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault((count, tuple(sorted(deviations[pipeline]))), len(numbers))
                 for pipeline, count in enumerate(grid.microbatches))


def columns_by_pipeline(failed: Iterable[Worker]) -> Mapping[int, Columns]:
    """Return the failed columns, ascending, of each pipeline with failures."""
    lost: dict[int, list[int]] = defaultdict(list)
    for pipeline, column in sorted(failed):
        lost[pipeline].append(column)
    return {pipeline: tuple(columns) for pipeline, columns in lost.items()}


def pattern_of(failed: Iterable[Worker], classes: Sequence[int]) -> Pattern:
    """Return the pattern of these failures.

    It is sorted pairs (class, failed columns), one for each pipeline with failures. Interchangeable
    pipelines, of equal numbers in `classes` (`pipeline_classes`), are not told apart.
    """
    return tuple(
        sorted(
            (classes[pipeline], columns)
            for pipeline, columns in columns_by_pipeline(failed).items()
        )
    )


def count_key(failures: int, slow: Worker | None = None) -> str:
    """Return the key of the table entry for a number of failures.

    In this entry the planner chose which roles nobody plays. With `slow`, it is the entry for the
    case that this slow worker is among the failed ones: no role is planned at its speed.
    """
    return f"count-{failures}" + ("" if slow is None else f"-with-{slow}")


def pattern_key(pattern: Pattern, classes: Sequence[int]) -> str:
    """Return the key of the table entry for a pattern of failures.

    It names the failed columns of each pipeline, after its class number if `classes` has several
    (`pipeline_classes`).
    """
    several = any(classes)
    texts = []
    for kind, columns in pattern:
        texts.append((f"{kind}:" if several else "") + ",".join(map(str, columns)))
    return "pattern-" + "+".join(texts)


def settled_key(key: str) -> str:
    """Return the key of the rebalanced entry for the same failures as this key."""
    return f"settled-{key}"


def roles_key(key: str) -> str:
    """Return the key of the entry with moved roles for the same failures."""
    return f"roles-{key}"


def representative_failures(pattern: Pattern, classes: Sequence[int]) -> tuple[Worker, ...]:
    """Return failed workers, sorted, that form this pattern.

    In each class, its first pipelines have the failures, in the order of the pattern; `classes` has
    the class number of each pipeline.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, kind in enumerate(classes):
        members[kind].append(index)
    failed = []
    for kind, columns in pattern:
        pipeline = members[kind].pop(0)
        failed += [Worker(pipeline, column) for column in columns]
    return tuple(sorted(failed))


def failure_patterns(failures: int, columns: int, classes: Sequence[int]) -> Iterator[Pattern]:
    """Iterate over all patterns of exactly `failures` failures in this many columns, each once.

    Patterns that differ only by an exchange of interchangeable pipelines count as one. Some leave a
    column without live workers. `classes` has a number for each pipeline, equal for interchangeable
    ones.
    """
    lost = [
        chosen
        for size in range(1, min(columns, failures) + 1)
        for chosen in combinations(range(columns), size)
    ]
    kinds = [(kind, chosen) for kind in set(classes) for chosen in lost]
    yield from _patterns_of_kinds(failures, sorted(kinds), Counter(classes))


def _patterns_of_kinds(
    failures: int, kinds: Sequence[BrokenPipeline], room: Counter[int]
) -> Iterator[Pattern]:
    """Iterate over patterns of this number of failures whose pipelines are of `kinds`."""
    if failures == 0:
        yield ()
        return
    for index, broken in enumerate(kinds):
        kind, lost = broken
        if len(lost) <= failures and room[kind]:
            for rest in _patterns_of_kinds(
                failures - len(lost), kinds[index:], room - Counter({kind: 1})
            ):
                yield (broken, *rest)


def dead_column(failed: Iterable[Worker], grid: Grid) -> int | None:
    """Return the first column of which a layer is lost; None if there is none.

    No single live worker holds all of its layers. With two directions, the workers of another
    column may hold what a column without live workers held.
    """
    down = Counter(worker.column for worker in failed)
    empty = [column for column in range(grid.columns) if down[column] >= grid.pipelines]
    in_other_columns = {
        layers for column, layers in enumerate(grid.held_layers_by_column) if column not in empty
    }
    return next(
        (column for column in empty if grid.held_layers_by_column[column] not in in_other_columns),
        None,
    )
