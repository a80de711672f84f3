"""Measure how two processes connect, send, abort, and survive the other's death.

Rank 0 reports all figures. Over NCCL the communicators are those of the runtime, and in one variant
torch.distributed's own.
"""

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, Work

from benchmarks.devices.crew import Crew, CrewError, Member
from benchmarks.devices.report import Report, mebibytes, milliseconds
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.replay.torch_groups import (
    create_gloo_group,
    create_nccl_group,
    open_gloo_devices,
)

BLOCKING = "nccl, blocking"
NOT_BLOCKING = "nccl, not blocking"
PLAIN = "torch.distributed over nccl"
GLOO = "gloo"
SWITCH = "SLIPSTREAM_NCCL_BLOCKING"
ENVIRONMENT: dict[str, dict[str, str]] = {
    BLOCKING: {SWITCH: "1"},
    NOT_BLOCKING: {SWITCH: "0"},
    PLAIN: {},
    GLOO: {},
}
TIMEOUT = timedelta(seconds=60)
SILENT_SECONDS = 15.0
"""Time, in seconds, without a report after which a process counts as hanging."""
SIZES = {"1 B": 1, "1 MiB": 2**20, "16 MiB": 2**24}
REPEATS = 10
HELD_UP_SECONDS = 0.3
WATCH_SECONDS = 4.0
LOOK_SECONDS = 0.0005
MORE = 2
"""Number of communicators beyond the first, for memory and threads of each."""


class Link:
    """Process group of two: the runtime's, or torch.distributed's."""

    def __init__(
        self,
        member: Member,
        device: torch.device,
        variant: str,
        name: str,
        *,
        directed: bool = False,
    ) -> None:
        self._rank, self._device = member.place, device
        self._nccl: Any = None
        if variant == PLAIN:
            distributed.init_process_group(
                "nccl",
                store=PrefixStore(name, member.store),
                rank=member.place,
                world_size=2,
                timeout=TIMEOUT,
            )
            self.group: Any = distributed.group.WORLD
        elif variant == GLOO:
            self.group = create_gloo_group(
                PrefixStore(name, member.store), member.place, 2, TIMEOUT, open_gloo_devices()
            )
        else:
            self._nccl = create_nccl_group(member.store, name, member.place, 2, TIMEOUT, directed)
            self.group = self._nccl.group

    def connect(self) -> None:
        """Start to make a communicator, unless the group does so by itself."""
        if self._nccl is not None:
            self._nccl.connect()

    def error(self) -> str | None:
        """Return the error that the group has detected, or None."""
        return None if self._nccl is None else self._nccl.error()

    def send(self, tensor: Tensor) -> None:
        """Send to the other process, and wait for the end."""
        self.finish(self.group.send([tensor], 1 - self._rank, 0))

    def receive(self, tensor: Tensor) -> None:
        """Receive from the other process, and wait for the end."""
        self.finish(self.group.recv([tensor], 1 - self._rank, 0))

    def sum(self, tensor: Tensor) -> None:
        """Sum with the other process."""
        self.finish(self.group.allreduce([tensor]))

    def finish(self, work: Work) -> None:
        """Wait until the device has done the work."""
        work.wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def swap(self, tensor: Tensor) -> None:
        """Send a tensor to the other process and back."""
        for step in (self.send, self.receive) if self._rank == 0 else (self.receive, self.send):
            step(tensor)


