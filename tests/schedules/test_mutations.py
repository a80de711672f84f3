"""The checker reports whatever single thing is changed in a valid schedule.

It reports nothing else.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.schedules.check import check
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.text_excerpt import MAX_COLUMNS, MAX_ROWS, render_excerpt
from tests.general import general_schedules
from tests.generate import schedules
from tests.mutations import GENERAL, MUTATIONS


@settings(max_examples=60)
@given(schedules())
def test_valid(schedule):
    assert_valid(schedule)


@settings(max_examples=300)
@given(general_schedules())
def test_valid_with_layers_anywhere(schedule):
    assert_valid(schedule)


def assert_valid(schedule):
    assert check(schedule) == []
    assert decode(encode(schedule)) == schedule
    assert encode(decode(encode(schedule))) == encode(schedule)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_mutated(mutation, data):
    small = schedules(max_pipelines=3, max_stages=3, max_microbatches=4)
    mutated = mutation(data.draw, data.draw(st.one_of(small, general_schedules())))
    assert_reported(mutated, check(mutated))


@pytest.mark.parametrize(
    ("mutation", "rule"), GENERAL.items(), ids=[mutation.__name__ for mutation in GENERAL]
)
@settings(max_examples=60)
@given(data=st.data())
def test_mutated_with_layers_anywhere(mutation, rule, data):
    mutated = mutation(data.draw, data.draw(general_schedules()))
    violations = check(mutated)
    assert_reported(mutated, violations)
    assert rule is None or rule in {violation.rule for violation in violations}


def assert_reported(mutated, violations):
    assert violations
    for violation in violations:
        assert violation.rule and "\n" not in violation.message
        grid = render_excerpt(mutated, violation.op, violation.worker).splitlines()
        assert len(grid) <= MAX_ROWS + 2
        assert all(len(line) <= MAX_COLUMNS + 60 for line in grid)
        assert violation.op is None or any("^" in line for line in grid)
