"""A rehearsed step uses the ops and dtypes of a step of the layers.

No kernel is loaded after it.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.runtime.computing.rehearsal import Rehearsal
from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.state.part_optimizer import PartOptimizer


class OpRecorder(TorchDispatchMode):
    """Collects the ops that run, each with the dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[tuple[str, frozenset[torch.dtype]]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [
            leaf
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        self.ops.add((str(func), frozenset(tensor.dtype for tensor in tensors)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig(),
        TrainingConfig(optimizer="sgd"),
        TrainingConfig(clip_norm=1.0),
        TrainingConfig(dtype="bf16", master_weights=True),
    ],
    ids=["adam", "sgd", "clipped", "master weights"],
)
def test_a_rehearsed_step_runs_the_ops_of_a_step_and_leaves_the_layers_alone(config):
    torch.manual_seed(0)
    layer = nn.Linear(8, 4).to(torch.bfloat16 if config.master_weights else torch.float32)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    rehearsal = Rehearsal()
    with OpRecorder() as rehearsed:
        rehearsal.run_step([layer], config)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    with OpRecorder() as again:
        rehearsal.run_step([layer], config)
    assert not again.ops

    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    spans = {0: ((0, 36),)}
    optimizer = PartOptimizer({0: layer}, config, spans, spans)
    with OpRecorder() as stepped:
        optimizer.layer_squares()
        optimizer.step(0, 0.5)
        optimizer.undo()
    assert stepped.ops <= rehearsed.ops, stepped.ops - rehearsed.ops
