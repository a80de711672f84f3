"""Measure the cost of splitting a GPT block's backward: I + W against B.

    python -m benchmarks.split_backward [--width 256] [--context 128] [--batch 4]
                                        [--dtype float32] [--repeats 30]

Prints one table, with the share of W, and times in milliseconds (median over the repeats, after a
warm-up).
"""

import argparse
import statistics
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from slipstream.runtime.computing.slices import Microbatch, SliceRunner, TensorForm, find_forms
from slipstream.runtime.config import RunConfig, parse_run_config
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.state.held_layers import build_holding
from slipstream.runtime.tools.stage_bench import time_call


def middle_stage(config: RunConfig, device: torch.device) -> tuple[SliceRunner, TensorForm]:
    """Return one block, and its inputs."""
    model = build_model(config.model, 0, parameter_dtype(config.training), device)
    holding = build_holding(model, [1], config.training)
    return SliceRunner((1, 2), holding.modules, model, loss_scale=1.0, config=config), find_forms(
        model, config
    )[1]


def measure(stage: SliceRunner, value: Tensor, gradient: Tensor, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each op. Split and fused runs take turns."""
    times: dict[str, list[float]] = {}
    device = value.device
    for index in range(repeats + 3):
        split, fused = Microbatch(index, 0, 0), Microbatch(index, 0, 1)
        round_times = {
            "F fused": time_call(partial(stage.forward, fused, value, split=False), device),
            "B": time_call(partial(stage.backward, fused, gradient), device),
            "F split": time_call(partial(stage.forward, split, value, split=True), device),
            "I": time_call(lambda: stage.backward_input(split, gradient), device),  # noqa: B023
            "W": time_call(lambda: stage.backward_weight(split), device),  # noqa: B023
        }
        if index >= 3:
            for name, duration in round_times.items():
                times.setdefault(name, []).append(duration)
    return {name: 1e3 * statistics.median(durations) for name, durations in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("width", 256),
        ("context", 128),
        ("batch", 4),
        ("heads", 4),
        ("repeats", 30),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bf16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    config = parse_run_config(
        {"width": options.width, "context": options.context, "heads": options.heads},
        {"batch": options.batch, "dtype": options.dtype},
    )
    stage, form = middle_stage(config, device)
    value, gradient = (torch.randn(form.shape, dtype=form.dtype, device=device) for _ in range(2))
    times = measure(stage, value, gradient, options.repeats)
    table = Table(
        title=f"one block, {options.batch} x {options.context} x {options.width}, {options.dtype}, "
        f"{device}"
    )
    for column in ("F fused", "F split", "B", "I", "W", "(I + W) / B", "W / (I + W)"):
        table.add_column(column, justify="right")
    both = times["I"] + times["W"]
    table.add_row(
        *(f"{times[name]:.2f}" for name in ("F fused", "F split", "B", "I", "W")),
        f"{both / times['B']:.3f}",
        f"{times['W'] / both:.2f}",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
