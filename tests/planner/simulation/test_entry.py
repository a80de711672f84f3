"""Systems of others: tables, and policies by entry point."""

import json
from importlib.metadata import EntryPoint

import pytest

from examples.fleet_policy import WholePipelines
from slipstream.planner.simulation import entry
from slipstream.planner.simulation.entry import (
    EntryError,
    load_installed_policy,
    make_table_policy,
    read_entry,
)
from slipstream.planner.simulation.policy import Scenario
from slipstream.planner.simulation.policy_runs import simulate_policy
from tests.planner.simulation.small import COSTS, gain, lose, scenario, spans, trace

ROWS = [
    {"down": 0, "samples_per_second": 0.8},
    {"down": 2, "samples_per_second": 0.5, "pause_seconds": 20},
    {"down": [0, 1], "samples_per_second": 0.7, "pause_seconds": 5},
]


def written(tmp_path, rows=ROWS, **more):
    table = {
        "format": "slipstream-entry-1",
        "name": "theirs",
        "title": "T",
        "source": "S",
        "cases": {"small": rows},
    }
    (tmp_path / "theirs.json").write_text(json.dumps(table | more))
    return tmp_path / "theirs.json"


def test_a_table_says_how_fast_and_after_what_pause(tmp_path):
    kind = make_table_policy(read_entry(written(tmp_path)), "small", 2)
    policy = kind(scenario())
    result = simulate_policy(
        policy, trace(lose(100.0, 1), lose(400.0, 0), gain(700.0, 1), lose(900.0, 1, 2, 3))
    )
    stall = 9 / 0.7
    assert spans(result)[:4] == [
        ("RUN", 100.0),
        ("SWITCH", 5.0),
        ("LOST", stall),
        ("RUN", 300 - 5 - stall),
    ]
    assert result.useful_rates[result.cause_indices == 0] == pytest.approx([0.8, 0.7, 0.5, 0.5]), (
        "one of stage 0 has the row for two"
    )
    assert spans(result)[-1] == ("WAIT", 100.0), "four are in no row"
    assert (kind.name, kind.source) == ("theirs", "S") and policy.fault_free_rate == 0.8
    assert make_table_policy(read_entry(written(tmp_path)), "other", 2) is None


def test_after_waiting_it_goes_back_to_a_checkpoint(tmp_path):
    kind = make_table_policy(read_entry(written(tmp_path)), "small", 2)
    result = simulate_policy(kind(scenario()), trace(lose(300.0, 0, 1, 2), gain(500.0, 0, 1, 2)))
    assert [span[0] for span in spans(result)] == ["RUN", "WAIT", "RESTART", "LOST", "RUN"]


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"down": 1}], {}, "samples_per_second"),
        (ROWS, {"format": "x"}, "slipstream-entry-1"),
        (
            [{"down": -1, "samples_per_second": 1}],
            {},
            r"cases.small\[0\]: a negative value; expected at least 0",
        ),
        ([], {}, "cases.small: no rows; expected at least one"),
        (
            [{"down": 1, "samples_per_second": 1}] * 2,
            {},
            r"cases.small\[1\]: a second row for `down` 1; expected one",
        ),
        (ROWS, {"surprise": 1}, "surprise"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path, rows, more, message):
    with pytest.raises(EntryError, match=message) as caught:
        read_entry(written(tmp_path, rows, **more))
    assert "\n" not in str(caught.value)


def test_a_table_of_other_stages_is_refused(tmp_path):
    with pytest.raises(EntryError, match="2 numbers; expected one for each of 3 stages"):
        make_table_policy(read_entry(written(tmp_path)), "small", 3)


def test_the_documented_policy(monkeypatch):
    points = [
        EntryPoint(
            "whole-pipelines", "examples.fleet_policy:WholePipelines", entry.ENTRY_POINT_GROUP
        ),
        EntryPoint("nonsense", "json:dumps", entry.ENTRY_POINT_GROUP),
        EntryPoint("gone", "no_such_module:A", entry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(
        entry,
        "entry_points",
        lambda group, name: [
            point for point in points if (point.group, point.name) == (group, name)
        ],
    )
    assert (
        load_installed_policy("whole-pipelines") is WholePipelines
        and load_installed_policy("other") is None
    )
    with pytest.raises(EntryError, match="is not a policy"):
        load_installed_policy("nonsense")
    with pytest.raises(
        EntryError, match="gone: no_such_module:A cannot be imported: ModuleNotFoundError"
    ):
        load_installed_policy("gone")
    policy = WholePipelines(scenario())
    result = simulate_policy(policy, trace(lose(100.0, 0)))
    whole, two = (policy.throughputs.one_f_one_b_rate(count) for count in (3, 2))
    assert result.useful_rates[result.cause_indices == 0] == pytest.approx([whole, two]) and (
        "SWITCH",
        30.0,
    ) in spans(result)


def test_policies_are_told_the_same_and_not_the_trace():
    """The scenario is all that any policy is made from."""
    assert Scenario._fields == ("throughputs", "costs", "seconds_between_failures")
    assert scenario().costs == COSTS
