"""Draw charts of a run over time: phases, throughput, missing workers, loss.

The charts are SVG whose x axis is in seconds of the run. The page stretches them to its width, and
shows a part of them by changing `viewBox`. Lines keep their width (`vector-effect`), and only
tooltips have text.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from slipstream.cli.drawing.axis import nice_step
from slipstream.cli.drawing.svg_chart import nice_top
from slipstream.cli.shared.summaries import as_percent, run_time
from slipstream.runtime.events import FetchAbandoned, FetchBegun, HandedOver, RunFinished, Started
from slipstream.runtime.run_record import GenerationRecord, RunRecord

MAX_POINTS = 2000
"""Approximate maximum of points of a chart; in longer runs, a point is several iterations."""
_MINUTES = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7200, 14400, 43200)
_SHORT_STEPS = tuple(factor * 10.0**power for power in range(-6, 1) for factor in (1, 2, 5))
TIME_STEPS = (*_SHORT_STEPS, 10.0, 15.0, 30.0, *(60.0 * minutes for minutes in _MINUTES))
"""Round numbers of seconds between axis labels; from 15 on, those of clock and calendar."""
HEIGHT = 100
"""Height of every chart, in units of its `viewBox`."""


@dataclass(frozen=True, slots=True)
class Point:
    """Consecutive iterations that a chart shows as one point."""

    begin: float
    """Time of the commit, or a start's first order, before these iterations, in run seconds."""
    end: float
    first: int
    count: int
    rate: float
    """Mean throughput of these iterations, in samples per second."""
    slowest: float
    fastest: float
    """Throughput of the fastest single iteration, in samples per second."""
    loss: float | None
    """Mean of the finite losses; None if there are none."""


def build_points(run: RunRecord) -> list[Point]:
    """Return the points of a run's charts, in order of time.

    There are about `MAX_POINTS` at most, and at least one for each generation that committed an
    iteration.
    """
    # So many iterations are one point; a point never spans two generations.
    size = max(1, math.ceil(len(run.committed) / MAX_POINTS))
    samples = run.starts[-1].samples
    result = []
    for generation in run.generations:
        for begin in range(0, len(generation.committed), size):
            commits = generation.committed[begin : begin + size]
            seconds = [max(commit.took, 1e-6) for commit in commits]
            losses = [commit.loss for commit in commits if commit.loss is not None]
            took = sum(commit.took for commit in commits)
            result.append(
                Point(
                    begin=commits[-1].at - took,
                    end=commits[-1].at,
                    first=commits[0].iteration,
                    count=len(commits),
                    rate=samples * len(commits) / sum(seconds),
                    slowest=samples / max(seconds),
                    fastest=samples / min(seconds),
                    loss=sum(losses) / len(losses) if losses else None,
                )
            )
    return result


def planned_rate(run: RunRecord, generation: GenerationRecord) -> float | None:
    """Return the planned samples per second of a generation; None if they are not known.

    The rate is the generation's planned share of the throughput measured with all workers. Without
    one of these, it is the rate measured in the first generation with a measured and a planned
    period, times this planned period over that of `generation`.
    """
    samples = run.starts[-1].samples
    whole = run.full_grid_iteration_seconds
    period = generation.order.planned_period
    if whole and generation.planned_share is not None:
        return generation.planned_share * samples / whole
    timed = (
        item for item in run.generations if item.iteration_seconds and item.order.planned_period
    )
    first = next(timed, None)
    if first is None or first.iteration_seconds is None or not period:
        return None
    return samples / first.iteration_seconds * first.order.planned_period / period


def draw_charts(run: RunRecord, found: Sequence[Point]) -> str:
    """Return HTML charts of a run; `found` has the points of throughput and loss."""
    return "\n".join(
        [
            _draw_phases(run),
            _draw_throughput(run, found),
            _draw_missing(run),
            _draw_losses(run, found),
        ]
    )


def choose_ticks(total: float) -> list[float]:
    """Return times, in seconds, for axis labels: a round step's multiples, 0 to `total`."""
    step = next((step for step in TIME_STEPS if step >= total / 8), nice_step(total, 8))
    return [index * step for index in range(math.floor(total / step + 1e-9) + 1)]


def _draw_throughput(run: RunRecord, found: Sequence[Point]) -> str:
    planned = [
        (item.begin, item.end, rate)
        for item in run.generations
        if (rate := planned_rate(run, item)) is not None
    ]
    rates = [point.rate for point in found]
    rates += [rate for _, _, rate in planned]
    top = nice_top(max(rates, default=1.0))
    # Where a point is several iterations, a band shows the slowest and the fastest of them.
    band = "".join(
        f"M{point.begin:.3f} "
        f"{_to_y(point.fastest, top)}H{point.end:.3f}V{_to_y(point.slowest, top)}"
        f"H{point.begin:.3f}Z"
        for point in found
        if point.count > 1
    )
    measured = ((point.begin, point.end, point.rate) for point in found)
    lines = f'<path class="band" d="{band}"/>' if band else ""
    lines += f'<path class="line planned" d="{_step_path(planned, top)}"/>'
    lines += f'<path class="line" d="{_step_path(measured, top)}"/>'
    return _draw_chart(run, "throughput", "samples/s", top, lines)


