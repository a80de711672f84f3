"""Nodes with addresses of their own, one of which is cut off.

They are in Linux network namespaces joined by a bridge.
"""

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from slipstream.runtime.events import EVENTS
from tests.patience import HEARTBEATS
from tests.runtime.launchers import Launcher, command
from tests.runtime.pacing import after_each_iteration, hold_at, slowly_until
from tests.runtime.running import joined, judge_of_text, losses_in, tiny_text

pytestmark = pytest.mark.slow

NODES = 3
CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
MS_BIND = 0x1000
MS_PRIVATE = 0x44000
"""MS_PRIVATE with MS_REC."""
JOB = tiny_text(pipelines=3, iterations=30)
CUT_AFTER = 4
"""The last iteration before a node is cut off."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Network:
    """One namespace a node, and one that holds a bridge for each network.

    Nothing of the machine's own is touched.
    """

    def __init__(
        self, stack: contextlib.ExitStack, wires: Sequence[str] = ("wire",), ipv6: bool = False
    ) -> None:
        self._ipv6 = ipv6
        self._prefix = f"slip{os.getpid()}"
        for name in (self.switch, *map(self.name, range(NODES))):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        for index, wire in enumerate(wires):
            port = "port" if not index else f"{wire}-port"
            ip("-n", self.switch, "link", "add", f"of-{wire}", "type", "bridge")
            ip("-n", self.switch, "link", "set", f"of-{wire}", "up")
            for node in range(NODES):
                ip(
                    "-n",
                    self.switch,
                    "link",
                    "add",
                    f"{port}{node}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    wire,
                    "netns",
                    self.name(node),
                )
                ip("-n", self.switch, "link", "set", f"{port}{node}", "master", f"of-{wire}", "up")
                prefix, flags = (64, ["nodad"]) if ipv6 else (24, [])
                address = f"{self.address(node, index)}/{prefix}"
                ip("-n", self.name(node), "address", "add", address, "dev", wire, *flags)
                ip("-n", self.name(node), "link", "set", wire, "up")

    @property
    def switch(self) -> str:
        return f"{self._prefix}-switch"

    def name(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    def address(self, node: int, wire: int = 0) -> str:
        return f"fd57:{wire}::{node + 1}" if self._ipv6 else f"10.213.{7 + wire}.{node + 1}"

    def sent(self, node: int, wire: str) -> int:
        """Bytes that a node has sent by an interface."""
        counters = subprocess.run(
            ["ip", "-n", self.name(node), "-s", "-j", "link", "show", wire],
            check=True,
            capture_output=True,
            timeout=20,
        )
        return int(json.loads(counters.stdout)[0]["stats64"]["tx"]["bytes"])

    def cut(self, node: int) -> None:
        """No packet reaches the node any more, and none tells so."""
        ip("-n", self.switch, "link", "set", f"port{node}", "down")


@pytest.fixture
def network() -> Iterator[Network]:
    with made_network() as network_:
        yield network_


@contextlib.contextmanager
def made_network(*wires: str, ipv6: bool = False) -> Iterator[Network]:
    """Skips the test where there can be none."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        pytest.skip("needs Linux and the `ip` command")
    with contextlib.ExitStack() as stack:
        try:
            network_ = Network(stack, wires or ("wire",), ipv6)
        except subprocess.SubprocessError as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()
            pytest.skip(f"network namespaces are not allowed here: {reason}")
        yield network_


def command_in(namespace: str, *words: str) -> int:
    """`slipstream` with these words, in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/var/run/netns/{namespace}").open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no namespace {namespace}")
    return command(*words)


def held_in(namespace: str, cut: str, *words: str) -> int:
    """The same; it waits for the file that says that a node is cut off."""
    hold_at(CUT_AFTER, Path(cut))
    return command_in(namespace, *words)


def pinned_in(namespace: str, variable: str, value: str, *words: str) -> int:
    """The same, with a variable in the environment.

    Iterations take longer until a worker is back.
    """
    os.environ[variable] = value
    out = Path(words[words.index("--out") + 1])
    after_each_iteration(pytest.MonkeyPatch(), slowly_until(lambda: joined(out)))
    return command_in(namespace, *words)


def named_in(namespace: str, hosts: str, *words: str) -> int:
    """The same, with a file of names of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_PRIVATE, None)
        or libc.mount(hosts.encode(), b"/etc/hosts", None, MS_BIND, None)
    ):
        raise OSError(ctypes.get_errno(), "no hosts file of its own")
    return command_in(namespace, *words)


