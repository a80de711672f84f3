"""Nodes with addresses of their own, in Linux network namespaces joined by a bridge, one of which is cut off."""

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
from tests.runtime.launchers import Launcher, command
from tests.runtime.pacing import hold_at
from tests.runtime.running import judge_of_text, losses_in, tiny_text

pytestmark = pytest.mark.slow

NODES = 3
CLONE_NEWNET = 0x40000000
JOB = tiny_text(pipelines=3, iterations=30)
CUT_AFTER = 4
"""The last iteration before a node is cut off."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Network:
    """One namespace a node, and one that holds the bridge: nothing of the machine's own network is touched."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._prefix = f"slip{os.getpid()}"
        for name in (self.switch, *map(self.name, range(NODES))):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for node in range(NODES):
            ip("-n", self.switch, "link", "add", f"port{node}", "type", "veth", "peer", "name", "wire",
               "netns", self.name(node))
            ip("-n", self.switch, "link", "set", f"port{node}", "master", "bridge", "up")
            ip("-n", self.name(node), "address", "add", f"{self.address(node)}/24", "dev", "wire")
            ip("-n", self.name(node), "link", "set", "wire", "up")

    @property
    def switch(self) -> str:
        return f"{self._prefix}-switch"

    def name(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    def address(self, node: int) -> str:
        return f"10.213.7.{node + 1}"

    def cut(self, node: int) -> None:
        """No packet reaches the node any more, and none tells so."""
        ip("-n", self.switch, "link", "set", f"port{node}", "down")


@pytest.fixture
def network() -> Iterator[Network]:
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        pytest.skip("needs Linux and the `ip` command")
    with contextlib.ExitStack() as stack:
        try:
            made = Network(stack)
        except subprocess.SubprocessError as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()
            pytest.skip(f"network namespaces are not allowed here: {reason}")
        yield made


def command_in(namespace: str, cut: str, *words: str) -> int:
    """`slipstream` with these words, in a network namespace; it waits for the file that says that a node is cut off."""
    hold_at(CUT_AFTER, Path(cut))
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/var/run/netns/{namespace}").open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no namespace {namespace}")
    return command(*words)


@contextlib.contextmanager
def nodes(network: Network, folder: Path, options: Sequence[str]) -> Iterator[list[Launcher]]:
    """One `slipstream train` a node; none is left at the end."""
    started = []
    try:
        for node in range(NODES):
            started.append(Launcher(
                f"{__name__}:command_in", network.name(node), folder / "cut", "train", folder / "job.toml", "--out",
                folder / f"out{node}", "--nodes", NODES, "--node", node, "--rendezvous",
                f"{network.address(0)}:29500", *options, log=folder / f"node{node}.log"))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait(60)


def test_a_node_that_is_cut_off_is_given_up_and_the_others_go_on(network, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    with nodes(network, tmp_path, ["--method", "greedy", "--heartbeat-timeout", "3"]) as processes:
        deadline = time.monotonic() + 240
        while len(losses_in(tmp_path / "out0")) <= CUT_AFTER:
            assert processes[0].poll() is None and time.monotonic() < deadline, (tmp_path / "node0.log").read_text()
            time.sleep(0.005)
        network.cut(2)
        (tmp_path / "cut").touch()
        assert processes[0].wait(240) == 0, (tmp_path / "node0.log").read_text()
        assert processes[1].wait(120) == 0, (tmp_path / "node1.log").read_text()
    said = (tmp_path / "node0.log").read_text()
    assert "worker 2.0" in said and "worker 2.1" in said and "runs on 4 workers" in said
    events = map(json.loads, (tmp_path / "out0" / EVENTS).read_text().splitlines())
    assert [one["workers"] for one in events if one["event"] == "node_lost"] == [[[2, 0], [2, 1]]]
    assert losses_in(tmp_path / "out0") == pytest.approx(judge_of_text(JOB).losses, rel=0, abs=1e-9)
