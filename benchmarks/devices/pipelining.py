"""Run the same layers here and in torch.distributed.pipelining, on the same devices.

The order is the same, too.
"""

import time
from multiprocessing import get_context
from typing import Any, NamedTuple

from benchmarks import per_op
from benchmarks.devices.report import Report, milliseconds
from benchmarks.devices.training import training
from benchmarks.per_op import Comparison, Cost, Rival
from slipstream.runtime.processes.fork_server import ForkServer

STAGES = 2
MICROBATCHES = 8


class Layers(NamedTuple):
    """Layers to compare, and length of the comparison."""

    name: str
    width: int
    iterations: int
    warm_up: int
    """Number of iterations that do not count."""
    model: dict[str, Any]
    training: dict[str, Any]


TINY = Layers("layers of width 32, all host time", 32, 40, 10, {}, {})
WIDE = Layers(
    "layers of width 4,096, bfloat16 autocast",
    4096,
    12,
    4,
    {"heads": 32, "context": 2048, "vocabulary": 4096},
    {"dtype": "bf16"},
)


def compare_pipelining(
    report: Report, device: str, transport: str, fork_server: ForkServer
) -> None:
    """Run the step."""
    get_context("forkserver").set_forkserver_preload(
        ["torch.distributed.pipelining", "benchmarks.per_op"]
    )
    for order in ("split", "1F1B"):
        for layers in (TINY, WIDE) if device == "cuda" else (TINY,):
            for setting in per_op.settings(
                STAGES,
                MICROBATCHES,
                layers.width,
                layers.iterations,
                layers.model,
                {**training(device, transport), **layers.training},
                layers.warm_up,
            ):
                if setting.name == order:
                    compare(report, layers.name, setting, fork_server)


def compare(report: Report, name: str, setting: Comparison, fork_server: ForkServer) -> None:
    """Compare one order of ops in all runtimes that can run it."""
    ours = per_op.ours(setting, fork_server)
    report.row(f"{name}, {setting.name}: here", text(setting, ours))
    rivals: list[Rival] = [
        *setting.rivals,
        *["zero-bubble" for _ in [0] if setting.name == "split"],
    ]
    for rival in rivals:
        began = time.monotonic()
        try:
            theirs = per_op.torchs(setting, rival)
        except Exception as error:
            lines = str(error).strip().splitlines()
            report.row(
                f"{name}, {setting.name}: torch, {rival}",
                f"failed after {time.monotonic() - began:.0f} s: "
                f"{type(error).__name__}: {lines[-1] if lines else ''}",
            )
            continue
        report.row(
            f"{name}, {setting.name}: torch, {rival}",
            f"{text(setting, theirs)}; here / there {ours.wall / theirs.wall:.2f}",
            ratio=ours.wall / theirs.wall,
        )


def text(setting: Comparison, cost: Cost) -> str:
    """Format the time of an iteration, and of an op of the busiest worker."""
    return f"{milliseconds(cost.wall)} an iteration, {cost.wall / setting.ops * 1e6:,.0f} us an op"
