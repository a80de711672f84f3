"""A node that is started again gets its workers back.

A worker comes back as often as it is told to.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.launch import Resilience, RunOptions, RunResult, run
from slipstream.runtime.node_agent import join_run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules import codec
from slipstream.schedules.schedule import Worker
from tests.runtime.failing import (
    JOB,
    SILENT_SECONDS,
    TIMEOUT_SECONDS,
    dead,
    planned,
    returned,
    train,
)
from tests.runtime.forked import fork_server_of_launcher
from tests.runtime.launchers import Launcher
from tests.runtime.pacing import Pauses
from tests.runtime.running import (
    assert_same_numbers,
    below,
    children,
    free_port,
    joined,
    judge,
    losses_in,
    schedule_for,
    tiny,
    wait_until_gone,
)
from tests.runtime.speaking import SECRET, own_job

pytestmark = pytest.mark.slow

CONFIG = tiny(iterations=80)


def follow(port: str, out: str) -> None:
    """Node 1."""
    with fork_server_of_launcher() as fork_server:
        join_run(
            Rendezvous("127.0.0.1", int(port)),
            own_job(JOB, CONFIG, Path(out)),
            node=1,
            nodes=2,
            fork_server=fork_server,
            join_timeout_seconds=240,
            notify=lambda text: print(text, file=sys.stderr, flush=True),
        )


class Node:
    """The launcher of node 1, a process that can be killed and started again."""

    def __init__(self, port: int, out: Path) -> None:
        self.port, self.out, self.log = port, out, out.with_name(f"{out.name}.log")
        self.processes: list[Launcher] = []

    def start(self) -> None:
        self.processes.append(Launcher(f"{__name__}:follow", self.port, self.out, log=self.log))

    def kill(self) -> None:
        self.processes[-1].kill()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(60)


@pytest.fixture
def node(tmp_path):
    node_ = Node(free_port(), tmp_path / "node")
    yield node_
    node_.close()


def lead(
    node: Node, fork_server: ForkServer, out: Path, progress, timeout: float = TIMEOUT_SECONDS
) -> RunResult:
    news: list[object] = []
    pauses = Pauses()

    def slowly(iteration: int, loss: float) -> None:
        progress(iteration, loss)
        back = {worker for item in news if isinstance(item, Recovery) for worker in item.returned}
        pauses.wait(iteration > 10 and len(back) < 2)

    result = run(
        schedule_for(JOB),
        CONFIG,
        out=out,
        fork_server=fork_server,
        progress=slowly,
        options=RunOptions(
            nodes=2,
            rendezvous=Rendezvous("127.0.0.1", node.port),
            secret=SECRET,
            notify=news.append,
        ),
        resilience=Resilience(scheduler=planned(JOB), heartbeat_timeout_seconds=timeout),
    )
    if node.out != out:  # the holders of layers take turns to write them
        shutil.copytree(node.out / "parameters", out / "parameters", dirs_exist_ok=True)
    assert_same_numbers(result, judge(CONFIG, JOB.microbatches, CONFIG.training.iterations))
    return result


@pytest.mark.parametrize("shared", [True, False], ids=["one folder", "a folder each"])
def test_a_node_whose_launcher_is_killed_and_started_again_gets_its_workers_back(
    shared, node, fork_server, tmp_path
):
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
    assert node.processes[1].wait(120) == 0
    assert "Traceback" not in node.log.read_text()
    layer_files = {f"layer-000{layer}.safetensors" for layer in range(4)}
    assert {path.name for path in (out / "parameters").iterdir()} == layer_files


def test_a_second_launcher_of_a_node_waits_until_the_first_is_missed(node, fork_server, tmp_path):
    # The machine of the first may be gone without a word: here it and its workers are stopped.
    stopped: list[int] = []

    def progress(iteration, _):
        if iteration == 10:
            node.out = tmp_path / "node-again"  # not the folder of the first, which holds that
            node.start()
        elif (
            not stopped
            and f"node 1 takes part in the run at 127.0.0.1:{node.port} already"
            in node.log.read_text()
        ):
            stopped.extend(below(node.processes[0].pid))
            for pid in (node.processes[0].pid, *stopped):
                os.kill(pid, signal.SIGSTOP)

    node.start()
    try:
        result = lead(node, fork_server, tmp_path / "lead", progress, SILENT_SECONDS)
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
        if (
            len(kills) < 2
            and len(joined(tmp_path)) == len(kills)
            and iteration > 10 * (len(kills) + 1)
        ):
            kills.append(fork_server.pids[str(back)])
            os.kill(kills[-1], signal.SIGKILL)

    result = train(
        [],
        fork_server,
        tmp_path,
        config=tiny(iterations=100),
        progress=progress,
        returns=(Return(back, 3), Return(back, 5)),
    )
    assert dead(result) == ["0.0", "0.0"] and returned(result) == ["0.0", "0.0"]


def begin(schedule: str, out: str) -> None:
    """Node 0 of a run without end.

    Its schedule is read: a planner answers Ctrl-C with the best plan so far.
    """
    print("begins", flush=True)
    run(
        codec.read(Path(schedule)),
        tiny(iterations=100_000),
        out=Path(out),
        resilience=Resilience(
            coordinator_timeout_seconds=2, heartbeat_timeout_seconds=TIMEOUT_SECONDS
        ),
    )


MOMENTS = {
    "at once": lambda _, __: True,
    "its fork server starts": lambda pid, _: children(pid),
    "its workers start": lambda pid, _: len(below(pid)) > 2,
    "its workers are there": lambda pid, _: len(below(pid)) > 4,
    "they train": lambda _, out: losses_in(out),
}


class Pipe:
    """Read from while others write, and until nobody has it open any more."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path, self._end = path, os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.said = b""

    def read_until(self, happened) -> None:
        deadline, more = time.monotonic() + 240, None
        while not happened(more):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)
            more = None
            with suppress(BlockingIOError):
                more = os.read(self._end, 2**16)
                self.said += more


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_launcher_that_is_killed_while_it_starts_leaves_no_process_and_no_traceback(
    number, moment, tmp_path
):
    # Its workers and their fork server have its standard error, a pipe: that ends when all of them
    # have.
    schedule, out, pipe = tmp_path / "schedule.json", tmp_path / "out", Pipe(tmp_path / "pipe")
    codec.write(schedule_for(JOB), schedule)
    launcher = Launcher(f"{__name__}:begin", schedule, out, log=pipe.path)
    try:
        pipe.read_until(lambda _: b"begins" in pipe.said and MOMENTS[moment](launcher.pid, out))
        launcher.send_signal(number)
        pipe.read_until(lambda more: more == b"")
    finally:
        launcher.kill()
    output = pipe.said.decode()
    # Its own, of the exception in a script.
    assert output.count("Traceback") <= (number != signal.SIGKILL), output
    assert (
        "fork_server" not in output.partition("KeyboardInterrupt")[2] and "BrokenPipe" not in output
    ), output
    logs = out / "logs"
    paths = logs.iterdir() if logs.exists() else ()
    assert not [path for path in paths if "Traceback" in path.read_text()]
