"""Show bubble by memory of our plans beside published figures: `slipstream reproduce curves`."""

from slipstream.cli.figures.figure import Figure, Series
from slipstream.planner.budget import CountCallback
from slipstream.planner.published.memory_curves import (
    Point,
    Result,
    describe,
    iterate_points,
    measure,
    read_settings,
)

STEPS = 400_000
"""Search steps of each plan of `reproduce_curves`."""
SHORT_MEMORY = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Memory of the plans of `reproduce_curves`, as multiples of that of 1F1B."""


def build_row(point: Point, result: Result) -> tuple[str, ...]:
    """Return a point's name, bubbles (ours, published or "", bound), comparison, and seconds."""
    published = "" if point.published is None else f"{point.published:.3%}"
    return (
        point.name,
        f"{result.bubble:.3%}",
        published,
        f"{result.bound:.3%}",
        describe(point, result),
        f"{result.seconds:.1f}",
    )


def reproduce_curves(progress: CountCallback) -> Figure:
    """Return a figure of the bubble by memory for the first published setting.

    For each placement there are three curves: ours, the published one, and the lower bound.
    `progress` is called after each point.
    """
    settings = read_settings()
    points = [
        point
        for point in iterate_points(settings)
        if point.setting == settings.settings[0] and point.memory in SHORT_MEMORY
    ]
    results = []
    for done, point in enumerate(points, 1):
        results.append(measure(point, steps=STEPS))
        progress(done, len(points))
    # The bound is drawn as a reference line; below 0 it says nothing.
    series = []
    for placement in ("ZB", "V"):
        members = [
            (point, result)
            for point, result in zip(points, results, strict=True)
            if point.placement == placement
        ]
        bubbles = tuple(result.bubble for _, result in members)
        published = tuple(point.published for point, _ in members)
        bounds = tuple(max(0.0, result.bound) for _, result in members)
        series += [
            Series(name=placement, values=bubbles),
            Series(name=f"{placement}, published", values=published, published=True),
            Series(name=f"{placement}, lower bound", values=bounds, is_reference=True),
        ]
    first = points[0].setting
    return Figure(
        name="curves",
        kind="lines",
        series=tuple(series),
        x=SHORT_MEMORY,
        findings={},
        title=f"Bubble by memory: {first.workers} workers, {first.microbatches} micro-batches",
        x_label="memory, as a multiple of that of 1F1B",
        y_label="share of the period in which a worker is idle",
        header=("point", "bubble", "published", "lower bound", ""),
        rows=tuple(build_row(*pair)[:-1] for pair in zip(points, results, strict=True)),
        assumptions=(f"each plan is searched for {STEPS:,} steps", f"published: {settings.source}"),
    )