def _draw_missing(run: RunRecord) -> str:
    """Return a chart, as HTML, of the number of missing workers over time."""
    workers = run.starts[-1].workers
    missing = [(generation, workers - generation.order.live) for generation in run.generations]
    top = nice_top(float(max([count for _, count in missing], default=1)))
    area = "".join(
        f"M{generation.begin:.3f} {HEIGHT}V{_to_y(count, top)}H{generation.end:.3f}V{HEIGHT}Z"
        for generation, count in missing
    )
    return _draw_chart(
        run, "missing", "workers missing", top, f'<path class="area" d="{area}"/>', whole=True
    )


def _draw_losses(run: RunRecord, found: Sequence[Point]) -> str:
    places = [
        ((point.begin + point.end) / 2, point.loss) for point in found if point.loss is not None
    ]
    top = nice_top(max((loss for _, loss in places), default=1.0))
    # The path moves to its first point, and draws lines from there on.
    line = "L".join(f"{at:.3f} {_to_y(loss, top)}" for at, loss in places)
    line = f"M{line}" if line else ""
    return _draw_chart(run, "loss", "loss", top, f'<path class="line" d="{line}"/>')


def _draw_phases(run: RunRecord) -> str:
    """Return a strip, as HTML, of generations' phases, starting and settling over time."""
    parts = [
        f'<rect class="{generation.order.phase.replace(" ", "-")}" x="{generation.begin:.3f}" '
        f'width="{generation.end - generation.begin:.3f}" '
        f'height="{HEIGHT}"><title>{escape(describe_generation(generation))}</title></rect>'
        for generation in run.generations
    ]
    parts += [
        f'<rect class="starting" x="{begin:.3f}" width="{end - begin:.3f}" height="{HEIGHT}">'
        "<title>starting: workers start, and nothing trains yet</title></rect>"
        for begin, end in find_starting(run)
    ]
    parts += [
        f'<rect class="settling" x="{begin:.3f}" width="{end - begin:.3f}" height="{HEIGHT}">'
        "<title>settling: layers move while training continues</title></rect>"
        for begin, end in find_settling(run)
    ]
    return f'<div class="chart phases"><b>phase</b>{_svg(run, "".join(parts))}</div>'


def describe_generation(generation: GenerationRecord) -> str:
    """Describe a generation: phase, live workers, beginning, and planned throughput."""
    share = generation.planned_share
    return (
        f"{generation.order.phase}, {generation.order.live} workers, "
        f"from {run_time(generation.begin)} on"
        + ("" if share is None else f", planned at {as_percent(share)} of fault-free")
    )


def find_starting(run: RunRecord) -> list[tuple[float, float]]:
    """Return intervals (begin, end), in seconds, from each start to its first generation.

    A start without a generation lasts until the next start or the end of the run. Empty intervals
    are left out.
    """
    starts = [happened.at for happened in run.events if isinstance(happened.event, Started)]
    intervals = []
    for start, following in zip(starts, [*starts[1:], run.seconds], strict=True):
        first = next(
            (
                generation.begin
                for generation in run.generations
                if start <= generation.begin <= following
            ),
            following,
        )
        intervals.append((start, first))
    return [(begin, end) for begin, end in intervals if end > begin]


def find_settling(run: RunRecord) -> list[tuple[float, float]]:
    """Return intervals (begin, end), in seconds, in which layers moved while training continued."""
    intervals, begin_by_fetch = list[tuple[float, float]](), dict[int, float]()
    for happened in run.events:
        # A copy ends when it is given up, when the workers use it, or with the run or its restart.
        match happened.event:
            case FetchBegun() if happened.event.purpose == "settle":
                begin_by_fetch[happened.event.fetch] = happened.at
            case FetchAbandoned() | HandedOver() if happened.event.fetch in begin_by_fetch:
                intervals.append((begin_by_fetch.pop(happened.event.fetch), happened.at))
            case Started() | RunFinished():
                intervals += [(begin, happened.at) for begin in begin_by_fetch.values()]
                begin_by_fetch.clear()
    return intervals + [(begin, run.seconds) for begin in begin_by_fetch.values()]


def _draw_chart(
    run: RunRecord, name: str, title: str, top: float, inside: str, *, whole: bool = False
) -> str:
    step = top if whole else nice_step(top, 3)
    levels = [index * step for index in range(math.floor(top / step + 1e-9) + 1)]
    grid = "".join(
        f'<path class="grid" d="M0 {_to_y(level, top)}H{run.seconds:.3f}"/>' for level in levels
    )
    labels = "".join(
        f'<span style="bottom:{100 * level / top:.2f}%">{level:g}</span>' for level in levels
    )
    return (
        f'<div class="chart {name}"><b>{title}</b><div '
        f'class="levels">{labels}</div>{_svg(run, grid + inside)}</div>'
    )


def _svg(run: RunRecord, inside: str) -> str:
    return (
        f'<svg viewBox="0 0 {max(run.seconds, 1e-3):.3f} {HEIGHT}" preserveAspectRatio="none" '
        'aria-hidden="true">'
        f"{inside}</svg>"
    )


def _step_path(parts: Iterable[tuple[float, float, float]], top: float) -> str:
    path, last = "", -1.0
    for begin, end, value in parts:
        y = _to_y(value, top)
        path += f"{f'V{y}' if abs(begin - last) < 0.002 else f'M{begin:.3f} {y}'}H{end:.3f}"
        last = end
    return path


def _to_y(value: float, top: float) -> str:
    return f"{HEIGHT - HEIGHT * min(1.0, max(0.0, value / top)):.2f}"
