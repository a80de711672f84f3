"""Compare sharded optimizer state with torch's ZeroRedundancyOptimizer.

    python -m benchmarks.sharding [--workers 4] [--width 256] [--blocks 2] [--microbatches 2]
                                  [--iterations 12] [--repeats 3] [--steps-to-compute 8]

It compares the speed; bytes are compared with the formula. A GPT of one stage runs on the given
number of workers, in float32 on CPUs: without and with `[training] shard_optimizer`, and under
torch.distributed's DistributedDataParallel with a ZeroRedundancyOptimizer over AdamW, which reads
the same micro-batches and keeps no copy of any part. They take turns; the least wall time of an
iteration counts, over the last half of a run.

Then the benchmark measures the cost of buddies: how long workers wait for reducing, stepping and
gathering, with and without them, in turns, and the whole iteration. Compute sleeps for as long as
the given number of such steps takes, as a device leaves cores to others. Steps run once on these
cores, which all workers share, and once sleep, too, for as long as AdamW and its undo copies take
on an idle core. Exit status 1 when the optimizer bytes of a worker are more than 2 % off (1 +
buddy) x 20 bytes per parameter / workers.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from torch import distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs import uniform_job
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import RunConfig, TrainingConfig, parse_run_config
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.launch import run
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.processes.child_processes import ChildProcesses
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.store import connect_store, host_store
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.state.part_exchange import PartExchange
from slipstream.runtime.state.part_optimizer import PartOptimizer
from slipstream.runtime.state.part_state import count_elements
from slipstream.runtime.state.parts import StatePartition, build_partition
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

BYTES = 20
"""Bytes of the optimizer per stepped parameter.

They are of two moments, and undo copies of them and of the parameter.
"""
LIMIT = 0.02
STEPS = 24
_SECONDS = "SHARDING_SECONDS_PER_ELEMENT"
CPU = torch.device("cpu")


class _Rank(msgspec.Struct, frozen=True):
    config: RunConfig
    rank: int
    workers: int
    microbatches: int = 1
    folder: str = ""
    seconds_per_element: float = 0.0
    """Time that steps sleep per element, in seconds. 0 makes them compute."""
    compute_seconds: float = 0.0
    """Time that compute sleeps, in seconds, while steps run."""
    rendezvous: Rendezvous | None = None


def ours(config: RunConfig, workers: int, microbatches: int, fork_server: ForkServer) -> float:
    """Return the seconds of an iteration here."""
    ends: list[float] = []
    schedule = plan_job(
        uniform_job(workers, 1, microbatches, op=1, optimizer=1, transfer=0), method="greedy"
    ).schedule
    with tempfile.TemporaryDirectory() as folder:
        run(
            schedule,
            config,
            out=Path(folder),
            fork_server=fork_server,
            progress=lambda *_: ends.append(time.perf_counter()),
        )
    return _least(ends)


def torchs(config: RunConfig, workers: int, microbatches: int) -> float:
    """Return the seconds of an iteration under ZeroRedundancyOptimizer."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [_Rank(config, rank, workers, microbatches, folder) for rank in range(workers)]
        with ChildProcesses("benchmarks.sharding:zero", tasks) as children:
            return max(float(answer) for answer in children.collect_results(300))


