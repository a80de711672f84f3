"""Charts of a run over time, as SVG whose x axis is in run seconds: throughput, workers missing, loss.

The page stretches them to its width and shows a part of them by changing `viewBox`, so lines keep their width
(`vector-effect`) and no text is inside.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from slipstream.cli.drawing.axis import nice_step
from slipstream.cli.drawing.svg_chart import nice_top
from slipstream.cli.shared.run_summary import clock, percent
from slipstream.runtime.events import FetchAbandoned, FetchBegun, Finished, HandedOver, Started
from slipstream.runtime.run_record import RunRecord, Stretch

MOST_POINTS = 2000
"""Of a chart; in longer runs a point is several iterations of one order."""
TIME_STEPS = (*(factor * 10.0 ** power for power in range(-6, 1) for factor in (1, 2, 5)), 10.0, 15.0, 30.0, *(
    60.0 * minutes for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7200, 14400, 43200)))
"""Round steps of an axis, in seconds; those of a minute and more are what a clock has."""
HEIGHT = 100
"""Of every chart, in its own units."""


@dataclass(frozen=True, slots=True)
class Point:
    """Some iterations, one after the other."""

    begin: float
    """Run seconds, when the iteration before the first was committed."""
    end: float
    first: int
    count: int
    rate: float
    """Samples a second, over all of them."""
    slowest: float
    fastest: float
    """Of a single one."""
    loss: float | None
    """Mean of the finite ones."""


def points(run: RunRecord) -> list[Point]:
    """At most about `MOST_POINTS`, more only where there are so many orders."""
    size = max(1, math.ceil(len(run.committed) / MOST_POINTS))
    samples = run.starts[-1].samples
    found = []
    for stretch in run.stretches:
        for begin in range(0, len(stretch.committed), size):
            some = stretch.committed[begin:begin + size]
            seconds = [max(one.took, 1e-6) for one in some]
            losses = [one.loss for one in some if one.loss is not None]
            found.append(Point(some[-1].at - sum(one.took for one in some), some[-1].at, some[0].iteration, len(some),
                               samples * len(some) / sum(seconds), samples / max(seconds), samples / min(seconds),
                               sum(losses) / len(losses) if losses else None))
    return found


def planned_rate(run: RunRecord, stretch: Stretch) -> float | None:
    """Samples a second as planned: the planned share of what was measured with all workers, or by the plan alone."""
    samples, whole = run.starts[-1].samples, run.whole_seconds
    if whole and stretch.planned_share is not None:
        return stretch.planned_share * samples / whole
    return samples / stretch.order.planned_period if stretch.order.planned_period else None


def charts(run: RunRecord, found: Sequence[Point]) -> str:
    """All charts, one below the other."""
    return "\n".join([_phases(run), _throughput(run, found), _missing(run), _losses(run, found)])


def ticks(total: float) -> list[float]:
    """Round run seconds for the axis."""
    step = next((step for step in TIME_STEPS if step >= total / 8), nice_step(total, 8))
    return [index * step for index in range(math.floor(total / step + 1e-9) + 1)]


def _throughput(run: RunRecord, found: Sequence[Point]) -> str:
    planned = [(one.begin, one.end, rate) for one in run.stretches if (rate := planned_rate(run, one)) is not None]
    top = nice_top(max([point.rate for point in found] + [rate for _, _, rate in planned], default=1.0))
    band = "".join(f"M{point.begin:.3f} {_y(point.fastest, top)}H{point.end:.3f}V{_y(point.slowest, top)}"
                   f"H{point.begin:.3f}Z" for point in found if point.count > 1)
    lines = (f'<path class="band" d="{band}"/>' if band else "") + \
        f'<path class="line planned" d="{_steps(planned, top)}"/>' + \
        f'<path class="line" d="{_steps(((one.begin, one.end, one.rate) for one in found), top)}"/>'
    return _chart(run, "throughput", "samples/s", top, lines)


def _missing(run: RunRecord) -> str:
    """Of the grid. One of thousands is seen, too, as it would not be in the number of those that take part."""
    missing = [(one, run.starts[-1].workers - one.order.live) for one in run.stretches]
    top = nice_top(float(max([count for _, count in missing], default=1)))
    area = "".join(f"M{one.begin:.3f} {HEIGHT}V{_y(count, top)}H{one.end:.3f}V{HEIGHT}Z" for one, count in missing)
    return _chart(run, "missing", "workers missing", top, f'<path class="area" d="{area}"/>', whole=True)


def _losses(run: RunRecord, found: Sequence[Point]) -> str:
    places = [((one.begin + one.end) / 2, one.loss) for one in found if one.loss is not None]
    top = nice_top(max((loss for _, loss in places), default=1.0))
    line = "".join(f"{'L' if index else 'M'}{at:.3f} {_y(loss, top)}" for index, (at, loss) in enumerate(places))
    return _chart(run, "loss", "loss", top, f'<path class="line" d="{line}"/>')


def _phases(run: RunRecord) -> str:
    """A strip with the phase of each order, and over it when layers moved."""
    parts = [f'<rect class="{one.order.phase.replace(" ", "-")}" x="{one.begin:.3f}" width="{one.end - one.begin:.3f}" '
             f'height="{HEIGHT}"><title>{escape(described(one))}</title></rect>' for one in run.stretches]
    parts += [f'<rect class="settling" x="{begin:.3f}" width="{end - begin:.3f}" height="{HEIGHT}">'
              "<title>settling: layers move while training goes on</title></rect>" for begin, end in settling(run)]
    return f'<div class="chart phases"><b>phase</b>{_svg(run, "".join(parts))}</div>'


def described(stretch: Stretch) -> str:
    """A stretch in a few words."""
    share = stretch.planned_share
    return f"{stretch.order.phase}, {stretch.order.live} workers, from {clock(stretch.begin)} on" \
        + ("" if share is None else f", planned at {percent(share)} of fault-free")


def settling(run: RunRecord) -> list[tuple[float, float]]:
    """When layers moved while training went on, to settle; in run seconds."""
    found, begun = list[tuple[float, float]](), dict[int, float]()
    for one in run.events:
        match one.event:
            case FetchBegun() if one.event.purpose == "settle":
                begun[one.event.fetch] = one.at
            case FetchAbandoned() | HandedOver() if one.event.fetch in begun:
                found.append((begun.pop(one.event.fetch), one.at))
            case Started() | Finished():
                found += [(begin, one.at) for begin in begun.values()]
                begun.clear()
    return found + [(begin, run.seconds) for begin in begun.values()]


def _chart(run: RunRecord, name: str, title: str, top: float, inside: str, *, whole: bool = False) -> str:
    step = top if whole else nice_step(top, 3)
    levels = [index * step for index in range(math.floor(top / step + 1e-9) + 1)]
    grid = "".join(f'<path class="grid" d="M0 {_y(level, top)}H{run.seconds:.3f}"/>' for level in levels)
    labels = "".join(f'<span style="bottom:{100 * level / top:.2f}%">{level:g}</span>' for level in levels)
    return f'<div class="chart {name}"><b>{title}</b><div class="levels">{labels}</div>{_svg(run, grid + inside)}</div>'


def _svg(run: RunRecord, inside: str) -> str:
    return (f'<svg viewBox="0 0 {max(run.seconds, 1e-3):.3f} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
            f"{inside}</svg>")


def _steps(parts: Iterable[tuple[float, float, float]], top: float) -> str:
    path, last = "", -1.0
    for begin, end, value in parts:
        y = _y(value, top)
        path += f"{f'V{y}' if abs(begin - last) < 0.002 else f'M{begin:.3f} {y}'}H{end:.3f}"
        last = end
    return path


def _y(value: float, top: float) -> str:
    return f"{HEIGHT - HEIGHT * min(1.0, max(0.0, value / top)):.2f}"
