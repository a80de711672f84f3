"""Measure the memory of a stage in its own process.

    python -m benchmarks.stage_memory STAGE CONFIG

prints it as JSON: of micro-batches between F and I, between I and W, and permanently. The number is
the memory that the system reports for the process (Linux), or that torch has allocated on its GPU.
"""

import gc
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from slipstream.runtime.computing.slices import SliceRunner, TensorForm, find_forms
from slipstream.runtime.config import RunConfig, parse_run_config
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.device import choose_device
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.placement import split_layers
from slipstream.runtime.replay.layer_values import Form
from slipstream.runtime.state.held_layers import build_holding

STAGES = 2
ROW = 8
"""Number of micro-batches that are held at a time."""
MMAP_THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "32768"}
"""Environment that makes freed memory return to the system.

The memory of a process is then what is alive.
"""


class Line(NamedTuple):
    """Profiled and measured bytes of one kind on one stage."""

    stage: int
    what: str
    profiled: int
    measured: int

    @property
    def ratio(self) -> float:
        """Profiled bytes relative to the measured ones."""
        return self.profiled / self.measured


def held_bytes(device: torch.device) -> int:
    """Return the memory that this process holds, on its GPU or in the host."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def measure(config: RunConfig, index: int) -> dict[str, int]:
    """Return the bytes of a stage in this process.

    They are per micro-batch after F and after I, permanent, and of the copies.
    """
    torch.set_num_threads(1)
    device = torch.device(choose_device(config.training.device))
    model = build_model(config.model, 0, parameter_dtype(config.training), device)
    ranges = split_layers(model.layers, STAGES)
    takes, gives = (find_forms(model, config)[layer] for layer in ranges[index])
    corpus = load_data(config)
    _warm_up(config)
    before = held_bytes(device)
    holding = build_holding(model, range(*ranges[index]), config.training)
    stage = SliceRunner(ranges[index], holding.modules, model, loss_scale=1.0, config=config)

    def forward(microbatch: Microbatch) -> None:
        tokens, target = (
            half.to(device)
            for half in corpus.batch(microbatch, config.training.batch, config.model.context)
        )
        value = tokens if stage.first else _noise(takes, device)
        sent.append(stage.forward(microbatch, value, target if stage.last else None, split=True))

    def backward_input(microbatch: Microbatch) -> None:
        sent.append(stage.backward_input(microbatch, None if stage.last else _noise(gives, device)))

    sent: deque[object] = deque(maxlen=0)  # what a stage returns has left when the next op runs
    row = [Microbatch(0, 0, number) for number in range(ROW)]
    _each(row[:1], forward, backward_input, stage.backward_weight)
    for iteration in range(2):  # the second one copies the state, too
        holding.optimizer.step(iteration)
    always = held_bytes(device)
    _each(row, forward)
    after_forward = held_bytes(device)
    _each(row, backward_input)
    after_input = held_bytes(device)
    _each(row, stage.backward_weight)
    with_copies = held_bytes(device)
    cast(Any, holding.optimizer)._saved = []
    return {
        "activation": (after_forward - always) // ROW,
        "stash": (after_input - always) // ROW,
        "undo copies": with_copies - held_bytes(device),
        "always": always - before,
    }


def _noise(form: Form, device: torch.device) -> Tensor:
    assert isinstance(form, TensorForm), "the layers that ship pass one tensor"
    return torch.randn(form.shape, dtype=form.dtype, device=device)


def _warm_up(config: RunConfig) -> None:
    """Make torch load what it loads at first use."""
    model = build_model(
        parse_run_config({"blocks": 1, "width": 8, "heads": 1, "context": 4}, {}).model,
        0,
        torch.float32,
        torch.device("cpu"),
    )
    holding = build_holding(model, range(model.layers), config.training)
    stage = SliceRunner((0, model.layers), holding.modules, model, loss_scale=1.0, config=config)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    microbatch = Microbatch(0, 0, 0)
    stage.forward(microbatch, tokens, tokens, split=True)
    stage.backward_input(microbatch, None)
    stage.backward_weight(microbatch)
    holding.optimizer.step(0)


def _each(row: list[Microbatch], *calls: Callable[[Microbatch], object]) -> None:
    for call in calls:
        for microbatch in row:
            call(microbatch)


def job_bytes(tables: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return a stage's bytes by the job file: per micro-batch, and permanently.

    Those of a micro-batch are after F and after I.
    """
    unit, memory = tables["memory"]["unit_bytes"], tables["memory"]
    return {
        "activation": [unit * size for size in memory["activation"]],
        "stash": [unit * size for size in memory["weight_stash"]],
        "always": [unit * size for size in memory["weights"]],
    }


def compare(config: RunConfig, profiled: Mapping[str, Sequence[int]]) -> list[Line]:
    """Compare the profiled bytes of each stage, by kind, with those of processes."""

    def measured(index: int) -> dict[str, int]:
        answer = subprocess.run(
            [sys.executable, "-m", "benchmarks.stage_memory", str(index), config.to_json()],
            check=True,
            capture_output=True,
            timeout=300,
            env={**os.environ, **MMAP_THRESHOLD},
        )
        return cast(dict[str, int], json.loads(answer.stdout))

    with ThreadPoolExecutor(STAGES) as pool:
        return [
            Line(index, what, sizes[index], found[what])
            for index, found in enumerate(pool.map(measured, range(STAGES)))
            for what, sizes in profiled.items()
        ]


if __name__ == "__main__":
    print(json.dumps(measure(RunConfig.from_json(sys.argv[2]), int(sys.argv[1]))))
