"""Simulate a slow network by a relay that delays and drops packets.

It joins network namespaces of Linux. Each namespace has one interface, a TUN device, whose packets
this process passes to their destination `latency` seconds after they were sent, or drops with a
probability of `loss`, in either direction. If a bandwidth is given, each namespace's link carries
that many bytes per second each way. The system's own TCP runs on all sides, so that a lost packet
has its real cost: retransmission, and a smaller window. The relay needs the right to make network
namespaces, and no traffic control in the kernel.
"""

import argparse
import ctypes
import fcntl
import heapq
import math
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
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 65536
IPV4 = 4
READY = "ready"
DESTINATION = 19
"""Index of the last byte of an IPv4 packet's destination, in which all addresses differ."""
LIMITED = (
    ("mtu", "9000"),
    ("net.ipv4.tcp_wmem", "4096 65536 262144"),
    ("net.ipv4.tcp_rmem", "4096 65536 262144"),
)
"""Settings for limited bandwidth.

Packets are so large that this process can pass enough, and queues of connections are short.
"""


def ip(*words: str) -> None:
    """Run the `ip` command. Raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def address(side: int) -> str:
    """Return the address of one side."""
    return f"10.214.9.{side + 1}"


@contextmanager
def slow_network(
    latency_seconds: float,
    loss: float,
    seed: int = 1,
    *,
    sides: int = SIDES,
    bandwidth: float = math.inf,
) -> Iterator[list[list[str]]]:
    """Yield the prefix of commands for each side. Raises CalledProcessError and OSError.

    The bandwidth is in bytes per second.
    """
    names = [f"slow{os.getpid()}-{side}" for side in range(sides)]
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        relay = stack.enter_context(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.packet_relay",
                    str(latency_seconds),
                    str(loss),
                    str(bandwidth),
                    str(seed),
                    *names,
                ],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[1],
            )
        )
        stack.callback(relay.kill)
        assert relay.stdout is not None
        if relay.stdout.readline().strip() != READY:
            raise OSError("the relay has not started")
        for side, name in enumerate(names):
            ip("-n", name, "address", "add", f"{address(side)}/24", "dev", "wire")
            (_, mtu), *settings = LIMITED
            if bandwidth < math.inf:
                ip("-n", name, "link", "set", "wire", "mtu", mtu)
                for key, value in settings:
                    ip("netns", "exec", name, "sysctl", "-q", "-w", f"{key}={value}")
            ip("-n", name, "link", "set", "wire", "up")
        yield [["ip", "netns", "exec", name] for name in names]


def _open_device(namespace: str) -> int:
    """Open a TUN device in a namespace, which this thread enters."""
    with Path(f"/var/run/netns/{namespace}").open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"wire", IFF_TUN | IFF_NO_PI))
    return device


def relay(
    namespaces: list[str], latency_seconds: float, loss: float, bandwidth: float, seed: int
) -> None:
    """Pass packets to their destinations forever."""
    devices, rng = [_open_device(name) for name in namespaces], random.Random(seed)
    print(READY, flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    leaves, comes = [0.0] * len(devices), [0.0] * len(devices)
    count = 0
    while True:
        timeout = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for device in select.select(devices, [], [], timeout)[0]:
            try:
                packet = os.read(device, PACKET_BYTES)
            except BlockingIOError:
                continue
            side, other = (
                devices.index(device),
                packet[DESTINATION] - 1 if packet[0] >> 4 == IPV4 else -1,
            )
            if not 0 <= other < len(devices) or rng.random() < loss:
                continue
            # Both links pass the same bytes at the same time, unless one of them is busy.
            count, seconds = count + 1, len(packet) / bandwidth
            leaves[side] = max(time.monotonic(), leaves[side]) + seconds
            comes[other] = max(leaves[side], comes[other] + seconds)
            heapq.heappush(waiting, (comes[other] + latency_seconds, count, devices[other], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            try:
                os.write(device, packet)
            except OSError:  # full, or not up yet: lost
                continue


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("latency", "loss", "bandwidth"):
        parser.add_argument(name, type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("namespaces", nargs="+")
    options = parser.parse_args()
    relay(options.namespaces, options.latency, options.loss, options.bandwidth, options.seed)


if __name__ == "__main__":
    main()
