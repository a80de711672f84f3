"""Gloo or NCCL."""

import pytest

from slipstream.runtime.config import ConfigError
from slipstream.runtime.device import choose_transport


@pytest.mark.parametrize(
    ("wanted", "device", "processes", "cards", "shared", "chosen"),
    [
        ("auto", "cpu", 4, 0, False, "gloo"),
        ("auto", "cuda", 4, 4, False, "nccl"),
        ("auto", "cuda", 4, 1, False, "gloo"),
        ("gloo", "cuda", 4, 4, False, "gloo"),
        ("nccl", "cuda", 2, 4, False, "nccl"),
        ("nccl", "cuda", 4, 1, True, "nccl"),
        ("auto", "cuda", 4, 1, True, "nccl"),
        ("gloo", "cuda", 4, 1, True, "gloo"),
        ("auto", "cpu", 4, 0, True, "gloo"),
    ],
)
def test_transport(wanted, device, processes, cards, shared, chosen):
    assert choose_transport(wanted, device, processes, cards, shared=shared) == chosen


def test_nccl_needs_a_card_for_each_worker_unless_they_are_to_share_it():
    with pytest.raises(
        ConfigError, match=r"this machine has 1 for 2 processes; training.share_devices = true"
    ):
        choose_transport("nccl", "cuda", 2, 1, shared=False)
    with pytest.raises(
        ConfigError, match=r"this run is on 'cpu'; expected training.device = 'cuda'"
    ):
        choose_transport("nccl", "cpu", 2, 4, shared=True)
