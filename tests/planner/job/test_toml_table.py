"""Values of a TOML table: read with defaults, repeated over stages, refused by their path."""

import pytest

from slipstream.planner.job.toml import JobError, TomlTable


def test_values_and_defaults():
    table = TomlTable("time", {"forward": [1, 2.5], "transfer": 3, "chunks": 2})
    assert (
        table.take_numbers("forward", 2, "stage") == (1.0, 2.5)
        and table.take_number("transfer") == 3.0
    )
    assert table.take_count("chunks", high=4) == 2 and table.take_number("optimizer", 0.0) == 0.0
    assert table.take_numbers("all_reduce", 3, "stage", 0.5) == (0.5,) * 3
    table.refuse_unknown_keys()


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (
            lambda table: table.take_number("x"),
            "key 't.x' is missing; expected a number of at least 0",
        ),
        (
            lambda table: table.take_number("negative"),
            "t.negative is -1; expected a finite number of at least 0",
        ),
        (
            lambda table: table.take_number("huge"),
            "t.huge is 1e+19; expected a number of at most 1e+18",
        ),
        (lambda table: table.take_number("yes"), "t.yes is True; expected a finite number"),
        (
            lambda table: table.take_count("half", high=3),
            "t.half is 0.5; expected a whole number, 1 to 3",
        ),
        (
            lambda table: table.take_numbers("list", 3, "stage"),
            "t.list has 2 values; expected 3, one per stage, or a single",
        ),
        (
            lambda table: table.take_numbers("list", 2, "stage"),
            r"t.list[1] is 'b'; expected a finite number",
        ),
        (lambda table: table.take_table("half"), "t.half is 0.5; expected a table"),
    ],
)
def test_what_is_not_as_expected_is_refused_by_its_path(read, says):
    values = {"negative": -1, "huge": 1e19, "yes": True, "half": 0.5, "list": [1, "b"]}
    with pytest.raises(JobError) as refused:
        read(TomlTable("t", values))
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_keys_that_nothing_asked_for_are_refused_with_the_nearest():
    table = TomlTable("time", {"foward": 1})
    table.take_number("forward", 0.0)
    with pytest.raises(JobError, match=r"unknown key 'time.foward'; did you mean 'time.forward'\?"):
        table.refuse_unknown_keys()