class Ear:
    """Reporter of the figures of rank 0."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def row(self, what: str, value: str, **facts: Any) -> None:
        """Report a row as `Report.row` does."""
        if self._member.place == 0:
            self._member.tell(what=what, value=value, facts=facts)


def measure(member: Member) -> None:
    """Run the measurements, in each of both processes."""
    variant, device, ear = member.task["variant"], torch.device(member.task["device"]), Ear(member)
    if device.type == "cuda":
        device = torch.device("cuda", member.place % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    member.store.set(f"pid {member.place}", str(os.getpid()))
    member.meet()
    first, before, began = (
        Link(member, device, variant, "first/"),
        held(device),
        time.perf_counter(),
    )
    first.connect()
    returned = time.perf_counter() - began
    first.swap(torch.zeros(1, dtype=torch.uint8, device=device))
    ear.row(
        "connecting",
        f"{milliseconds(returned)}, and to the end of a first byte there and back "
        f"{milliseconds(time.perf_counter() - began)}",
        connected=time.perf_counter() - began,
    )
    for name, size in SIZES.items():
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        seconds = median_of(lambda tensor=tensor: first.swap(tensor)) / 2
        ear.row(
            f"transfer of {name}",
            milliseconds(seconds) + (f", {size / seconds / 1e9:.2f} GB/s" if size > 1 else ""),
            seconds=seconds,
        )
    tensor = torch.zeros(SIZES["16 MiB"] // 4, device=device)
    ear.row("sum of 16 MiB", milliseconds(median_of(lambda: first.sum(tensor))))
    if variant == PLAIN:
        member.meet()
        os._exit(0)  # its watchdog may wait for the other
    member.meet()
    ear.row("a communicator for sums", usage(before, held(device), 1))
    member.meet()
    before = held(device)
    links = [more(member, device, variant, number) for number in range(MORE)]
    member.meet()
    ear.row("a communicator for transfers in one direction", usage(before, held(device), MORE))
    aborted(member, device, links[0], ear)
    member.meet()
    killed(member, device, links[1], ear)
    if member.place == 0:
        ear.row("end", "reached", works=True)
        os._exit(0)  # whatever is left of the other


def more(member: Member, device: torch.device, variant: str, number: int) -> Link:
    """Return another communicator that is connected."""
    link = Link(member, device, variant, f"more {number}/", directed=True)
    link.connect()
    link.swap(torch.zeros(1, dtype=torch.uint8, device=device))
    return link


def median_of(call: Callable[[], None]) -> float:
    """Return the median seconds of a call, after a first one."""
    taken = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def held(device: torch.device) -> tuple[int, int, int]:
    """Return the card's bytes in use, and this process's threads and open descriptors."""
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    threads = len(list(Path("/proc/self/task").iterdir()))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return total - free, threads, descriptors


def usage(before: tuple[int, int, int], after: tuple[int, int, int], count: int) -> str:
    """Describe the resources of a communicator in one process."""
    size, threads, descriptors = (
        (now - then) / count for then, now in zip(before, after, strict=True)
    )
    return (
        f"{mebibytes(size / 2)} of the card, {threads:.1f} threads, {descriptors:.1f} descriptors "
        "in each process"
    )


def begin_receive(link: Link, device: torch.device) -> tuple[Work, Callable[[], bool]]:
    """Start a receive to which nothing is sent.

    Returns it, and a function that tells whether the device is done.
    """
    work = link.group.recv([torch.zeros(2**20, device=device)], 1 - link._rank, 1)
    if device.type != "cuda":
        return work, work.is_completed
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        work.wait()
        event = torch.cuda.Event()
        event.record()
    return work, event.query


def watch(
    work: Work,
    query: Callable[[], bool],
    link: Link,
    began: float,
    until: Callable[[], bool],
    seconds: float,
) -> list[str]:
    """Return is_completed, get_error and the device's answer, a line for each change."""
    said, last = list[str](), None
    while True:
        done, state = until(), (asked(work.is_completed), asked(link.error), asked(query))
        if state != last:
            said.append(
                f"{(time.perf_counter() - began) * 1e3:.0f} ms: is_completed {state[0]}, error "
                f"{state[1]}, device done {state[2]}"
            )
            last = state
        if done or time.perf_counter() - began > seconds:
            return said
        time.sleep(LOOK_SECONDS)


def asked(call: Callable[[], object]) -> str:
    """Return an answer in one line, with the time it took if that is long."""
    began = time.perf_counter()
    try:
        answer = str(call())
    except Exception as error:
        answer = f"raised {type(error).__name__}"
    took = time.perf_counter() - began
    return answer if took < 0.05 else f"{answer} (after {milliseconds(took)})"


def aborted(member: Member, device: torch.device, link: Link, ear: Ear) -> None:
    """Abort a receive on rank 0 to which nothing is sent."""
    if member.place:
        return
    if device.type != "cuda":
        ear.row("abort of a blocked receive", "needs a card: gloo has no abort of its own")
        return
    work, query = begin_receive(link, device)
    time.sleep(HELD_UP_SECONDS)
    ear.row(
        "a blocked receive, before its abort",
        "; ".join(watch(work, query, link, time.perf_counter(), lambda: True, 0)),
    )
    ear.row("abort of a blocked receive", abort_of(work, query, link))


def abort_of(work: Work, query: Callable[[], bool], link: Link) -> str:
    """Abort in another thread, and describe what happens."""
    took = list[float]()

    def abort() -> None:
        began = time.perf_counter()
        link.group.abort()
        took.append(time.perf_counter() - began)

    began = time.perf_counter()
    thread = threading.Thread(target=abort, daemon=True)
    thread.start()
    said = watch(work, query, link, began, lambda: bool(took) and query(), WATCH_SECONDS)
    returned = milliseconds(took[0]) if took else f"not within {WATCH_SECONDS:g} s"
    return f"returned after {returned}; {'; '.join(said)}"


def killed(member: Member, device: torch.device, link: Link, ear: Ear) -> None:
    """Wait on rank 0 for data from rank 1, which is killed."""
    if member.place:
        signal.pause()
    work, query = begin_receive(link, device)
    time.sleep(HELD_UP_SECONDS)
    began = time.perf_counter()
    os.kill(int(member.store.get("pid 1")), signal.SIGKILL)
    ear.row(
        "after a SIGKILL of the peer",
        "; ".join(watch(work, query, link, began, lambda: False, WATCH_SECONDS)),
    )
    if device.type == "cuda":
        ear.row("abort after that", abort_of(work, query, link))
        began = time.perf_counter()
        torch.cuda.synchronize(device)
        ear.row("synchronize after that", milliseconds(time.perf_counter() - began))


def run_pairs(
    report: Report, device: str, log: Path, fork_server: ForkServer, variants: Sequence[str]
) -> None:
    """Run the step."""
    for variant in variants:
        task = {"variant": variant, "device": device, "environment": ENVIRONMENT[variant]}
        with Crew(fork_server, f"{__name__}:measure", [task] * 2, log) as crew:
            try:
                for _, said in crew.news(SILENT_SECONDS):
                    report.row(
                        f"{variant}: {said['what']}",
                        said["value"],
                        variant=variant,
                        **said["facts"],
                    )
            except CrewError as error:
                report.row(f"{variant}: failed", str(error), variant=variant, works=False)
