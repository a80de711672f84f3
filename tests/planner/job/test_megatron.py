from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.planner.job.file import JobError, parse_job, placement_table
from slipstream.planner.job.megatron import read_layout, split_letters, write_layout
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


RECIPES = (
    "Et*4|(t*4|)*14tmL",
    "Et|(tt|)*30mL",
    "Et*3|(tt|)*29m|L",
    "Et*8|(t*8|)*6t*5L",
    "Et*4|(t*4|)*14tL",
    "Et*14|t*13L",
)
"""Layouts of Megatron-Bridge's recipes (DeepSeek-V3, Kimi-K2, Moonlight) and of Megatron Core's
user guide.
"""


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("Et*3|(tt|)*29,m|L", (4, *[2] * 29, 1, 1)),  # of Megatron Core's user guide: DeepSeek-V3
        ("Et*3|(tt|)*29,t|L", (4, *[2] * 29, 1, 1)),
        ("E||t|L", (1, 0, 1, 1)),
        ("Ettt|(tt|)*2t*2L", (4, 2, 2, 3)),
        ("E(t|t)*2,tL", (2, 2, 3)),
        ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", (3, *[2] * 34, 3, *[2] * 3, 2)),  # Megatron-Bridge 5391
    ],
)
def test_known_layouts(layout, counts):
    assert tuple(map(len, read_layout("layers", layout))) == counts


@pytest.mark.parametrize("layout", RECIPES)
def test_layouts_of_recipes_are_written_as_they_are_there(layout):
    assert write_layout(read_layout("layers", layout)) == layout


def expand(layout: str) -> list[str]:
    """The letters of each stage, by the grammar alone.

    It reads one symbol or group after the other, without expressions.
    """
    text, place = "", 0
    while place < len(layout):
        end = layout.index(")", place) + 1 if layout[place] == "(" else place + 1
        part, count = layout[place:end].strip("()"), 1
        if layout[end : end + 1] == "*":
            digits = len(layout[end + 1 :]) - len(layout[end + 1 :].lstrip("0123456789"))
            count, end = int(layout[end + 1 : end + 1 + digits]), end + 1 + digits
        inner = part if len(part) == 1 or not part else "|".join(expand(part))
        text, place = text + inner * count, end
    return text.split("|")


@st.composite
def stage_letters(draw: st.DrawFn) -> tuple[str, ...]:
    """The letters of each stage of a layout that Megatron-LM takes.

    Stages are equal or empty.
    """
    counts = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 12]), min_size=1, max_size=12))
    repeated = [count for count in counts for _ in range(draw(st.integers(1, 4)))]
    stages = ["t" * count for count in repeated]
    predicting = draw(st.integers(0, 2))
    if predicting:
        last = draw(
            st.integers(
                max(index for index, text in enumerate(stages) if text or not index),
                len(stages) - 1,
            )
        )
        stages[last] += "m" * predicting
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return tuple(stages)


@given(stage_letters())
@example(("Ettt", "tt", "tt", "m", "L"))
@example(("E", "", "", "L"))
def test_a_layout_is_read_as_it_was_written(stages: Sequence[str]) -> None:
    layout = write_layout(stages)
    assert read_layout("layers", layout) == tuple(stages) == tuple(expand(layout))
    decoders = "".join(stages).count("t")
    if decoders:
        counts = tuple(map(len, stages))
        assert split_letters(counts, decoders) == tuple(stages)
        assert "".join(split_letters(counts, sum(counts))) == "E" + "t" * sum(counts) + "L"


def test_a_job_takes_a_layout_for_its_layers():
    job = parse_job(JOB.format(2, "'Et|tt|t|tL'"))
    assert (job.layers, job.columns) == ((2, 2, 1, 2), (0, 1, 0, 1))
    assert placement_table(job) == {"chunks": 2, "order": "interleaved", "layers": [2, 2, 1, 2]}


@pytest.mark.parametrize(
    ("stages", "layers"), [(8, "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"), (2, "E||t|L"), (4, "E||t|L")]
)
def test_jobs_of_layouts_are_planned_around_a_dead_worker(stages, layers):
    job = parse_job(JOB.format(stages, f"'{layers}'").replace("pipelines = 1", "pipelines = 2"))
    schedule = schedule_for(job, ["1.1"])
    assert not check(schedule) and not {seat.worker for seat in schedule.seats} & {Worker(1, 1)}


@pytest.mark.parametrize(
    ("stages", "layers", "says"),
    [
        (
            2,
            "'Et|t|tL'",
            "placement.layers has 3 stages for 2 workers; expected the same number of stages "
            "for each",
        ),
        (
            2,
            "'Et|tL'\nchunks = 1",
            "placement.chunks conflicts with the layout in placement.layers",
        ),
        (1, "'tL'", "placement.layers is 'tL'; expected a layout of Megatron-LM, such as"),
        (1, "'E(t*2|L'", "expected a layout of Megatron-LM"),
        (1, "'E(t*9999|)*99999L'", "expected at most"),
        (1, "'Et*999999999L'", "expected at most"),
        (
            2,
            "'Etm|mL'",
            "expected all layers of multi-token prediction (m) in one stage, after the decoder "
            "layers",
        ),
        (
            2,
            "'Etm|tL'",
            "expected all layers of multi-token prediction (m) in one stage, after the decoder "
            "layers",
        ),
    ],
)
def test_what_is_not_a_layout_is_refused(stages, layers, says):
    with pytest.raises(JobError) as caught:
        parse_job(JOB.format(stages, layers))
    assert says in str(caught.value) and "\n" not in str(caught.value)
