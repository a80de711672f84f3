import pytest

from slipstream.planner.job.file import JobError, parse_job, placement_table
from slipstream.planner.job.megatron import layout_counts
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from tests.runtime.running import schedule_for

JOB = """pipelines = 1
stages = {}
microbatches = 1
[time]
forward = 1
backward_input = 1
backward_weight = 1
[placement]
layers = {}
"""


@pytest.mark.parametrize(("layout", "counts"), [
    ("Et*3|(tt|)*29,m|L", None),  # of Megatron Core's user guide: DeepSeek-V3, with a layer for multi-token prediction
    ("Et*3|(tt|)*29,t|L", (4, *[2] * 29, 1, 1)),
    ("E||t|L", (1, 0, 1, 1)),
    ("Ettt|(tt|)*2t*2L", (4, 2, 2, 3)),
    ("E(t|t)*2,tL", (2, 2, 3)),
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", (3, *[2] * 34, 3, *[2] * 3, 2)),  # Megatron-Bridge 5391
])
def test_known_layouts(layout, counts):
    if counts is None:
        with pytest.raises(JobError, match=r"multi-token prediction \(m\) are not supported"):
            layout_counts("layers", layout)
    else:
        assert layout_counts("layers", layout) == counts


def test_a_job_takes_a_layout_for_its_layers():
    job = parse_job(JOB.format(2, "'Et|tt|t|tL'"))
    assert (job.layers, job.columns) == ((2, 2, 1, 2), (0, 1, 0, 1))
    assert placement_table(job) == {"chunks": 2, "order": "interleaved", "layers": [2, 2, 1, 2]}


@pytest.mark.parametrize(("stages", "layers"), [(8, "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"), (2, "E||t|L"), (4, "E||t|L")])
def test_jobs_of_layouts_are_planned_around_a_dead_worker(stages, layers):
    job = parse_job(JOB.format(stages, f"'{layers}'").replace("pipelines = 1", "pipelines = 2"))
    schedule = schedule_for(job, ["1.1"])
    assert not check(schedule) and not {seat.worker for seat in schedule.seats} & {Worker(1, 1)}


@pytest.mark.parametrize(("stages", "layers", "says"), [
    (2, "'Et|t|tL'", "placement.layers has 3 stages for 2 workers; expected the same number of stages for each"),
    (2, "'Et|tL'\nchunks = 1", "placement.chunks conflicts with the layout in placement.layers"),
    (1, "'tL'", "placement.layers is 'tL'; expected a layout of Megatron-LM, such as"),
    (1, "'E(t*2|L'", "expected a layout of Megatron-LM"),
    (1, "'E(t*9999|)*99999L'", "expected at most"),
    (1, "'Et*999999999L'", "expected at most"),
])
def test_what_is_not_a_layout_is_refused(stages, layers, says):
    with pytest.raises(JobError) as caught:
        parse_job(JOB.format(stages, layers))
    assert says in str(caught.value) and "\n" not in str(caught.value)