@contextlib.contextmanager
def nodes(
    network: Network,
    folder: Path,
    options: Sequence[str],
    start: Sequence[object],
    where: str,
    count: int = NODES,
) -> Iterator[list[Launcher]]:
    """Start one `slipstream train` a node.

    Each is a function here with what it is given; none is left at the end.
    """
    started = []
    function, *arguments = start
    try:
        for node in range(count):
            started.append(
                Launcher(
                    f"{__name__}:{function}",
                    network.name(node),
                    *arguments,
                    "train",
                    folder / "job.toml",
                    "--out",
                    folder / f"out{node}",
                    "--nodes",
                    count,
                    "--node",
                    node,
                    "--rendezvous",
                    where,
                    *options,
                    log=folder / f"node{node}.log",
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait(60)


def test_a_node_that_is_cut_off_is_given_up_and_the_others_go_on(network, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    with nodes(
        network,
        tmp_path,
        ["--method", "greedy", "--heartbeat-timeout", "10"],
        ["held_in", tmp_path / "cut"],
        f"{network.address(0)}:29500",
    ) as processes:
        deadline = time.monotonic() + 240
        while len(losses_in(tmp_path / "out0")) <= CUT_AFTER:
            assert processes[0].poll() is None and time.monotonic() < deadline, (
                tmp_path / "node0.log"
            ).read_text()
            time.sleep(0.005)
        network.cut(2)
        (tmp_path / "cut").touch()
        assert processes[0].wait(240) == 0, (tmp_path / "node0.log").read_text()
        assert processes[1].wait(120) == 0, (tmp_path / "node1.log").read_text()
    said = (tmp_path / "node0.log").read_text()
    assert "worker 2.0" in said and "worker 2.1" in said and "runs on 4 workers" in said
    events = map(json.loads, (tmp_path / "out0" / EVENTS).read_text().splitlines())
    assert [event["workers"] for event in events if event["event"] == "node_lost"] == [
        [[2, 0], [2, 1]]
    ]
    assert losses_in(tmp_path / "out0") == pytest.approx(judge_of_text(JOB).losses, rel=0, abs=1e-9)


def assert_trained(folder: Path, processes: Sequence[Launcher], job: str) -> None:
    for node, process in enumerate(processes):
        assert process.wait(300) == 0, (folder / f"node{node}.log").read_text()
    assert losses_in(folder / "out0") == pytest.approx(judge_of_text(job).losses, rel=0, abs=1e-9)


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_layers_pass_by_the_interface_that_is_named_and_not_by_that_of_the_rendezvous(
    variable, tmp_path
):
    # torchft 329: state went over the management network, although gloo and NCCL were told of
    # another.
    job = tiny_text(pipelines=2, iterations=120).replace("width = 16", "width = 96")
    (tmp_path / "job.toml").write_text(job)
    with (
        made_network("office", "fast") as network,
        nodes(
            network,
            tmp_path,
            ["--method", "greedy", "--kill", "1.1@5", "--return", "1.1@8", *HEARTBEATS],
            ["pinned_in", variable, "fast"],
            f"{network.address(0)}:29500",
            2,
        ) as processes,
    ):
        assert_trained(tmp_path, processes, job)
        fast, office = network.sent(0, "fast"), network.sent(0, "office")
    assert "worker 1.1 is back" in (tmp_path / "node0.log").read_text()
    state = (
        sum(
            path.stat().st_size
            for path in (tmp_path / "out0" / "parameters").glob("layer-000[23]*")
        )
        * 3
    )
    assert office < state < fast, "the returned worker's layers, with the optimizer's state"


@pytest.mark.parametrize(
    "hosts", ["{} office", "192.0.2.1 office\n{} office"], ids=["IPv6 alone", "both families"]
)
def test_names_may_have_addresses_of_either_family(hosts, tmp_path):
    """pytorch 131691 and 150533. What node 0 cannot listen at, others need not reach."""
    job = tiny_text(pipelines=2, iterations=12)
    (tmp_path / "job.toml").write_text(job)
    with made_network("wire", ipv6=True) as network:
        (tmp_path / "hosts").write_text(
            "127.0.0.1 localhost\n" + hosts.format(network.address(0)) + "\n"
        )
        with nodes(
            network,
            tmp_path,
            ["--method", "greedy", "--kill", "1.1@3", "--return", "1.1@5", *HEARTBEATS],
            ["named_in", tmp_path / "hosts"],
            "office:29500",
            2,
        ) as processes:
            assert_trained(tmp_path, processes, job)
