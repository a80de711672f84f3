"""What the folder of a run says about its course.

Some folders cannot be read.
"""

import json

import pytest

from slipstream.runtime.run_record import RunRecordError, read_run
from tests.cli.runs import Writer, settled_run


@pytest.fixture
def run(tmp_path):
    return read_run(settled_run(tmp_path / "run"))


def test_times_of_several_starts_follow_one_another(run):
    assert len(run.starts) == 2 and run.finish_event is None
    first_end = next(
        event.at for event in run.events if event.event.__class__.__name__ == "RunFinished"
    )
    again = [event for event in run.events if event.event is run.starts[1]]
    assert again[0].at == first_end == pytest.approx(5 + 3 + 20 + 0.25 + 24 + 20)
    assert run.seconds == pytest.approx(first_end + 14)
    times = [commit.at for commit in run.committed]
    assert times == sorted(times) and [commit.iteration for commit in run.committed] == list(
        range(31)
    )


def test_each_order_has_its_iterations_and_periods(run):
    rows = [
        (
            generation.order.phase,
            len(generation.committed),
            generation.iteration_seconds,
            generation.measured_period,
            generation.planned_share,
            run.measured_share(generation),
        )
        for generation in run.generations
    ]
    expected = [
        ("whole", 11, 2, 1.8, 1, 1),
        ("at once", 6, 4, 3.6, 0.5, 0.5),
        ("settled", 8, 2.5, 2.25, 0.8, 0.8),
        ("whole", 6, 2, 1.8, 1, 1),
    ]
    figures = [row[:2] for row in expected]
    assert [row[:2] for row in rows] == figures
    for row, other in zip(rows, expected, strict=True):
        assert row[2:] == pytest.approx(other[2:])
    assert run.committed[0].took == 3  # since the first order, not since the start
    assert run.committed[11].took == 4.25  # with the pause
    assert run.committed[25].took == 2  # since the order of the second start


def test_iterations_that_are_run_again_count_once(tmp_path):
    # Those of a start that went on from a checkpoint replace what was lost; the time that took
    # stays.
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.order("whole", 4, 1.0, writer.whole)
    writer.commit(1, 1, 1, 1)
    del writer.losses[2:]
    writer.iteration = 2
    writer.start()
    writer.order("whole", 4, 1.0, writer.whole)
    writer.commit(1)
    writer.losses.append(json.loads('{"iteration": 3, "loss": 1.0}'))  # of an earlier version
    run = read_run(writer.close())
    assert [commit.iteration for commit in run.committed] == [0, 1, 2]
    assert run.seconds == run.committed[-1].at == 3


def test_a_run_that_has_just_begun(tmp_path):
    writer = Writer(tmp_path / "run")
    writer.start()
    run = read_run(writer.close())
    assert (
        run.generations == ()
        and run.committed == ()
        and run.full_grid_iteration_seconds is None
        and run.seconds == 0
    )


def refusal(folder):
    with pytest.raises(RunRecordError) as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folders_that_hold_no_run(tmp_path):
    assert "no such folder; give the --out folder" in refusal(tmp_path / "nowhere")
    assert "no events.jsonl is there: give the --out" in refusal(tmp_path)
    (tmp_path / "losses.jsonl").write_text("{}\n")
    assert "its run is of a version that recorded none" in refusal(tmp_path)
    (tmp_path / "events.jsonl").write_text("")
    assert "its first line is not an event of kind 'started'" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda text: text[:-9],
            "events.jsonl: line 15, the last one, is cut off; remove it, or start the run again",
        ),
        (
            lambda text: text.replace(b'"version":1', b'"version":2'),
            "events.jsonl: line 1: is of version 2, this Slipstream reads 1: use a newer "
            "Slipstream",
        ),
        (
            lambda text: text.replace(b'"failed"', b'"fallen"'),
            "events.jsonl: line 3: Invalid value 'fallen'",
        ),
        (
            lambda text: text.replace(b'"live":4', b'"live":"4"', 1),
            "events.jsonl: line 2: Expected `int`, got `str`",
        ),
        (
            lambda text: text.replace(b'"schedule":"', b'"schedule":"../', 1),
            "line 2: Expected `str` matching",
        ),
        (lambda text: text.partition(b"\n")[2], "its first line is not an event of kind 'started'"),
        (lambda text: b"\xff\xfe\n" + text, "events.jsonl: line 1: "),
        (lambda text: b"[" * 100_000 + b"\n", "events.jsonl: line 1: "),
    ],
)
def test_files_that_are_wrong(tmp_path, spoil, says):
    folder = settled_run(tmp_path / "run")
    file = folder / "events.jsonl"
    file.write_bytes(spoil(file.read_bytes()))
    assert says in refusal(folder)


def test_a_half_written_loss_is_refused_as_well(tmp_path):
    folder = settled_run(tmp_path / "run")
    with (folder / "losses.jsonl").open("a") as file:
        file.write('{"iteration":31,"lo')
    assert "losses.jsonl: line 32, the last one, is cut off" in refusal(folder)
