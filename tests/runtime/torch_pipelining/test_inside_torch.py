"""What `inside_torch` overrides is there in torch.

Nothing else of the package uses private names.
"""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, _utils
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from slipstream.runtime import torch_pipelining
from slipstream.runtime.torch_pipelining.inside_torch import (
    RoutedRuntime,
    RoutedStage,
    reset_shards,
)

FOLDER = Path(torch_pipelining.__file__).parent
OWN = {
    "set_forms",
    "wait_for_sends",
    "_receive",
    "_send",
    "_build",
    "_fill",
    "_await",
    "_for_all",
    "_tag",
    "run",
}
"""Methods that override nothing."""


@pytest.mark.parametrize(
    ("kind", "base"), [(RoutedStage, PipelineStage), (RoutedRuntime, _PipelineScheduleRuntime)]
)
def test_each_override_has_something_to_override(kind, base):
    """Where torch renames a method, ours would be dead, and torch's would run."""
    methods = {
        name for name, value in vars(kind).items() if callable(value) and not name.startswith("__")
    }
    # Torch 2.11 has neither.
    later = {"_warmup_p2p"} if not hasattr(_utils, "InferenceMode") else set()
    assert {name for name in methods if not hasattr(base, name)} <= OWN | later
    assert not any(hasattr(base, name) for name in OWN & methods)


def private_uses(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    imported = {
        f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
        for name in node.names
    }
    private = set()
    for name in imported:
        if any(part.startswith("_") for part in name.split(".")):
            private.add(name)
    return private


def test_private_names_of_torch_are_in_one_file():
    using = {path.name for path in FOLDER.glob("*.py") if private_uses(path)}
    assert using == {"inside_torch.py"}


@pytest.mark.usefixtures("one_process")
def test_shards_are_reset_before_the_first_forward_and_after_one_that_came_to_nothing():
    module = fully_shard(
        nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False
    )
    value, gradients = torch.ones(2, 4), []
    for _ in range(2):
        reset_shards(module)
        module(value)  # its backward never comes
        reset_shards(module)
        module.zero_grad()
        module(value).sum().backward()
        gradients.append(module.weight.grad.to_local().clone())
    assert torch.equal(gradients[0], torch.full((4, 4), 2.0)) and torch.equal(*gradients)
