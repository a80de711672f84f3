"""The timeline page of a small schedule, and questions to it."""

from slipstream.cli.timeline_page import ShownSchedule, timeline_page
from tests.jobs import grid

EXAMPLE = grid(
    3,
    4,
    6,
    times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 3",
    more="[memory]\ncapacity = 8\nactivation = 1\nweight_stash = 0.5",
)


def write_page(folder, *shown, measured=()):
    path = folder / "page.html"
    schedules = []
    for index, schedule in enumerate(shown):
        if not isinstance(schedule, ShownSchedule):
            schedule = ShownSchedule(f"schedule {index}", schedule)
        schedules.append(schedule)
    path.write_bytes(timeline_page(schedules, measured))
    return path


def middle(page, kind, stage, pipeline, microbatch, panel=0):
    """Where an op is on the screen."""
    place = page.js(f"""(() => {{
        const kind = KINDS.indexOf("{kind}");
        const ref = timeline.panels[{panel}].find(kind, {stage}, {pipeline}, {microbatch});
        const box = timeline.painter.box(ref, timeline.rowOf);
        const chart = timeline.chart.getBoundingClientRect();
        return [chart.left + (box.left + box.right) / 2, chart.top + box.middle]; }})()""")
    return tuple(place)


def chosen(page):
    return page.js("timeline.chosen && timeline.chosen.panel.title(timeline.chosen)")


def span(page):
    return page.js("timeline.times.t1 - timeline.times.t0")
