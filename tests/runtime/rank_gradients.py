"""The ranks of a worker as processes of their own, without a run.

They give loss and whole gradients of a micro-batch.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from torch import Tensor, distributed

from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import RunConfig
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.processes.child_processes import ChildProcesses
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.store import connect_store, host_store
from slipstream.runtime.ranks.shards import gather_layer
from slipstream.runtime.ranks.worker_group import GroupConnection, WorkerGroup, enter_group
from slipstream.runtime.state.held_layers import build_holding
from slipstream.runtime.tensor_codec import write_tensors

CPU = torch.device("cpu")
NAME = Microbatch(0, 0, 0)
LOSS = "loss"


class Task(msgspec.Struct, frozen=True):
    """What a rank is to find, each in a file of its own."""

    rank: int
    configs: tuple[RunConfig, ...]
    rendezvous: Rendezvous
    folder: str


def file_of(folder: Path, index: int, rank: int) -> Path:
    """Where a rank leaves what it has found of one of the configurations."""
    return folder / f"{index}-{rank}.safetensors"


def find_on_ranks(configs: Sequence[RunConfig], folder: Path, fork_server: ForkServer) -> None:
    """Have the ranks of a worker write `whole_gradients` of each configuration."""
    (_, opened), ranks = (kept := host_store()), configs[0].training.tensor_parallel
    tasks = [Task(rank, tuple(configs), opened, str(folder)) for rank in range(ranks)]
    with ChildProcesses(f"{__name__}:find", tasks, fork_server) as children:
        children.collect_results(120.0)
    del kept


def find(task: str) -> bytes:
    """In the process of a rank."""
    asked = msgspec.json.decode(task, type=Task)
    torch.set_num_threads(1)
    size = asked.configs[0].training.tensor_parallel
    group = enter_group(asked.rank, size)
    assert group is not None
    backend = distributed.ProcessGroupGloo(
        connect_store(asked.rendezvous), asked.rank, size, timedelta(seconds=60)
    )
    group.connect(GroupConnection(backend, lambda _: nullcontext(), CPU, staged=False))
    for index, config in enumerate(asked.configs):
        write_tensors(
            file_of(Path(asked.folder), index, asked.rank), whole_gradients(config, group)
        )
    return b""


def whole_gradients(config: RunConfig, group: WorkerGroup | None) -> dict[str, Tensor]:
    """The loss of a micro-batch, and the gradients of all parameters.

    The backward is in two.
    """
    model = build_model(config.model, 0, torch.float64, CPU)
    holding = build_holding(model, range(model.layers), config.training)
    batch = load_data(config).batch(NAME, config.training.batch, config.model.context)
    first, second = (
        SliceRunner(layers, holding.modules, model, loss_scale=1.0, config=config)
        for layers in ((0, 1), (1, model.layers))
    )
    features = first.forward(NAME, batch[0], None, batch, split=True)
    assert features is not None
    second.forward(NAME, features, batch[1], batch, split=True)
    first.backward_input(NAME, second.backward_input(NAME, None))
    for runner in (second, first):
        runner.backward_weight(NAME)
    found = {LOSS: second.take_loss()}
    for layer, module in holding.modules.items():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.grad
        found.update(
            {f"{layer}.{name}": tensor for name, tensor in gather_layer(module, group).items()}
        )
    return found
