"""Describe the machine: cards, driver, libraries."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.devices.card_memory import query
from benchmarks.devices.process_tree import find_py_spy
from benchmarks.devices.report import Report, mebibytes, milliseconds

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "networkx",
    "ortools",
    "protobuf",
    "msgspec",
    "safetensors",
    "rich",
    "typer",
    "transformers",
)
MPS = "nvidia-cuda-mps-control"


def describe_machine(report: Report, device: str) -> None:
    """Run the step."""
    report.row(
        "machine",
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}",
    )
    report.row("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    report.row(
        "py-spy", "there" if find_py_spy() else "absent: processes that hang write their own stacks"
    )
    if device != "cuda":
        report.row("card", "needs a card: the CPU is measured, over gloo")
        return
    for words in query(
        "gpu=name,driver_version,memory.total,compute_mode,mig.mode.current"
    ) or query("gpu=name,driver_version,memory.total"):
        report.row("card", ", ".join(words))
    began = time.perf_counter()
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    report.row(
        "first use of the card",
        f"{milliseconds(time.perf_counter() - began)}; {mebibytes(total - free)} of "
        f"{mebibytes(total)} are then used",
    )
    number: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    report.row(
        "libraries",
        f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, number))}, cuDNN "
        f"{torch.backends.cudnn.version()}",
    )
    report.row("MPS daemon", "running" if _runs(MPS) else "absent: processes take turns on a card")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _runs(program: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if program in path.read_bytes().partition(b"\0")[0].decode(errors="replace"):
                return True
        except OSError:  # it has ended
            continue
    return False
