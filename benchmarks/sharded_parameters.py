"""Measure two CPU ranks of a worker that shard a stage's parameters with fully_shard.

    python -m benchmarks.sharded_parameters [--widths 128 256 ...] [--layers N] [--rounds N]
                                            [--json]

Each rank takes half of a micro-batch's rows. The benchmark measures, by the width of the layers: F,
I and W of that half with whole parameters; a gather of a layer's parameters and a reduce-scatter of
its gradients over gloo, and their bytes; F and B under fully_shard, the memory then held beyond its
parts of parameters, and the difference of its gradients from those of one process. For a backward
that is split beneath fully_shard it measures: how many parameters have a reduced gradient after I
and W; how many have the right one if whole gradients are held until W has run, and reduced then;
and what is held in between. Times are medians, in milliseconds.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard

from slipstream.runtime.models.split_backward import (
    WeightWork,
    backward_input,
    backward_weight,
    deferring_weights,
)

RANKS = 2
ROWS = 256
"""Number of rows of a micro-batch, of which each rank takes its part."""


class Block(nn.Module):
    """Two products and a norm, as a decoder layer's MLP: 8 width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map features [S, C] to features [S, C]."""
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


def build_stage(width: int, layers: int) -> nn.Sequential:
    """Build the same stage in each process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers))).double()


def held_bytes() -> int:
    """Return the bytes of all tensors that Python knows of.

    They are parameters and gradients, not what autograd has saved.
    """
    gc.collect()
    storages = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in gc.get_objects()
        if type(item) in (Tensor, nn.Parameter)
    }
    return sum(storages.values())


def _median(rounds: int, measure: Callable[[], Sequence[float]]) -> list[float]:
    """Return the median of several times after a first one. Both ranks begin each together."""
    taken = []
    for _ in range(1 + rounds):
        distributed.barrier()
        taken.append(measure())
    return [1e3 * statistics.median(values) for values in zip(*taken[1:], strict=True)]


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _split(stage: nn.Module, rows: Tensor) -> list[float]:
    """Return the times of F, I and W."""
    work: WeightWork = deque()
    value, found = rows.clone().requires_grad_(), list[Tensor]()

    def forward() -> None:
        with deferring_weights(work):
            found.append(stage(value))

    return [
        _timed(forward),
        _timed(lambda: backward_input(found, [torch.ones_like(found[0])], work)),
        _timed(lambda: backward_weight(work)),
    ]


def _joint(stage: nn.Module, rows: Tensor, held_sizes: list[int]) -> list[float]:
    """Return the times of F and B, and note what is held after each."""
    value, found = rows.clone().requires_grad_(), list[Tensor]()
    times = [_timed(lambda: found.append(stage(value)))]
    held_sizes.append(held_bytes())
    times.append(_timed(lambda: found[0].sum().backward()))
    held_sizes.append(held_bytes())
    return times


def _measure_whole(rows: Tensor, stage: nn.Sequential, rounds: int) -> dict[str, float]:
    """Return the times of F, I, W, gather and reduction of a layer's whole parameters."""
    forward, of_input, of_weight = _median(rounds, lambda: _split(stage, rows))
    size = -(-sum(parameter.numel() for parameter in stage[0].parameters()) // RANKS)
    part, full = (
        torch.zeros(size, dtype=torch.float64),
        torch.zeros(size * RANKS, dtype=torch.float64),
    )
    [gather] = _median(rounds, lambda: [_timed(lambda: distributed.all_gather_single(full, part))])
    [scatter] = _median(
        rounds, lambda: [_timed(lambda: distributed.reduce_scatter_single(part, full))]
    )
    return {
        "forward": forward,
        "backward_input": of_input,
        "backward_weight": of_weight,
        "gather": gather,
        "reduce_scatter": scatter,
    }


def _sharded(width: int, layers: int) -> nn.Sequential:
    stage = build_stage(width, layers)
    for layer in stage:
        fully_shard(layer)
    fully_shard(stage)
    return stage


def _measure_sharded(
    rows: Tensor, layers: int, expected: dict[str, Tensor], rounds: int
) -> dict[str, float]:
    """Return the times and memory of fully_shard, and the state of its gradients.

    `expected` are those of one process.
    """
    width = rows.shape[1]
    stage = _sharded(width, layers)
    held_sizes, begun = list[int](), held_bytes()
    forward, backward = _median(rounds, lambda: _joint(stage, rows, held_sizes))
    off = 0.0
    for name, parameter in stage.named_parameters():
        found: Any = parameter.grad  # the mean over ranks, summed over all rounds
        off = max(
            off, float((found.full_tensor() * RANKS / (1 + rounds) - expected[name]).abs().max())
        )
    stage.zero_grad()
    _split(stage, rows)
    reduced = sum(parameter.grad is not None for parameter in stage.parameters())
    stage = _sharded(width, layers)
    anew = held_bytes()
    _hold_gradients(stage, hold=True)
    _split(stage, rows)
    between = held_bytes() - anew
    _hold_gradients(stage, hold=False)
    equal_gradients = sum(
        _is_near(parameter.grad, expected[name]) for name, parameter in stage.named_parameters()
    )
    return {
        "sharded_forward": forward,
        "sharded_backward": backward,
        "held_after_forward": held_sizes[0] - begun,
        "held_after_backward": held_sizes[1] - begun,
        "off": off,
        "reduced": reduced,
        "told": equal_gradients,
        "held_between": between,
        "parameters": len(expected),
    }


def _hold_gradients(stage: Any, *, hold: bool) -> None:
    """Keep whole parameters and gradients, or reduce them now.

    It makes non-public calls, as torch's own pipelines do.
    """
    stage.set_reshard_after_backward(not hold)
    stage.set_requires_gradient_sync(not hold)
    if not hold:
        state: Any = fully_shard.state(stage)  # type: ignore[attr-defined]
        for shard_state in state._state_ctx.all_states:
            for group in shard_state._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()


def _is_near(gradient: Any, expected: Tensor) -> bool:
    return gradient is not None and torch.allclose(
        gradient.full_tensor() * RANKS, expected, rtol=0, atol=1e-9
    )


def _measure(rank: int, width: int, layers: int, rounds: int) -> dict[str, float]:
    rows = torch.randn(ROWS, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine, stage = rows.chunk(RANKS)[rank], build_stage(width, layers)
    found = {
        "width": width,
        "stage_bytes": sum(parameter.nbytes for parameter in stage.parameters()),
    }
    found |= _measure_whole(mine, stage, rounds)
    stage.zero_grad()
    stage(rows).sum().backward()
    expected = {
        name: parameter.grad.clone()
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }
    return found | _measure_sharded(mine, layers, expected, rounds)


def _run_rank(rank: int, folder: str, widths: Sequence[int], layers: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = [_measure(rank, width, layers, rounds) for width in widths]
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def measure(widths: Sequence[int], layers: int, rounds: int) -> list[dict[str, float]]:
    """Return the measurements by width, with two ranks over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(  # type: ignore[no-untyped-call]
            _run_rank, (folder, widths, layers, rounds), nprocs=RANKS
        )
        found: list[dict[str, float]] = json.loads((Path(folder) / "found.json").read_text())
    return found


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded_parameters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.widths, arguments.layers, arguments.rounds)
    if arguments.json:
        print(json.dumps(found))
        return
    table = Table(
        title=f"{arguments.layers} layers, {ROWS} rows, {RANKS} ranks over gloo; ms and MB of a "
        "stage"
    )
    for column in (
        "width",
        "F",
        "I",
        "W",
        "gathers",
        "scatters",
        "beside F+I+W",
        "MB moved",
        "F sharded",
        "B sharded",
        "MB whole",
        "after F",
        "after B",
        "off",
        "reduced",
        "told",
        "MB between",
    ):
        table.add_column(column, justify="right")
    for row in found:
        moved = 2 * row["gather"] + row["reduce_scatter"]
        computed = row["forward"] + row["backward_input"] + row["backward_weight"]
        times = [row[key] for key in ("forward", "backward_input", "backward_weight")]
        sharded_times = [row[key] for key in ("sharded_forward", "sharded_backward")]
        sizes = [
            row[key] / 1e6 for key in ("stage_bytes", "held_after_forward", "held_after_backward")
        ]
        table.add_row(
            str(row["width"]),
            *map("{:.1f}".format, times),
            f"{2 * arguments.layers * row['gather']:.1f}",
            f"{arguments.layers * row['reduce_scatter']:.1f}",
            f"{arguments.layers * moved / computed:.0%}",
            f"{3 * row['stage_bytes'] / RANKS / 1e6:.1f}",
            *map("{:.1f}".format, sharded_times),
            *map("{:.1f}".format, sizes),
            f"{row['off']:.1e}",
            f"{row['reduced']} of {row['parameters']}",
            f"{row['told']} of {row['parameters']}",
            f"{row['held_between'] / 1e6:.1f}",
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