def zero(data: bytes) -> bytes:
    """Run one process under ZeroRedundancyOptimizer."""
    task = msgspec.json.decode(data, type=_Rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{task.folder}/meeting", rank=task.rank, world_size=task.workers
    )
    training = task.config.training
    model = build_model(task.config.model, training.seed, parameter_dtype(training), CPU)
    module = DistributedDataParallel(
        nn.Sequential(*(model.build(layer) for layer in range(model.layers))),
        gradient_as_bucket_view=True,
    )
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(),
        torch.optim.AdamW,
        lr=training.learning_rate,
        betas=training.betas,
        weight_decay=training.weight_decay,
        fused=True,
        parameters_as_bucket_view=True,
    )
    corpus, ends = load_data(task.config, (task.microbatches,) * task.workers), list[float]()
    for iteration in range(training.iterations):
        for index in range(task.microbatches):
            tokens, target, *_ = corpus.batch(
                Microbatch(iteration, task.rank, index), training.batch, task.config.model.context
            )
            last = index == task.microbatches - 1
            with contextlib.nullcontext() if last else module.no_sync():
                (model.loss(module(tokens), target) / task.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    distributed.destroy_process_group()
    return str(_least(ends)).encode()


def sleeping_adamw(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.Optimizer:
    """Return an optimizer that takes the time of AdamW, and changes nothing."""
    seconds = float(os.environ[_SECONDS])

    class Sleeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
            time.sleep(
                seconds
                * sum(
                    parameter.numel()
                    for group in self.param_groups
                    for parameter in group["params"]
                )
            )

    return Sleeping(groups, lr=config.learning_rate)


def seconds_per_element(config: RunConfig) -> float:
    """Return the seconds per element of a step that can be undone, on one core."""
    torch.set_num_threads(1)
    model = build_model(config.model, 0, parameter_dtype(config.training), CPU)
    holding = HeldLayers(
        {layer: model.build(layer) for layer in range(model.layers)}, config.training
    )
    times = []
    for iteration in range(STEPS // 4):
        began = time.perf_counter()
        holding.optimizer.step(iteration)
        times.append(time.perf_counter() - began)
    return min(times) / sum(count_elements(module).total for module in holding.modules.values())


class _Times(NamedTuple):
    """Seconds of A and O, and of the iteration."""

    waited: float
    iteration: float


def cost_of_buddies(
    config: RunConfig, workers: int, compute: float, sleep: float = 0.0
) -> tuple[_Times, _Times]:
    """Return the times of reducing, stepping and gathering, without and with buddies.

    They are of the whole model. Steps may sleep.
    """
    store, opened = host_store()
    if sleep:
        config = replace(
            config,
            training=replace(config.training, optimizer="benchmarks.sharding:sleeping_adamw"),
        )
    with ChildProcesses(
        "benchmarks.sharding:step_parts",
        [
            _Rank(
                config,
                rank,
                workers,
                seconds_per_element=sleep,
                compute_seconds=compute,
                rendezvous=opened,
            )
            for rank in range(workers)
        ],
    ) as children:
        found = [
            msgspec.json.decode(answer, type=tuple[_Times, _Times])
            for answer in children.collect_results(300)
        ]
    del store
    without, beside = (
        _Times(*map(max, zip(*times, strict=True))) for times in zip(*found, strict=True)
    )
    return without, beside


def step_parts(data: bytes) -> bytes:
    """Run a process that reduces, steps and gathers, with and without buddies."""
    task = msgspec.json.decode(data, type=_Rank)
    assert task.rendezvous is not None
    torch.set_num_threads(1)
    os.environ[_SECONDS] = str(task.seconds_per_element)
    model = build_model(task.config.model, 0, parameter_dtype(task.config.training), CPU)
    members, layers = [Worker(number, 0) for number in range(task.workers)], (0, model.layers)
    me = members[task.rank]
    session = GenerationSession(
        Membership(1, {worker: rank for rank, worker in enumerate(members)}, me),
        links=GroupCache("gloo"),
        device=CPU,
        store=connect_store(task.rendezvous),
    ).connect({layers: members}, pairs=())
    seconds: list[list[_Times]] = [[], []]
    holdings = []
    for buddies in (False, True):
        holding = HeldLayers(
            {layer: model.build(layer) for layer in range(model.layers)}, task.config.training
        )
        partition = build_partition(
            sum(count_elements(module).cut for module in holding.modules.values()),
            members,
            (),
            sharded=True,
        )
        partition = partition if buddies else partition._replace(buddies=(None,) * task.workers)
        holding.hold_layers(holding.modules, {layers: partition}, me, [], -1)
        holdings.append((holding, partition))
    for iteration in range(STEPS):
        for (holding, partition), times in zip(holdings, seconds, strict=True):
            session.wait_for_all()
            began = time.perf_counter()
            _reduce_and_step(PartExchange(session), holding, partition, layers, iteration)
            stepped = time.perf_counter()
            time.sleep(task.compute_seconds)
            holding.copy_buffers(layers)  # waits for their step, as the next A does
            times.append(_Times(stepped - began, time.perf_counter() - began))
    session.wait_for_all()
    medians = []
    for times in seconds:
        # The first quarter warms up.
        medians.append([statistics.median(some) for some in zip(*times[STEPS // 4 :], strict=True)])
    return msgspec.json.encode(medians)


def _reduce_and_step(
    exchange: PartExchange,
    holding: HeldLayers,
    cut: StatePartition,
    layers: LayerRange,
    iteration: int,
) -> None:
    """Reduce and step as the executor's A and O do."""
    ((_, parameters, _),) = holding.flat_parameters()
    exchange.reduce_gradients(
        layers, holding.flat_gradients(layers)[0], cut, holding.copy_buffers(layers)
    )
    holding.optimizer.step(iteration)
    exchange.wait_for_copies()
    exchange.start_gather(layers, parameters, cut)()
    holding.optimizer.start_copy_steps()


def _least(ends: Sequence[float]) -> float:
    """Return the least seconds of an iteration in the second half."""
    return min(after - before for before, after in pairwise(ends[len(ends) // 2 :]))


def bytes_kept(config: RunConfig, workers: int) -> tuple[int, int]:
    """Return a worker's optimizer bytes after a step, and the model's parameters."""
    model = build_model(config.model, 0, parameter_dtype(config.training), CPU)
    holding = HeldLayers(
        {layer: model.build(layer) for layer in range(model.layers)}, config.training
    )
    total = sum(count_elements(module).cut for module in holding.modules.values())
    members = [Worker(number, 0) for number in range(workers)]
    holding.hold_layers(
        holding.modules,
        {(0, model.layers): build_partition(total, members, (), sharded=True)},
        members[0],
        [],
        -1,
    )
    for iteration in range(2):
        holding.optimizer.step(iteration)
    assert isinstance(holding.optimizer, PartOptimizer)
    return holding.optimizer.state_bytes() + holding.optimizer.undo_bytes(), total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("workers", 4),
        ("width", 256),
        ("blocks", 2),
        ("microbatches", 2),
        ("iterations", 12),
        ("repeats", 3),
        ("steps-to-compute", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    model = {"blocks": options.blocks, "width": options.width, "heads": 4, "context": 64}
    plain, sharded = (
        parse_run_config(
            model,
            {
                "batch": 1,
                "device": "cpu",
                "iterations": options.iterations,
                "shard_optimizer": shard,
            },
        )
        for shard in (False, True)
    )
    found: dict[str, list[float]] = {
        "whole state": [],
        "sharded, with buddies": [],
        "ZeroRedundancyOptimizer": [],
    }
    with ForkServer() as fork_server:
        for _ in range(options.repeats):
            found["whole state"].append(
                ours(plain, options.workers, options.microbatches, fork_server)
            )
            found["sharded, with buddies"].append(
                ours(sharded, options.workers, options.microbatches, fork_server)
            )
            found["ZeroRedundancyOptimizer"].append(
                torchs(plain, options.workers, options.microbatches)
            )
    table, rival = (
        Table("", "ms an iteration", "steps / s, of ZeRO's"),
        min(found["ZeroRedundancyOptimizer"]),
    )
    for name, seconds in found.items():
        table.add_row(name, f"{min(seconds) * 1e3:.1f}", f"{rival / min(seconds):.2f}")
    Console().print(table)
    kept, parameters = bytes_kept(sharded, options.workers)
    step = seconds_per_element(sharded)
    for sleep in (0.0, step):
        without, beside = cost_of_buddies(
            sharded,
            options.workers,
            options.steps_to_compute * step * parameters / options.workers,
            sleep,
        )
        for what, fewer, more in zip(("A and O", "iteration"), without, beside, strict=True):
            print(
                f"{what}, steps {'asleep' if sleep else 'on these cores'}: {fewer * 1e3:.1f} ms "
                f"without buddies, {more * 1e3:.1f} ms with them, {more / fewer:.3f} of that"
            )
    formula = 2 * BYTES * parameters / options.workers
    print(
        f"{parameters / 1e6:.2f} million parameters: a worker keeps {kept / parameters:.2f} bytes "
        f"each of the optimizer, {kept / formula - 1:+.2%} off the formula"
    )
    sys.exit(abs(kept / formula - 1) > LIMIT)


if __name__ == "__main__":
    main()
