"""Layers that ask autograd for gradients themselves, in real processes.

They have the numbers of one process.
"""

import pytest

from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.launch import RunOptions, run
from tests.jobs import grid
from tests.runtime.running import assert_same_numbers, judge, schedule_for

JOB = grid(2, 2, 2, more="optimizer = 1\n[placement]\nlayers = [3, 3]")


def config(*kinds, **training):
    return parse_run_config(
        {
            "name": "tests.runtime.tried_model:Model",
            "width": 8,
            "context": 8,
            "options": {"kinds": list(kinds)},
        },
        {
            "batch": 1,
            "dtype": "float64",
            "device": "cpu",
            "iterations": 4,
            "learning_rate": 0.05,
            **training,
        },
    )


def test_gradients_within_a_forward_and_a_function_that_is_wrong_in_two(fork_server, tmp_path):
    notes, trained = [], config("Forces", "InnerStep", "Forces", "Unreduced", clip_norm=1.0)
    result = run(
        schedule_for(JOB),
        trained,
        out=tmp_path,
        fork_server=fork_server,
        options=RunOptions(notify=notes.append),
    )
    assert_same_numbers(result, judge(trained, JOB.microbatches, 4))
    assert [note for note in notes if "layer 4 (Unreduced) is not divided into I and W" in note]


def test_running_statistics_are_refused_before_a_worker_is_started(tmp_path):
    with pytest.raises(
        ConfigError, match=r"changes its 'norm.running_mean', as running statistics do"
    ):
        run(
            schedule_for(JOB), config("Plain", "Normalized", "Plain", "Plain"), out=tmp_path / "run"
        )
    assert not (tmp_path / "run" / "events.jsonl").exists()
