"""Implement `slipstream doctor`, which reports what is installed, and tests it."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.table import Table
from rich.text import Text

import slipstream
from slipstream.cli.shared.console import delay_interrupts, duration, err, out, print_json
from slipstream.cli.shared.options import Json
from slipstream.planner.job.file import read_job

PACKAGES = (
    "torch",
    "safetensors",
    "ortools",
    "numba",
    "numpy",
    "networkx",
    "msgspec",
    "rich",
    "typer",
)
SEARCH_SECONDS = 2.0
SELF_TEST_SECONDS = 60.0
"""Longest wait for the self-test's processes, in seconds; they usually take a few."""
EXAMPLE = Path(__file__).parent / "jobs" / "worked-example.toml"
PERIOD = 30.0
"""Shortest period, by proof, of the published example with worker 1.2 down, in seconds."""
MARKS = {"ok": ("✓", "green"), "absent": ("–", "yellow"), "failed": ("✗", "red")}

Quick = Annotated[bool, typer.Option("--quick", help="Leave the self-test out.")]


class Finding(msgspec.Struct, frozen=True):
    """Line of the report, on something that was looked for or tested.

    Status "absent": this part does not work here, but is not needed.
    """

    part: Literal["installed", "backends", "self-test"]
    name: str
    status: Literal["ok", "absent", "failed"]
    detail: str
    seconds: float = 0.0


def doctor(quick: Quick = False, json: Json = False) -> None:
    """Report what is installed and which backends work, and test planning, checking and
    communication.

    The test takes a few seconds, most of it to load torch in two processes. Exits 1 when something
    that Slipstream needs does not work.
    """
    findings = []
    with err.status("looking"):
        for finding in _collect_findings(quick):
            findings.append(finding)
            if not json:
                _print_finding(
                    finding, first=len(findings) == 1 or findings[-2].part != finding.part
                )
    is_healthy = all(finding.status != "failed" for finding in findings)
    if json:
        print_json({"ok": is_healthy, "findings": msgspec.to_builtins(findings)})
    else:
        out.print(
            "\nall is well" if is_healthy else "\nsomething that Slipstream needs does not work",
            style="bold green" if is_healthy else "bold red",
        )
    if not is_healthy:
        raise typer.Exit(1)


def _print_finding(finding: Finding, *, first: bool) -> None:
    mark, style = MARKS[finding.status]
    if first:
        out.print(f"\n{finding.part}", style="bold")
    row = Table.grid(padding=(0, 1))
    row.add_column(width=1)
    row.add_column(width=22)
    row.add_row(Text(mark, style), Text(finding.name), Text(finding.detail))
    out.print(row)


def _collect_findings(quick: bool) -> Iterator[Finding]:
    yield from _check_packages()
    yield from _check_backends()
    if not quick:
        yield from _run_self_test()


def _check_packages() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("installed", "slipstream", "ok", slipstream.__version__)
    yield Finding(
        "installed",
        "python",
        "ok",
        f"{platform.python_version()} on {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
    )
    for name in PACKAGES:
        try:
            yield Finding("installed", name, "ok", version_of(name))
        except PackageNotFoundError:
            yield Finding("installed", name, "failed", f"missing: pip install {name}")


def _check_backends() -> Iterator[Finding]:
    """Yield findings about devices, backends that transfer, and the compiled search."""
    # torch is imported late: what is installed is shown first, even if torch is broken.
    try:
        with delay_interrupts():
            import torch
            from torch import distributed
    except ImportError as error:
        yield Finding("backends", "torch", "failed", f"cannot be imported: {_last_line(error)}")
        return
    cards = torch.cuda.device_count()
    if cards:
        names = ", ".join(sorted({torch.cuda.get_device_name(card) for card in range(cards)}))
        yield Finding("backends", "cuda", "ok", f"{torch.version.cuda}, {cards} x {names}")
    else:
        yield Finding(
            "backends", "cuda", "absent", "no GPU that torch can use; workers compute on the CPU"
        )
    gloo = distributed.is_available() and distributed.is_gloo_available()
    if gloo:
        yield Finding("backends", "gloo", "ok", "in torch")
    else:
        yield Finding("backends", "gloo", "failed", "this torch has none")
    if not distributed.is_nccl_available():
        yield Finding("backends", "nccl", "absent", "this torch has none; tensors go over gloo")
    elif cards < 2:
        yield Finding(
            "backends", "nccl", "absent", "needs a GPU for each worker; tensors go over gloo"
        )
    else:
        number: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        yield Finding("backends", "nccl", "ok", ".".join(map(str, number)))
    yield _check_compiled_search()


