import itertools
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from slipstream.runtime.config import ConfigError
from slipstream.runtime.launch import Resilience, RunError, RunOptions, run
from slipstream.runtime.node_agent import join_run
from slipstream.runtime.placement import PlacementError
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError
from slipstream.runtime.protocol.store import host_store
from slipstream.runtime.run_folder import FolderError
from slipstream.schedules.codec import read
from slipstream.schedules.measured_trace import read_measured_trace
from slipstream.schedules.schedule import OpKind
from tests.jobs import grid
from tests.runtime.running import (
    assert_same_numbers,
    free_port,
    judge,
    log_of,
    schedule_for,
    tiny,
    wait_until_gone,
)
from tests.runtime.speaking import SECRET, own_job

JOB = grid(2, 2, 2, more="optimizer = 1")


def test_the_folder_holds_what_the_result_says(fork_server, tmp_path):
    schedule = schedule_for(JOB, ["0.1"])
    seen = []
    result = run(
        schedule,
        tiny(),
        out=tmp_path,
        iterations=5,
        fork_server=fork_server,
        progress=lambda iteration, loss: seen.append((iteration, loss)),
    )
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert (
        seen
        == [(line["iteration"], line["loss"]) for line in lines]
        == list(enumerate(result.losses))
    )
    assert read(tmp_path / "schedule.json") == schedule
    assert read_measured_trace(tmp_path / "trace.json") == result.trace
    assert result.planned_period_seconds == schedule.seconds(schedule.period_ticks)
    assert result.measured_period_seconds > 0
    assert log_of(tmp_path) == ""


def test_the_trace_holds_every_op_in_the_order_of_the_programs(fork_server, tmp_path):
    schedule = schedule_for(JOB)
    trace = run(schedule, tiny(), out=tmp_path, iterations=4, fork_server=fork_server).trace
    assert [iteration.iteration for iteration in trace.iterations] == [1, 2, 3]
    for iteration in trace.iterations:
        assert min(op.start_seconds for op in iteration.ops) == 0
        ends = {
            (op.kind, op.slice, op.pipeline, op.microbatch): op.end_seconds for op in iteration.ops
        }
        for seat in schedule.seats:
            measured = [op for op in iteration.ops if op.worker == seat.worker]
            planned_ops = [
                (op.kind, op.slice, op.pipeline, op.microbatch) for op in schedule.ops(seat.worker)
            ]
            assert [
                (op.kind, op.slice, op.pipeline, op.microbatch) for op in measured
            ] == planned_ops
            for left, right in itertools.pairwise(measured):
                assert left.end_seconds <= right.start_seconds
        # One clock for all: what an op needs has ended on the other worker.
        for op in iteration.ops:
            if op.kind is OpKind.F and op.slice == 1:
                assert ends[(OpKind.F, 0, op.pipeline, op.microbatch)] < op.end_seconds


def test_no_iterations_leave_the_initial_parameters(fork_server, tmp_path):
    result = run(schedule_for(JOB), tiny(), out=tmp_path, iterations=0, fork_server=fork_server)
    assert (
        result.losses == ()
        and result.measured_period_seconds is None
        and result.trace.iterations == ()
    )
    assert result.parameter_digest == judge(tiny(), JOB.microbatches, 0).digest


def test_a_run_that_is_forced_to_forgets_the_one_before(fork_server, tmp_path):
    (tmp_path / "parameters").mkdir()
    (tmp_path / "parameters" / "layer-0099.safetensors").write_bytes(b"old")
    with pytest.raises(
        FolderError, match=r"holds the results of another run \(parameters\): give .* with --force$"
    ):
        run(schedule_for(JOB), tiny(), out=tmp_path, fork_server=fork_server)
    result = run(
        schedule_for(JOB),
        tiny(),
        out=tmp_path,
        fork_server=fork_server,
        options=RunOptions(force=True),
    )
    assert_same_numbers(result, judge(tiny(), JOB.microbatches))


def test_a_killed_worker_ends_the_run_at_once_with_its_name(fork_server, tmp_path):
    def kill(iteration, _):
        if iteration == 3:
            os.kill(fork_server.pids["1.0"], signal.SIGKILL)
            times.append(time.monotonic())

    times = []
    with pytest.raises(
        RunError, match=r"^worker 1\.0 was killed by SIGKILL; \d+ iterations are committed"
    ) as caught:
        run(
            schedule_for(JOB),
            tiny(),
            out=tmp_path,
            iterations=10_000,
            fork_server=fork_server,
            progress=kill,
            resilience=Resilience(heartbeat_timeout_seconds=120),
        )
    assert time.monotonic() - times[0] < 30, "nobody is waited for"
    assert fork_server.pids == {}
    committed = [
        json.loads(line)["iteration"]
        for line in (tmp_path / "losses.jsonl").read_text().splitlines()
    ]
    assert committed == list(range(len(committed))) and len(committed) >= 4
    assert f" {len(committed)} iterations" in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_in_a_worker_is_told_rather_than_what_follows_from_it(fork_server, tmp_path):
    def spoil(iteration, _):
        if iteration == 1:  # where worker 0.1 will want to write its parameters
            (tmp_path / "parameters").write_text("not a folder")

    with pytest.raises(
        RunError, match=r"^stage \d has no live worker left: .*Error: .*worker-\d\.\d\.log"
    ):
        run(
            schedule_for(JOB),
            tiny(),
            out=tmp_path,
            iterations=3,
            fork_server=fork_server,
            progress=spoil,
        )
    assert "Traceback" in log_of(tmp_path)
    assert fork_server.pids == {}


