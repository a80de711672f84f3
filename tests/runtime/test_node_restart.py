"""A node that is started again gets its workers back; a worker comes back as often as it is told to."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from runtime.coordinator.recovery import Recovery
from runtime.launch import Resilience, RunOptions, RunResult, run
from runtime.processes.fork_server import ForkServer
from runtime.processes.process_manager import Return
from runtime.protocol.rendezvous import Rendezvous
from schedules.schedule import Worker
from tests.runtime.failing import JOB, TIMEOUT_SECONDS, dead, planned, returned, train
from tests.runtime.running import (
    assert_same_numbers,
    below,
    command_environment,
    free_port,
    judge,
    schedule_for,
    tiny,
    wait_until_gone,
)
from tests.runtime.speaking import SECRET

CONFIG = tiny(iterations=300)
SLOWLY_SECONDS = 0.2
"""An iteration is made to take so long until a node is back, which takes many seconds on a busy machine."""
AGENT = """
import sys
from pathlib import Path
from runtime.node_agent import join
from runtime.protocol.rendezvous import Rendezvous
from tests.runtime.speaking import own_job
from tests.runtime.test_node_restart import CONFIG, JOB
join(Rendezvous("127.0.0.1", int(sys.argv[1])), own_job(JOB, CONFIG), node=1, nodes=2, out=Path(sys.argv[2]),
     join_timeout_seconds=60,
     notify=lambda text: print(text, file=sys.stderr, flush=True))
"""


class Node:
    """The launcher of node 1, a process that can be killed and started again."""

    def __init__(self, port: int, out: Path) -> None:
        self.log = out.with_name(f"{out.name}.log")
        self._command = [sys.executable, "-c", AGENT, str(port), str(out)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.processes.append(subprocess.Popen(self._command, env=command_environment(), stderr=log))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[-1].send_signal(number)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(20)


@pytest.fixture
def node(tmp_path):
    port = free_port()
    made = Node(port, tmp_path / "node")
    made.port = port
    yield made
    made.close()


def lead(node: Node, fork_server: ForkServer, out: Path, progress) -> RunResult:
    news: list[object] = []

    def slowly(iteration: int, loss: float) -> None:
        progress(iteration, loss)
        if iteration > 10 and not any(isinstance(one, Recovery) and one.returned for one in news):
            time.sleep(SLOWLY_SECONDS)

    result = run(schedule_for(JOB), CONFIG, out=out, fork_server=fork_server, progress=slowly,
                 options=RunOptions(nodes=2, rendezvous=Rendezvous("127.0.0.1", node.port), secret=SECRET,
                                    notify=news.append),
                 resilience=Resilience(scheduler=planned(JOB), heartbeat_timeout_seconds=TIMEOUT_SECONDS))
    assert_same_numbers(result, judge(CONFIG, JOB.microbatches, CONFIG.training.iterations))
    return result


@pytest.mark.parametrize("shared", [True, False], ids=["one folder", "a folder each"])
def test_a_node_whose_launcher_is_killed_and_started_again_gets_its_workers_back(shared, node, fork_server, tmp_path):
    """With its folder, where its logs go on."""
    out = tmp_path / "node" if shared else tmp_path / "lead"

    def progress(iteration, _):
        if iteration == 10:
            node.kill()
        elif iteration == 12:
            node.start()

    node.start()
    result = lead(node, fork_server, out, progress)
    assert sorted(dead(result)) == sorted(returned(result)) == ["1.0", "1.1"]
    assert node.processes[1].wait(20) == 0
    assert "Traceback" not in node.log.read_text()
    assert {path.name for path in (out / "parameters").iterdir()} == {f"layer-000{layer}.safetensors"
                                                                      for layer in range(4)}


def test_a_second_launcher_of_a_node_waits_until_the_first_is_missed(node, fork_server, tmp_path):
    """As where the machine of the first is gone without a word: here it and its workers are stopped."""
    stopped: list[int] = []

    def progress(iteration, _):
        if iteration == 10:
            node._command[-1] += "-again"  # not the folder of the first, which holds that
            node.start()
        elif not stopped and f"node 1 takes part in the run at 127.0.0.1:{node.port} already" in node.log.read_text():
            stopped.extend(below(node.processes[0].pid))
            for pid in (node.processes[0].pid, *stopped):
                os.kill(pid, signal.SIGSTOP)

    node.start()
    try:
        result = lead(node, fork_server, tmp_path / "lead", progress)
    finally:
        node.close()
        for pid in stopped:  # the fork server sees then that its launcher is gone
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert sorted(dead(result)) == sorted(returned(result)) == ["1.0", "1.1"]
    wait_until_gone(stopped)


def test_a_worker_comes_back_as_often_as_it_is_told_to(fork_server, tmp_path):
    """Also where it is told to twice before it dies."""
    back = Worker(0, 0)
    kills: list[int] = []

    def progress(iteration, _):
        # Once it has come back, it is killed again, some time after.
        if len(kills) < 2 and str(back) in fork_server.pids and fork_server.pids[str(back)] not in kills \
                and iteration > 40 * (len(kills) + 1):
            kills.append(fork_server.pids[str(back)])
            os.kill(kills[-1], signal.SIGKILL)

    result = train([], fork_server, tmp_path, config=tiny(iterations=300), progress=progress,
                   returns=(Return(back, 3), Return(back, 5)))
    assert dead(result) == ["0.0", "0.0"] and returned(result) == ["0.0", "0.0"]


STARTING = """
import os, sys
from pathlib import Path
from runtime.launch import Resilience, run
from tests.runtime.failing import JOB
from tests.runtime.running import schedule_for, tiny
schedule = schedule_for(JOB)  # a planner answers Ctrl-C with the best plan so far
print("begins", flush=True)
run(schedule, tiny(iterations=100_000), out=Path(sys.argv[1]), resilience=Resilience(coordinator_timeout_seconds=2))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
@pytest.mark.parametrize("after", [0.05, 0.5, 1.5, 3.0, 4.5])
def test_a_launcher_that_is_killed_while_it_starts_leaves_no_process_and_no_traceback(number, after, tmp_path):
    """Its workers and their fork server have its standard error: that ends when all of them have."""
    with subprocess.Popen([sys.executable, "-c", STARTING, str(tmp_path / "out")], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=command_environment()) as launcher:
        try:
            assert launcher.stdout is not None and launcher.stdout.readline() == b"begins\n"
            time.sleep(after)
            launcher.send_signal(number)
            _, errors = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    told = errors.decode()
    assert told.count("Traceback") <= (number != signal.SIGKILL), told  # its own, of the KeyboardInterrupt in a script
    assert "fork_server" not in told.partition("KeyboardInterrupt")[2] and "BrokenPipe" not in told, told
    logs = tmp_path / "out" / "logs"
    assert not [path for path in (logs.iterdir() if logs.exists() else ()) if "Traceback" in path.read_text()]
