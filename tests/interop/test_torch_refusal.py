"""What docs/neighbours.md says that PyTorch's pipeline runtime refuses: when this fails, that page is to be changed."""

import pytest
from torch.distributed.pipelining.schedules import _Action, _validate_schedule

WHOLE = {0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", "1B0", "1F1", "1B1"]}
RE_ROUTED = {**WHOLE, 1: ["1F0", "1B0"]}
"""A peer in another pipeline runs micro-batch 1 of stage 1."""


def validate(order):
    actions = {rank: [_Action.from_str(one) for one in ops] for rank, ops in order.items()}
    return _validate_schedule(actions, 2, 2, 2)


def test_a_stage_that_runs_some_of_the_microbatches_is_refused():
    assert validate(WHOLE) == {0: 0, 1: 1}
    with pytest.raises(AssertionError, match=r"Got 1 .*FORWARD microbatches for stage 1, expected 2"):
        validate(RE_ROUTED)