def test_no_worker_outlives_the_fork_server(tmp_path, monkeypatch):
    """Even when it is killed, as when memory runs out.

    Until then, no worker imports what takes long: it has that.
    """
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    fork_server = ForkServer()

    def kill(iteration, _):
        if iteration == 1:
            pids.extend(fork_server.pids.values())
            os.kill(fork_server._process.pid, signal.SIGKILL)

    pids: list[int] = []
    with pytest.raises(
        RunError,
        match=r"^the process that starts the workers has died; \d+ iterations are committed",
    ):
        run(
            schedule_for(JOB),
            tiny(),
            out=tmp_path,
            iterations=10_000,
            fork_server=fork_server,
            progress=kill,
        )
    fork_server.close()
    assert len(pids) == 4
    wait_until_gone(pids)
    imported = re.findall(r"import time: .*\| +([\w.]+)$", log_of(tmp_path), re.MULTILINE)
    assert len(imported) < 40
    assert not any(
        re.match(r"networkx|runtime|schedules|torch\._dynamo", name) for name in imported
    ), imported


def test_an_interrupt_leaves_no_worker(fork_server, tmp_path):
    def interrupt(iteration, _):
        if iteration == 2:
            pids.extend(fork_server.pids.values())
            raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(
            schedule_for(JOB),
            tiny(),
            out=tmp_path,
            iterations=10_000,
            fork_server=fork_server,
            progress=interrupt,
        )
    wait_until_gone(pids)
    assert len((tmp_path / "losses.jsonl").read_text().splitlines()) == 3


def test_a_loss_that_is_not_finite_ends_the_run(fork_server, tmp_path):
    with pytest.raises(RunError, match=r"the loss of iteration \d+ is not finite: .*learning_rate"):
        run(
            schedule_for(JOB),
            tiny(optimizer="sgd", learning_rate=1e6),
            out=tmp_path,
            fork_server=fork_server,
        )


def test_two_nodes(fork_server, other_fork_server, tmp_path):
    rendezvous, failed = Rendezvous("127.0.0.1", free_port()), ["1.0"]
    # Both write into one folder, as on a shared disk.
    other = Joining(rendezvous, other_fork_server, tmp_path)
    result = run(
        schedule_for(JOB, failed),
        tiny(),
        out=tmp_path,
        options=RunOptions(nodes=2, rendezvous=rendezvous, secret=SECRET),
        fork_server=fork_server,
    )
    other.thread.join(60)
    assert other.error is None and not other.thread.is_alive()
    assert_same_numbers(result, judge(tiny(), JOB.microbatches))
    assert {path.stem for path in (tmp_path / "logs").iterdir()} == {
        "worker-0.0",
        "worker-0.1",
        "worker-1.1",
    }


def test_a_failure_on_one_node_ends_all(fork_server, other_fork_server, tmp_path):
    rendezvous = Rendezvous("127.0.0.1", free_port())
    other = Joining(rendezvous, other_fork_server, tmp_path / "other")

    def kill(iteration, _):
        if iteration == 2:
            os.kill(other_fork_server.pids["1.1"], signal.SIGKILL)

    with pytest.raises(RunError, match=r"^worker 1\.1 was killed by SIGKILL"):
        run(
            schedule_for(JOB),
            tiny(),
            out=tmp_path / "lead",
            fork_server=fork_server,
            iterations=10_000,
            options=RunOptions(nodes=2, rendezvous=rendezvous, secret=SECRET),
            progress=kill,
        )
    other.thread.join(60)
    assert str(other.error).startswith("worker 1.1 was killed by SIGKILL")
    assert other_fork_server.pids == fork_server.pids == {}


def test_a_meeting_point_that_is_taken_is_named(fork_server, tmp_path):
    store, taken = host_store()
    with pytest.raises(RendezvousError, match=f"cannot listen at {taken}: .*in use"):
        run(
            schedule_for(JOB),
            tiny(),
            out=tmp_path,
            options=RunOptions(rendezvous=taken),
            fork_server=fork_server,
        )
    del store


def test_what_does_not_fit_is_refused_before_anything_starts(fork_server, tmp_path):
    schedule = schedule_for(JOB)
    broken = replace(schedule, programs=tuple(program[1:] for program in schedule.programs))
    with pytest.raises(PlacementError, match="breaks a rule"):
        run(broken, tiny(), out=tmp_path / "out", fork_server=fork_server)
    with pytest.raises(PlacementError, match="stages hold 3 layers; the model has 4"):
        layers = grid(2, 2, 2, more="[placement]\nlayers = [1, 2]")
        run(schedule_for(layers), tiny(), out=tmp_path / "out", fork_server=fork_server)
    with pytest.raises(ConfigError, match="4 layers cannot be cut into 7 stages"):
        run(schedule_for(grid(1, 7, 1)), tiny(), out=tmp_path / "out", fork_server=fork_server)
    with pytest.raises(ConfigError, match=r"training\.text is '/no/such/text'"):
        run(
            schedule_for(JOB),
            tiny(text="/no/such/text"),
            out=tmp_path / "out",
            fork_server=fork_server,
        )
    with pytest.raises(ConfigError, match="'nccl', which needs a GPU for each worker"):
        run(schedule_for(JOB), tiny(backend="nccl"), out=tmp_path / "out", fork_server=fork_server)
    assert not (tmp_path / "out").exists()


class Joining:
    """Node 1, in a thread: its workers are processes all the same."""

    def __init__(self, rendezvous: Rendezvous, fork_server: ForkServer, out: Path) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(
            target=self._join, args=(rendezvous, fork_server, out), daemon=True
        )
        self.thread.start()

    def _join(self, rendezvous: Rendezvous, fork_server: ForkServer, out: Path) -> None:
        try:
            job = own_job(JOB, tiny(), out)
            join_run(rendezvous, job, node=1, nodes=2, fork_server=fork_server)
        except Exception as error:
            self.error = error
