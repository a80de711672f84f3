"""torchtitan's data sets: a stream goes on from the state that a checkpoint holds."""

import importlib.util
import json

import pytest
import torch

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.data.data import Microbatch, get_data_state, load_data, use_saved_states
from slipstream.runtime.replay.microbatch import SamplesRead
from tests.interop.titan_training import write_assets

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed: make neighbours",
)
COUNTS = [2, 2]


def read(data, iteration: int) -> list[torch.Tensor]:
    """All tensors of an iteration."""
    return [
        tensor
        for pipeline in range(2)
        for index in range(2)
        for tensor in data.batch(Microbatch(iteration, pipeline, index), 2, 16)
    ]


@pytest.mark.parametrize("grown", [False, True])
def test_a_stream_goes_on_from_a_saved_state(grown, tmp_path, monkeypatch):
    """A stream goes on where it was saved, also on a grid that reads more.

    Samples of earlier runs need not be read.
    """
    from slipstream.runtime.data import torchtitan_data

    assets = str(write_assets(tmp_path))
    config = parse_run_config(
        {"torchtitan": "llama3/debugmodel", "context": 16},
        {
            "data": "torchtitan",
            "options": {"assets": assets, "dataset": "c4_test", "dataset_path": f"{assets}/data"},
            "device": "cpu",
            "batch": 2,
            "iterations": 30,
        },
    )
    first = load_data(config, COUNTS)
    expected = {iteration: read(first, iteration) for iteration in range(15)}
    states = {iteration: get_data_state(first, iteration) for iteration in (0, 8, 12, 15)}
    assert states.pop(0) is None, "only recent ones are kept"
    states = {iteration: json.loads(json.dumps(state)) for iteration, state in states.items()}
    later = load_data(config, COUNTS, *([SamplesRead(8, 64)] if grown else []))
    use_saved_states(
        later,
        lambda iteration: max(
            ((number, states[number]) for number in states if number <= iteration), default=None
        ),
    )
    reads = []
    next_sample = torchtitan_data._next_sample
    monkeypatch.setattr(
        torchtitan_data,
        "_next_sample",
        lambda *arguments: reads.append(arguments) or next_sample(*arguments),
    )
    for iteration in (13, 14, 8):
        found = zip(read(later, iteration), expected[iteration], strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in found)
    assert len(reads) == sum(COUNTS) * (2 + 1 + 1), "12 to 14, and 8: nothing before"
