"""Layers that torch's parallelize_module has cut."""

import subprocess
import sys

import pytest

from tests import patience

LEFT_BEHIND = """
import threading

import torch
from torch import nn

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.models.calling import LayerCall
from slipstream.runtime.state.held_layers import build_on_device
from slipstream.runtime.ranks.worker_group import enter_group
from tests.runtime.parallelized import Parallelized

enter_group(0, 2)
config = parse_run_config({"blocks": 1, "width": 8, "context": 8}, {"batch": 1, "device": "cpu"})
layer = build_on_device(Parallelized(config.model, 0, torch.float64, torch.device("cpu")), 1)
value = torch.ones(1, 8, 8, dtype=torch.float64)
expected, inside = LayerCall(layer)(value, None), threading.Event()


def stuck(*_):
    if threading.current_thread() is thread:
        inside.set()
        threading.Event().wait()


layer.norm.register_forward_hook(stuck)
thread = threading.Thread(target=LayerCall(layer), args=(value, None), daemon=True)
thread.start()
assert inside.wait(60)
assert all(type(one) is nn.Parameter for one in layer.parameters())
assert torch.equal(LayerCall(layer)(value, None), expected)
layer.eval()
again = LayerCall(layer)
layer.train()
assert torch.equal(again(value, None), expected)
"""


@pytest.mark.slow
def test_a_thread_that_is_left_behind_within_a_call_leaves_the_parameters_in_place():
    """In a process of its own: its ranks' group is torch's default one, for good."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND],
        capture_output=True,
        text=True,
        timeout=patience.SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
