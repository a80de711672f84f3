"""What a node runs comes from its own job file and command line.

What node 0 sends is only compared.
"""

import threading
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from slipstream.runtime.config import ConfigError
from slipstream.runtime.launch import RunError, RunOptions, run
from slipstream.runtime.node_agent import NodeJob, RunDoneError, join_run
from slipstream.runtime.processes import restart_policy as start_limit
from slipstream.runtime.processes.restart_policy import MAX_STARTS, StartLimit, StartLimitError
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.protocol import authentication, to_node_agent
from slipstream.runtime.protocol.channel import encode_frame
from slipstream.runtime.protocol.rendezvous import Rendezvous, open_listener
from slipstream.runtime.protocol.to_node_agent import NodeSetup, StartWorker, StillRunning
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import free_port, schedule_for, tiny
from tests.runtime.speaking import COMMON, SECRET, be_asked

SCHEDULE = schedule_for(grid(2, 2, 2))
WORKERS = [seat.worker for seat in SCHEDULE.seats]
SETUP = NodeSetup(COMMON, (2, 2), (), tiny(), 0, restarted=False)
SOON = 240.0


@pytest.fixture
def node_0():
    """Somebody who knows the secret, and says to a node agent what a test wants.

    It says nothing more.
    """
    listener, address = open_listener()
    over = threading.Event()

    def say(*messages: msgspec.Struct) -> Rendezvous:
        def speak() -> None:
            asking = be_asked(listener.accept()[0], "control")
            with asking:
                for message in messages:
                    asking.connection.sendall(encode_frame(message).with_tag(asking.keys.sending))
                over.wait(SOON)

        threading.Thread(target=speak, daemon=True).start()
        return address

    with listener:
        yield say
    over.set()


def own(out: Path, **more) -> NodeJob:
    return NodeJob(
        settings=NodeSettings(config=tiny(), secret=SECRET, out=str(out), **more), workers=WORKERS
    )


def join_as_node_1(address: Rendezvous, out: Path, fork_server, **more) -> None:
    join_run(address, own(out, **more), node=1, nodes=2, fork_server=fork_server)


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (
            replace(SETUP, config=tiny(seed=3)),
            r"^training\.seed is 0 here and 3 at node 0; start every node with the same",
        ),
        (
            replace(SETUP, config=tiny(data="os:system")),
            r"^training\.data is None here and 'os:system' at node 0",
        ),
        (
            replace(SETUP, workers=(Worker(7, 0),)),
            r"^node 0 has a worker 7\.0, which is not in this job",
        ),
        (
            replace(SETUP, first_iteration=4),
            r"^node 0 resumes from iteration 4; start every node with --resume",
        ),
    ],
)
def test_a_node_0_with_another_job_is_refused_with_both_values(
    setup, reason, node_0, fork_server, tmp_path
):
    with pytest.raises(ConfigError, match=reason):
        join_as_node_1(node_0(setup), tmp_path / "out", fork_server)
    assert not (tmp_path / "out").exists() and fork_server.pids == {}


def test_workers_that_are_not_this_nodes_are_not_started(node_0, fork_server, tmp_path):
    with pytest.raises(
        RunError, match=r"^node 0 wants to start worker 0\.0, which is not a worker of this node"
    ):
        join_as_node_1(node_0(SETUP, StartWorker(Worker(0, 0))), tmp_path, fork_server)
    assert fork_server.pids == {}


def test_a_node_that_waits_for_node_0_learns_that_the_run_is_done(fork_server, tmp_path):
    # It was started again while the run was ending: node 0 has left, and never comes back.
    lines = []
    with pytest.raises(RunDoneError, match="waiting for node 0"):
        join_run(
            Rendezvous("127.0.0.1", free_port()),
            own(tmp_path / "out"),
            node=1,
            nodes=2,
            fork_server=fork_server,
            notify=lines.append,
            is_done=lambda: True,
        )
    assert not lines and not (tmp_path / "out").exists()


def test_starts_are_limited_in_number_and_rate(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(start_limit.time, "monotonic", lambda: clock[0])
    limit = StartLimit(WORKERS)
    for worker in WORKERS:
        for _ in range(MAX_STARTS):
            limit.count_start(worker)
    with pytest.raises(
        StartLimitError, match=r"^node 0 wants to start worker 0\.0 more than 60 times in 60 s$"
    ):
        limit.count_start(WORKERS[0])
    clock[0] = 61.0
    limit.count_start(WORKERS[0])


@pytest.mark.slow
def test_a_node_0_that_falls_silent_is_given_up(node_0, fork_server, tmp_path, monkeypatch):
    monkeypatch.setattr(to_node_agent, "SILENT_SECONDS", 0.5)
    # What listens is still there, and answers nobody else.
    monkeypatch.setattr(authentication, "HELLO_SECONDS", 3.0)
    for seconds, reason in (0.0, ""), (0.2, r"; no other node 0 came within 0\.2 s"):
        with pytest.raises(
            RunError, match=rf"^node 0 is gone: it has sent no message for 0 s{reason}$"
        ):
            join_as_node_1(
                node_0(SETUP, StillRunning()),
                tmp_path,
                fork_server,
                coordinator_timeout_seconds=seconds,
            )


def test_several_nodes_without_a_secret_are_refused_with_the_way_to_make_one(fork_server, tmp_path):
    with pytest.raises(
        ConfigError, match=r"a run on 2 nodes needs a secret .*SLIPSTREAM_SECRET_FILE.*openssl rand"
    ):
        run(
            SCHEDULE,
            tiny(),
            out=tmp_path / "out",
            options=RunOptions(nodes=2),
            fork_server=fork_server,
        )
    assert not (tmp_path / "out").exists()
