"""Failure patterns: failure sets that are equal up to symmetry, and their keys.

Pipelines that read equally many micro-batches, and whose workers run at the same speeds and have the same room, are
interchangeable: they form a *class*. A pattern says how many pipelines of each class lost which columns. Its key is
text, `2+2,3`: one pipeline lost the worker of column 2, another those of columns 2 and 3; with several classes,
`1:2+0:2,3`, the class first.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from slipstream.schedules.schedule import Grid, Memory, Times, Worker

Columns = tuple[int, ...]
"""The columns that one pipeline lost, ascending."""
BrokenPipeline = tuple[int, Columns]
"""(class, columns) of one pipeline with failures."""
Pattern = tuple[BrokenPipeline, ...]
"""All pipelines with failures, sorted."""


def pipeline_classes(grid: Grid, times: Times, memory: Memory | None) -> tuple[int, ...]:
    """The class of each pipeline, numbered in the order of their first pipelines."""
    unlike: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for worker, per_mille in times.per_mille_of.items():
        unlike[worker.pipeline].append(("slow", worker.column, per_mille))
    for one in (memory.capacity_of if memory else None) or ():
        unlike[one.worker.pipeline].append(("room", one.worker.column, one.capacity))
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault((count, tuple(sorted(unlike[pipeline]))), len(numbers))
                 for pipeline, count in enumerate(grid.microbatches))


def columns_by_pipeline(failed: Iterable[Worker]) -> Mapping[int, Columns]:
    """The columns that each pipeline with failures lost."""
    lost: dict[int, list[int]] = defaultdict(list)
    for pipeline, column in sorted(failed):
        lost[pipeline].append(column)
    return {pipeline: tuple(columns) for pipeline, columns in lost.items()}


def pattern_of(failed: Iterable[Worker], classes: Sequence[int]) -> Pattern:
    """The pattern of a failure set; `classes` as `pipeline_classes` gives them."""
    return tuple(sorted((classes[pipeline], columns) for pipeline, columns in columns_by_pipeline(failed).items()))


def count_key(failures: int, slow: Worker | None = None) -> str:
    """The key of the one normalised schedule for this many failures; or of that for a slow worker being one of them, in
    which nobody plays a role at its pace."""
    return f"count-{failures}" + ("" if slow is None else f"-with-{slow}")


def pattern_key(pattern: Pattern, classes: Sequence[int]) -> str:
    """The key of an exact pattern. Classes are named only where there are several."""
    several = any(classes)
    return "pattern-" + "+".join((f"{kind}:" if several else "") + ",".join(map(str, columns))
                                 for kind, columns in pattern)


def settled_key(key: str) -> str:
    """The key of the answer with layers moved, beside the one that runs at once."""
    return f"settled-{key}"


def representative(pattern: Pattern, classes: Sequence[int]) -> tuple[Worker, ...]:
    """One failure set of a pattern: it breaks the first pipelines of each class, in the pattern's order."""
    members: dict[int, Iterator[int]] = {kind: iter([index for index, other in enumerate(classes) if other == kind])
                                         for kind in set(classes)}
    failed = []
    for kind, columns in pattern:
        pipeline = next(members[kind])
        failed += [Worker(pipeline, column) for column in columns]
    return tuple(sorted(failed))


def patterns(failures: int, columns: int, classes: Sequence[int]) -> Iterator[Pattern]:
    """All patterns of exactly this many failures, each once; some leave a column without live workers."""
    lost = [chosen for size in range(1, min(columns, failures) + 1) for chosen in combinations(range(columns), size)]
    kinds = [(kind, chosen) for kind in set(classes) for chosen in lost]
    yield from _patterns(failures, sorted(kinds), Counter(classes))


def _patterns(failures: int, kinds: Sequence[BrokenPipeline], room: Counter[int]) -> Iterator[Pattern]:
    """Patterns of pipelines of the given kinds, ascending, with at most `room` pipelines of each class."""
    if failures == 0:
        yield ()
        return
    for index, broken in enumerate(kinds):
        kind, lost = broken
        if len(lost) <= failures and room[kind]:
            for rest in _patterns(failures - len(lost), kinds[index:], room - Counter({kind: 1})):
                yield (broken, *rest)


def dead_column(failed: Iterable[Worker], grid: Grid) -> int | None:
    """The first column without a live worker; None where there is none."""
    down = Counter(worker.column for worker in failed)
    return next((column for column in range(grid.columns) if down[column] >= grid.pipelines), None)