def _check_compiled_search() -> Finding:
    from slipstream.planner.loops import is_compiled

    with delay_interrupts():
        compiled = is_compiled()
    if not compiled:
        return Finding(
            "backends",
            "compiled search",
            "absent",
            "the first plan compiles it, once per "
            "installation, in about 20 s; or run python -m slipstream.planner.compiled",
        )
    return Finding("backends", "compiled search", "ok", "compiled")


def _run_self_test() -> Iterator[Finding]:
    """Yield findings of the self-test: planning here, while two processes connect."""
    try:
        with delay_interrupts():
            from slipstream.runtime.tools.self_test import SelfTest, SelfTestError
    except ImportError as error:
        yield Finding(
            "self-test",
            "two processes",
            "failed",
            f"runtime cannot be imported: {_last_line(error)}",
        )
        yield from _test_planning()
        return
    # The two processes import torch, which takes longest, while this one plans.
    try:
        with SelfTest() as self_test:
            start_time = time.perf_counter()
            yield from _test_planning()
            result = self_test.wait(SELF_TEST_SECONDS)
        yield Finding(
            "self-test",
            "two processes",
            "ok",
            f"met in {duration(result.meeting_seconds)}, and sent 1 MiB over gloo in "
            f"{duration(result.transfer_seconds)}",
            time.perf_counter() - start_time,
        )
    except (SelfTestError, OSError, RuntimeError) as error:
        yield Finding("self-test", "two processes", "failed", _last_line(error))


def _test_planning() -> Iterator[Finding]:
    yield _run_test("plan and check", _plan_and_check)
    yield _run_test("lookup", _look_up)


def _run_test(name: str, test: Callable[[], str]) -> Finding:
    start_time = time.perf_counter()
    try:
        detail = test()
    except Exception as error:  # whatever it is, it belongs in the report
        return Finding(
            "self-test", name, "failed", _last_line(error), time.perf_counter() - start_time
        )
    seconds = time.perf_counter() - start_time
    return Finding("self-test", name, "ok", f"{detail}, in {duration(seconds)}", seconds)


def _plan_and_check() -> str:
    with delay_interrupts():
        from slipstream.planner.plan import plan_job
    from slipstream.schedules.check import check
    from slipstream.schedules.schedule import Worker

    # A job whose best period is known tests planner and checker against each other: a plan may not
    # break a rule, and no plan that keeps the rules is shorter.
    plan = plan_job(read_job(EXAMPLE), [Worker(1, 2)], time_limit=SEARCH_SECONDS)
    if plan.interrupted:
        raise KeyboardInterrupt
    violations, period = check(plan.schedule), plan.schedule.seconds(plan.schedule.period_ticks)
    if violations:
        raise RuntimeError(f"a plan breaks a rule: {violations[0]}")
    if period < PERIOD:
        raise RuntimeError(
            f"a plan with period {period:g} s passed the check; {PERIOD:g} s is proven to be the "
            "least"
        )
    return (
        f"worked example with a worker down: period {duration(period)}, {plan.schedule.status}, "
        "valid"
    )


def _look_up() -> str:
    from slipstream.schedules.schedule import Worker
    from slipstream.schedules.tables.table import Table as Schedules
    from slipstream.schedules.tables.table import library, library_names

    name = library_names()[0]
    folder = library(name)
    assert folder is not None
    result = Schedules.load(folder).lookup((Worker(0, 1),))
    if result is None:
        raise RuntimeError(f"table {name} has no schedule for one failure")
    return f"{name} with a worker down: entry {result.key}"


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
