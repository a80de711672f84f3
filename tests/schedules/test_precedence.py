"""The table of precedence rules, expanded: by hand for a chain of three stages."""

import pytest

from slipstream.schedules.precedence import (
    consumers_with_rules,
    producer_keys,
    producers_with_rules,
)

SPLIT = {
    ("F", 0): [],
    ("F", 1): [("F", 0)],
    ("F", 2): [("F", 1)],
    ("I", 2): [("F", 2)],
    ("I", 1): [("I", 2)],
    ("I", 0): [("I", 1)],
    ("W", 0): [("I", 0)],
    ("W", 1): [("I", 1)],
    ("W", 2): [("I", 2)],
}
FUSED = {("B", 2): [("F", 2)], ("B", 1): [("B", 2)], ("B", 0): [("B", 1)]}


@pytest.mark.parametrize(("op", "expected"), [*SPLIT.items(), *FUSED.items()])
@pytest.mark.parametrize("chain", [0, 1])
def test_what_an_op_waits_for(op, expected, chain):
    """The second chain of a bidirectional pipeline has stages 3 to 5."""
    key = (op[0], op[1] + 3 * chain, 7, 4)
    path = range(3 * chain, 3 * chain + 3)
    assert list(producer_keys(key, path)) == [
        (kind, stage + 3 * chain, 7, 4) for kind, stage in expected
    ]


@pytest.mark.parametrize(("op", "expected"), [*SPLIT.items(), *FUSED.items()])
def test_a_step_is_along_the_route(op, expected):
    """The same holds where a micro-batch passes slices 5, 0 and 9.

    A slice that it does not pass waits for nothing.
    """
    route = (5, 0, 9)
    assert list(producer_keys((op[0], route[op[1]], 7, 4), route)) == [
        (kind, route[at], 7, 4) for kind, at in expected
    ]
    assert not list(producer_keys((op[0], 1, 7, 4), route)) and not list(
        consumers_with_rules((op[0], 1, 7, 4), route)
    )


def test_tensors_cross_between_stages_only():
    def tensors(*keys):
        return [rule.tensor for key in keys for _, rule in producers_with_rules(key, range(3))]

    assert tensors(("F", 1, 0, 0), ("I", 1, 0, 0), ("B", 1, 0, 0)) == [
        "activation",
        "gradient",
        "gradient",
    ]
    assert tensors(("I", 2, 0, 0), ("W", 1, 0, 0)) == [None, None]


def test_consumers_are_those_that_name_the_op_as_a_producer():
    keys = [(kind, stage, 0, 0) for kind, stage in [*SPLIT, *FUSED]]
    path = range(3)
    for key in keys:
        waiting = {other for other in keys if key in producer_keys(other, path)}
        assert {other for other, _ in consumers_with_rules(key, path)} == waiting


def test_one_stage_is_first_and_last():
    assert list(producer_keys(("F", 0, 0, 0), (0,))) == []
    assert list(producer_keys(("I", 0, 0, 0), (0,))) == [("F", 0, 0, 0)]
