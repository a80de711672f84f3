"""Group sets of failures into patterns, equal up to symmetry and named by a key.

Pipelines are interchangeable if they read equally many micro-batches and their workers run at the
same speeds with the same memory. They then form a *class*. A *pattern* says how many pipelines of
each class have lost which columns. Its key is text: `pattern-2+2,3` means that one pipeline has
lost the worker of column 2, and another one those of columns 2 and 3. With several classes the
class comes first: `pattern-0:2,3+1:2`.
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
"""Sorted pairs (class, lost columns), one for each pipeline with failures."""


def pipeline_classes(grid: Grid, times: Times, memory: Memory | None) -> tuple[int, ...]:
    """Return the number of each pipeline's class; interchangeable pipelines have the same.

    Pipelines are interchangeable if they have as many micro-batches, and in each column the same
    speed and memory. Classes are numbered from 0 in the order of their first pipelines.
    """
    # Usual workers are all alike, so only unlike workers tell pipelines apart.
    deviations: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for worker, per_mille in times.per_mille_of.items():
        deviations[worker.pipeline].append(("slow", worker.column, per_mille))
    for limit in (memory.capacity_of if memory else None) or ():
        deviations[limit.worker.pipeline].append(("room", limit.worker.column, limit.capacity))
    numbers: dict[object, int] = {}
    return tuple(
        numbers.setdefault((count, tuple(sorted(deviations[pipeline]))), len(numbers))
        for pipeline, count in enumerate(grid.microbatches)
    )


def columns_by_pipeline(failed: Iterable[Worker]) -> Mapping[int, Columns]:
    """Return the columns of failed workers, ascending, for each pipeline that has any."""
    lost: dict[int, list[int]] = defaultdict(list)
    for pipeline, column in sorted(failed):
        lost[pipeline].append(column)
    return {pipeline: tuple(columns) for pipeline, columns in lost.items()}


def pattern_of(failed: Iterable[Worker], classes: Sequence[int]) -> Pattern:
    """Return the pattern of these failures; `classes` are the `pipeline_classes`."""
    return tuple(
        sorted(
            (classes[pipeline], columns)
            for pipeline, columns in columns_by_pipeline(failed).items()
        )
    )


def count_key(failures: int, slow: Worker | None = None) -> str:
    """Return the key of the table entry for a number of failures.

    In this entry the planner chose the vacant roles. If `slow` is given, this slow worker is one of
    the failed ones, so that no role is planned at its speed.
    """
    return f"count-{failures}" + ("" if slow is None else f"-with-{slow}")


def pattern_key(pattern: Pattern, classes: Sequence[int]) -> str:
    """Return the key of the table entry for a pattern of failures.

    The key has the lost columns of each pipeline with failures, after the number of its class if
    there are several classes, as in `pattern-0:2,3+1:2`. `classes` are the `pipeline_classes`.
    """
    several = any(classes)
    texts = []
    for kind, columns in pattern:
        texts.append((f"{kind}:" if several else "") + ",".join(map(str, columns)))
    return "pattern-" + "+".join(texts)


def settled_key(key: str) -> str:
    """Return the key of the rebalanced entry for the same failures as `key`."""
    return f"settled-{key}"


def roles_key(key: str) -> str:
    """Return the key of the entry with moved roles for the same failures as `key`."""
    return f"roles-{key}"


def representative_failures(pattern: Pattern, classes: Sequence[int]) -> tuple[Worker, ...]:
    """Return failed workers, sorted, that form this pattern.

    `classes` are the `pipeline_classes`. The first pipelines of each class get the failures, in the
    order of the pattern.
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
    """Iterate over all patterns of `failures` failed workers, each once.

    `classes` has the class of each pipeline (`pipeline_classes`). The patterns include those that
    leave one of the `columns` (a number) without live workers.
    """
    # What can happen to one pipeline: any of its columns may be lost.
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
    """Iterate over patterns of these `kinds`, with at most `room[c]` pipelines of class c."""
    if failures == 0:
        yield ()
        return
    # Kinds are taken in order, each again as often as pipelines of its class are left: no pattern
    # repeats.
    for index, broken in enumerate(kinds):
        kind, lost = broken
        if len(lost) <= failures and room[kind]:
            for rest in _patterns_of_kinds(
                failures - len(lost), kinds[index:], room - Counter({kind: 1})
            ):
                yield (broken, *rest)


def dead_column(failed: Iterable[Worker], grid: Grid) -> int | None:
    """Return the first column whose layers no live worker holds; None if there is none.

    With two directions, live workers of another column may hold the layers of a column that has
    none.
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
