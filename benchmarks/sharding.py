"""Sharded optimizer state: steps per second against torch's ZeroRedundancyOptimizer, and bytes against the formula.

    python -m benchmarks.sharding [--workers 4] [--width 256] [--blocks 2] [--microbatches 2] [--iterations 12]
                                  [--repeats 3]

A GPT of one stage on so many workers, in float32 on CPUs: without and with `[training] shard_optimizer`, and under
torch.distributed's DistributedDataParallel with a ZeroRedundancyOptimizer over AdamW, which reads the same
micro-batches and keeps no copy of any part. In turns; the least wall time of an iteration counts, over the last half
of a run. Exit status 1 when what a worker keeps of the optimizer is more than 2 % off (1 + buddy) x 20 bytes a
parameter / workers.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs import uniform_job
from planner.plan import plan_job
from runtime.config import RunConfig, parse_run_config
from runtime.launch import run
from runtime.model.data import Microbatch, load_corpus
from runtime.model.holding import Holding
from runtime.model.layers import model_for, parameter_dtype
from runtime.model.part_optimizer import PartOptimizer
from runtime.model.part_state import elements_of
from runtime.model.parts import cut
from runtime.processes.children import Children
from runtime.processes.fork_server import ForkServer
from schedules.schedule import Worker

BYTES = 20
"""Of the optimizer for each parameter that is stepped: two moments, and what undoes a step of them and of itself."""
LIMIT = 0.02
CPU = torch.device("cpu")


class _Rank(msgspec.Struct, frozen=True):
    config: RunConfig
    rank: int
    workers: int
    microbatches: int
    folder: str


def ours(config: RunConfig, workers: int, microbatches: int, fork_server: ForkServer) -> float:
    """Seconds of an iteration."""
    ends: list[float] = []
    schedule = plan_job(uniform_job(workers, 1, microbatches, op=1, optimizer=1, transfer=0), method="greedy").schedule
    with tempfile.TemporaryDirectory() as folder:
        run(schedule, config, out=Path(folder), fork_server=fork_server,
            progress=lambda *_: ends.append(time.perf_counter()))
    return _least(ends)


def torchs(config: RunConfig, workers: int, microbatches: int) -> float:
    """Seconds of an iteration under ZeroRedundancyOptimizer."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [_Rank(config, rank, workers, microbatches, folder) for rank in range(workers)]
        with Children("benchmarks.sharding:zero", tasks) as children:
            return max(float(answer) for answer in children.answers(300))


def zero(data: bytes) -> bytes:
    """One process of a run under ZeroRedundancyOptimizer."""
    task = msgspec.json.decode(data, type=_Rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{task.folder}/meeting", rank=task.rank,
                                   world_size=task.workers)
    training = task.config.training
    model = model_for(task.config.model, training.seed, parameter_dtype(training), CPU)
    module = DistributedDataParallel(nn.Sequential(*(model.build(layer) for layer in range(model.layers))))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=training.learning_rate,
                                        betas=training.betas, weight_decay=training.weight_decay, fused=True)
    corpus, ends = load_corpus(task.config, (task.microbatches,) * task.workers), list[float]()
    for iteration in range(training.iterations):
        for index in range(task.microbatches):
            tokens, target, *_ = corpus.batch(Microbatch(iteration, task.rank, index), training.batch,
                                              task.config.model.context)
            last = index == task.microbatches - 1
            with contextlib.nullcontext() if last else module.no_sync():
                (model.loss(module(tokens), target) / task.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    distributed.destroy_process_group()
    return str(_least(ends)).encode()


def _least(ends: Sequence[float]) -> float:
    """Of an iteration in the second half."""
    return min(after - before for before, after in pairwise(ends[len(ends) // 2:]))


def bytes_kept(config: RunConfig, workers: int) -> tuple[int, int]:
    """What the first worker keeps of the optimizer once it has stepped, and how many parameters the model has."""
    model = model_for(config.model, 0, parameter_dtype(config.training), CPU)
    holding = Holding({layer: model.build(layer) for layer in range(model.layers)}, config.training)
    total, members = sum(map(elements_of, holding.modules.values())), [Worker(one, 0) for one in range(workers)]
    holding.keep(holding.modules, {(0, model.layers): cut(total, members, (), sharded=True)}, members[0], [], -1)
    for iteration in range(2):
        holding.optimizer.step(iteration)
    assert isinstance(holding.optimizer, PartOptimizer)
    return holding.optimizer.state_bytes() + holding.optimizer.undo_bytes(), total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("workers", 4), ("width", 256), ("blocks", 2), ("microbatches", 2), ("iterations", 12),
                          ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    model = {"blocks": options.blocks, "width": options.width, "heads": 4, "context": 64}
    plain, sharded = (parse_run_config(model, {"batch": 1, "device": "cpu", "iterations": options.iterations,
                                               "shard_optimizer": shard}) for shard in (False, True))
    found: dict[str, list[float]] = {"whole state": [], "sharded, with buddies": [], "ZeroRedundancyOptimizer": []}
    with ForkServer() as fork_server:
        for _ in range(options.repeats):
            found["whole state"].append(ours(plain, options.workers, options.microbatches, fork_server))
            found["sharded, with buddies"].append(ours(sharded, options.workers, options.microbatches, fork_server))
            found["ZeroRedundancyOptimizer"].append(torchs(plain, options.workers, options.microbatches))
    table, rival = Table("", "ms an iteration", "steps / s, of ZeRO's"), min(found["ZeroRedundancyOptimizer"])
    for name, seconds in found.items():
        table.add_row(name, f"{min(seconds) * 1e3:.1f}", f"{rival / min(seconds):.2f}")
    Console().print(table)
    kept, parameters = bytes_kept(sharded, options.workers)
    formula = 2 * BYTES * parameters / options.workers
    print(f"{parameters / 1e6:.2f} million parameters: a worker keeps {kept / parameters:.2f} bytes each of the "
          f"optimizer, {kept / formula - 1:+.2%} off the formula")
    sys.exit(abs(kept / formula - 1) > LIMIT)


if __name__ == "__main__":
    main()
