"""The fork server outlives nobody, and says nothing when it goes."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from slipstream.runtime.processes import fork_server
from slipstream.runtime.processes.fork_server import AdoptedForkServer, ForkServer
from slipstream.runtime.processes.fork_server_messages import (
    LineReader,
    ProcessEnded,
    ProcessSpec,
    ProcessStarted,
    ServerAdopted,
)
from slipstream.runtime.protocol.node_reports import ReportGatherer
from slipstream.runtime.run_folder import clean_up_folder, hold_folder_lock, lock_path
from tests import patience
from tests.runtime.forked import fork_server_of_launcher
from tests.runtime.launchers import Launcher
from tests.runtime.running import below, command_environment, wait_until_gone

KILLED = """
import os, signal, sys
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.fork_server_messages import ProcessSpec
server = ForkServer()
for name in "abc":
    server.start_process(ProcessSpec(name, "time:sleep", "", os.devnull))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_that_dies_while_processes_are_started_leaves_neither_them_nor_a_traceback():
    """Their standard error is this pipe: it ends when the last of them has."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        env=command_environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=patience.SECONDS,
        check=False,
    )
    assert done.returncode == -9 and done.stderr == ""


def leave(folder: str, killed: str) -> None:
    """Be killed while a lock and a folder are there.

    The fork server is killed, too, or not.
    """
    tempfile.tempdir, out = folder, Path(folder)
    with hold_folder_lock(out, 1), ReportGatherer() as gatherer:
        server = fork_server_of_launcher()
        server.register_cleanup("slipstream.runtime.run_folder:remove_lock", lock_path(out, 1))
        server.register_cleanup("shutil:rmtree", gatherer.folder)
        for pid in below(os.getpid()) if killed == "both" else ():
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def left_in(folder: str) -> list[Path]:
    return [*Path(folder).glob(".node-*.lock"), *Path(folder).glob("slipstream-*")]


def test_what_a_launcher_that_was_killed_leaves_is_removed_by_the_fork_server_or_by_the_next_one(
    monkeypatch, tmp_path
):
    """The next one, where the fork server was killed, too. What somebody uses stays."""
    log = tmp_path / "log"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # addresses of sockets are short
        for killed in ("one", "both"):
            launcher = Launcher(f"{__name__}:leave", folder, killed, log=log)
            assert launcher.wait(patience.SECONDS) == -signal.SIGKILL, log.read_text()
            deadline = time.monotonic() + patience.SECONDS
            while killed == "one" and left_in(folder) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(left_in(folder)) == (0 if killed == "one" else 2)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with ReportGatherer(), hold_folder_lock(Path(folder), 0), hold_folder_lock(Path(folder), 2):
            clean_up_folder(Path(folder))
            with ReportGatherer():
                assert len(left_in(folder)) == 4
        assert not left_in(folder)


LOADS = """
import importlib.util, sys
import slipstream.runtime
import torch

def asked(*_):
    raise AssertionError("CUDA was asked how many GPUs there are")

torch.cuda._is_compiled = lambda: True
torch.cuda._raw_device_count_nvml = lambda: 2
torch._C._cuda_getDeviceCount = torch._C._cuda_init = torch._C._cuda_getCurrentRawStream = asked
assert torch.cuda.is_available()
from slipstream.runtime.processes.worker_start import HUGGING_FACE, TORCHTITAN
from slipstream.runtime.worker.main_thread import import_slow_modules
import_slow_modules()
for library, module in (("transformers", HUGGING_FACE), ("torchtitan", TORCHTITAN)):
    if importlib.util.find_spec(library):
        importlib.import_module(module)
assert not torch.cuda.is_initialized()
"""


def test_nothing_that_the_fork_server_imports_initialises_cuda():
    """Torch refuses a GPU to a process that was forked from one that has."""
    done = subprocess.run(
        [sys.executable, "-c", LOADS],
        env=command_environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=patience.SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr


ADOPTS = """
import os, signal, sys
from slipstream.runtime.processes.fork_server import ForkServer, adopt_fork_server
from slipstream.runtime.processes.fork_server_messages import ProcessSpec
if len(sys.argv) == 1:
    server = ForkServer()
    server.start_process(ProcessSpec("a", "tests.runtime.processes.child:sleep", "300", os.devnull))
    while not server.pids:
        server.poll(60)
else:
    server = adopt_fork_server(sys.argv[1])
    assert server is not None and server.list_alive() == ["a"]
print(server.hold_for_adoption(250, "note"), *server.pids.values(), flush=True)
if len(sys.argv) < 3:
    os.kill(os.getpid(), signal.SIGKILL)
server.close()
"""


def test_what_is_held_is_found_by_the_same_name_whoever_has_held_it_before():
    # A launcher that has taken over, and dies before it has told anybody, is followed by another.
    pids, name = set[int](), ""
    for last in (False, False, True):
        words = [name] * bool(name) + ["ends"] * last
        done = subprocess.run(
            [sys.executable, "-c", ADOPTS, *words],
            env=command_environment(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=patience.SECONDS,
            check=False,
        )
        assert done.returncode == (0 if last else -9)
        printed_name, pid = done.stdout.split()
        name = name or printed_name
        pids.add(int(pid))
    assert len(pids) == 1
    wait_until_gone([*pids])


def test_ending_processes_that_do_not_end_has_an_end(monkeypatch, tmp_path):
    # The fork server is stopped, and so kills nobody: it is killed itself, and its processes die
    # with it.
    monkeypatch.setattr(fork_server, "KILL_SECONDS", 0.3)
    with ForkServer() as server:
        server.start_process(
            ProcessSpec("a", "tests.runtime.processes.child:sleep", "300", str(tmp_path / "log"))
        )
        while not server.pids:
            server.poll(60)
        pid = server.pids["a"]
        os.kill(server._process.pid, signal.SIGSTOP)
        server.kill_all()
        assert server.pids == {} and not server.is_alive("a")
        wait_until_gone([pid])


def test_a_fork_server_that_outlives_its_kill_is_left_with_a_word(monkeypatch, capfd):
    """As one that waits for hardware may: the run ends as it would have."""
    monkeypatch.setattr(fork_server, "KILL_SECONDS", 0.1)
    with ForkServer() as server:
        process = server._process
        os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr(process, "kill", lambda: None)
    assert process.poll() is None
    assert f"process {process.pid}, which started the workers, was killed" in capfd.readouterr().err
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(patience.SECONDS) == -signal.SIGKILL


def test_a_process_that_ends_while_it_is_taken_over_does_not_live():
    # Its end may come with the first news, behind its name: nobody would ever hear of it again.
    server, launcher = socket.socketpair()
    news = (
        ServerAdopted("note", ("a", "b")),
        ProcessStarted("a", 1),
        ProcessStarted("b", 2),
        ProcessEnded("a", -9),
    )
    with server:
        server.sendall(b"".join(msgspec.json.encode(line) + b"\n" for line in news))
        adopted = AdoptedForkServer(launcher, "name")
        assert (
            adopted.list_alive() == ["b"] and adopted.pids == {"b": 2} and not adopted.is_alive("a")
        )
        server.sendall(msgspec.json.encode(ProcessEnded("b", 0)) + b"\n")
        assert adopted.poll(5.0) == [ProcessEnded("b", 0)]
    adopted.close()


def test_a_launcher_that_dies_with_news_unread_is_gone_like_any():
    """A Unix socket tells that otherwise than its end. The server goes on with what it holds."""
    server, launcher = socket.socketpair()
    with server:
        server.sendall(b"news\n")
        launcher.close()
        lines = LineReader(server.fileno())
        assert lines.read_lines() == [] and lines.closed
