"""Job files are written as TOML that is read back.

Times are on a common step.
"""

import tomllib

import pytest

from slipstream.planner.job.toml import job_text, round_times, table_comments


def test_values_as_toml():
    tables = {
        "a": 1,
        "b": 'x"\\\n\t',
        "t": {"f": 1e-9, "yes": True, "l": [1, "two"], "d": {"1.2": 1.5}},
    }
    assert tomllib.loads(job_text(tables, {"": ["one"], "t": ["two"]})) == tables


def test_comments_stand_above_their_tables():
    text = job_text(
        {"pipelines": 2, "time": {"forward": 1.5}}, {"": ["about"], "time": ["Seconds."]}
    )
    assert text == "# about\npipelines = 2\n\n# Seconds.\n[time]\nforward = 1.5\n"


def test_comments_are_read_back_with_their_tables():
    text = """# about

# two pipelines
pipelines = 2
# Seconds.
[time]
forward = 1.5  # not by itself on its line
  # of one
[time.slow]
"1.1" = 2
# the end"""
    assert table_comments(text) == {
        "": ["about", "two pipelines"],
        "time": ["Seconds.", "of one", "the end"],
    }
    comments = {"": ["about"], "time": ["Seconds."]}
    assert (
        table_comments(job_text({"pipelines": 2, "time": {"forward": 1.5}}, comments)) == comments
    )


@pytest.mark.parametrize(
    ("seconds", "longest", "expected"),
    [
        ([0.0123456, 0.5], None, [0.0123, 0.5]),
        ([0.0123456], None, [0.01235]),
        ([0.0123456], 7.0, [0.012]),
        ([0.0, 0.0], None, [0.0, 0.0]),
        ([], 1.0, []),
    ],
)
def test_times_have_four_digits_of_the_longest(seconds, longest, expected):
    assert round_times(seconds, longest) == expected
