"""What plans read of `[model]` and `[training]`: what the runtime reads there."""

import pytest

from slipstream.planner.job.run_keys import RunKeys, read_run_keys
from slipstream.runtime.config import ConfigError, parse_run_config
from tests.jobs import grid


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_parallel", 4),
        ("batch", 3),
        ("iterations", 0),
        ("recompute", "auto"),
        ("recompute", [0, "mlp"]),
        ("recompute", "full"),
    ],
)
def test_plans_and_the_runtime_read_the_same(key, value):
    found = getattr(read_run_keys({}, {key: value}), key)
    assert (
        found
        == getattr(parse_run_config({}, {key: value}).training, key)
        != getattr(RunKeys(), key)
    )


def test_tokens_of_a_sample_are_those_of_the_model():
    assert (
        read_run_keys({"context": 64}, {"context": 3}).context
        == 64
        == parse_run_config({"context": 64}, {}).model.context
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_parallel", 0),
        ("batch", True),
        ("batch", 1.5),
        ("iterations", -1),
        ("iterations", "20"),
        ("recompute", 7),
    ],
)
def test_what_the_runtime_refuses_is_not_given(key, value):
    with pytest.raises(ConfigError, match=rf"^training\.{key} is "):
        parse_run_config({}, {key: value})
    assert read_run_keys({}, {key: value}) == RunKeys()


def test_a_job_with_other_ranks_keeps_its_other_keys():
    job = grid(2, 2, 2, more="[training]\nbatch = 3\ntensor_parallel = 2")
    assert job.ranks == 2 and job.with_ranks(4).run_keys == RunKeys(batch=3, tensor_parallel=4)
