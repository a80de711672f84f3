"""Gloo or NCCL."""

import pytest

from slipstream.runtime.config import ConfigError
from slipstream.runtime.replay.transport import choose_transport


@pytest.mark.parametrize(("wanted", "device", "workers", "cards", "chosen"), [
    ("auto", "cpu", 4, 0, "gloo"), ("auto", "cuda", 4, 4, "nccl"), ("auto", "cuda", 4, 1, "gloo"),
    ("gloo", "cuda", 4, 4, "gloo"), ("nccl", "cuda", 2, 4, "nccl")])
def test_transport(wanted, device, workers, cards, chosen):
    assert choose_transport(wanted, device, workers, cards) == chosen


def test_nccl_needs_a_card_for_each_worker():
    with pytest.raises(ConfigError, match="here are 1 for 2 workers"):
        choose_transport("nccl", "cuda", 2, 1)
