"""A slow network: two network namespaces of Linux, joined by a relay that delays and drops packets.

Each namespace has one interface, a TUN device, whose packets this process passes to the other: each one `latency`
seconds after it was sent, or never, with a probability of `loss`, in either direction. The system's own TCP runs on
both sides, so that a lost packet costs what it does there: retransmission, and a smaller window. Bandwidth is not
limited, besides by this process. Needs the right to make network namespaces, and no traffic control in the kernel.
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SIDES = 2
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 65536
READY = "ready"


def ip(*words: str) -> None:
    """Run the `ip` command. Raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def address(side: int) -> str:
    """That of one side."""
    return f"10.214.9.{side + 1}"


@contextmanager
def slow_network(latency_seconds: float, loss: float, seed: int = 1) -> Iterator[list[list[str]]]:
    """What to put before a command to run it on each side. Raises CalledProcessError, OSError."""
    names = [f"slow{os.getpid()}-{side}" for side in range(SIDES)]
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        relay = stack.enter_context(subprocess.Popen(
            [sys.executable, "-m", "benchmarks.packet_relay", *names, str(latency_seconds), str(loss), str(seed)],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]))
        stack.callback(relay.kill)
        assert relay.stdout is not None
        if relay.stdout.readline().strip() != READY:
            raise OSError("the relay has not started")
        for side, name in enumerate(names):
            ip("-n", name, "address", "add", f"{address(side)}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
        yield [["ip", "netns", "exec", name] for name in names]


def _open_device(namespace: str) -> int:
    """A TUN device in a namespace, which this thread enters."""
    with Path(f"/var/run/netns/{namespace}").open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"wire", IFF_TUN | IFF_NO_PI))
    return device


def relay(namespaces: list[str], latency_seconds: float, loss: float, seed: int) -> None:
    """Pass packets from each side to the other, for ever."""
    devices, rng = [_open_device(name) for name in namespaces], random.Random(seed)
    print(READY, flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        timeout = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for device in select.select(devices, [], [], timeout)[0]:
            try:
                packet = os.read(device, PACKET_BYTES)
            except BlockingIOError:
                continue
            if rng.random() >= loss:
                count += 1
                other = devices[1 - devices.index(device)]
                heapq.heappush(waiting, (time.monotonic() + latency_seconds, count, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            try:
                os.write(device, packet)
            except OSError:  # full, or not up yet: lost
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("namespaces", nargs=SIDES)
    parser.add_argument("latency", type=float)
    parser.add_argument("loss", type=float)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    relay(options.namespaces, options.latency, options.loss, options.seed)


if __name__ == "__main__":
    main()
