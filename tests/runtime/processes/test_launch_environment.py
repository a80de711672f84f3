"""Processes started one by one by others.

Tested is what they are told, and that training by torchrun gives the same numbers.
"""

import subprocess
import sys

import pytest

from slipstream.runtime.placement import assign_workers_to_nodes
from slipstream.runtime.processes.launch_environment import (
    GpuShare,
    LaunchInfo,
    LocalProcess,
    choose_listen_address,
    compute_gpu_share,
    group_ranks,
    read_launch_info,
)
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules.schedule import Worker
from tests.runtime.running import command_environment, judge_of_text, losses_in, tiny_text

JOB = tiny_text(pipelines=2, iterations=8)
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "MASTER_ADDR": "host",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "fe80::1",
    "MASTER_PORT": "99",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            TORCHRUN,
            LaunchInfo(
                node=3,
                nodes=4,
                local=LocalProcess(rank=1, processes=2),
                master=Rendezvous("host", 1234),
                agent=True,
                tied=True,
            ),
        ),
        (
            SRUN,
            LaunchInfo(
                node=2,
                nodes=8,
                local=LocalProcess(rank=2, processes=4),
                master=Rendezvous("host", 29500),
            ),
        ),
        (
            MPIRUN,
            LaunchInfo(
                node=0, nodes=2, local=LocalProcess(), master=Rendezvous("fe80::1", 99), tied=True
            ),
        ),
        (
            {**SRUN, **MPIRUN},
            LaunchInfo(
                node=0, nodes=2, local=LocalProcess(), master=Rendezvous("fe80::1", 99), tied=True
            ),
        ),
    ],
)
def test_what_launchers_tell(environment, expected):
    assert read_launch_info(environment) == expected


def test_node_0_listens_at_the_master_port_unless_torchrun_does():
    torchrun, mpirun = read_launch_info(TORCHRUN), read_launch_info(MPIRUN)
    assert torchrun is not None and choose_listen_address(torchrun) == Rendezvous("host", 0)
    assert mpirun is not None and choose_listen_address(mpirun) == Rendezvous("fe80::1", 99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"MASTER_ADDR": ""},
            "RANK and WORLD_SIZE say that this is one of 4 processes: set MASTER_ADDR",
        ),
        ({"RANK": "4"}, "RANK is '4'; expected a whole number from 0 to 3"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'"),
        (
            {"LOCAL_WORLD_SIZE": "4 (x2"},
            r"LOCAL_WORLD_SIZE is '4 \(x2'; expected a whole number from 1 to 1048576",
        ),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE is ''; expected a whole number"),
        ({"RANK": "9" * 5000}, "RANK is '99999"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'; expected a whole number from 0 to 3"),
        ({"RANK": "\u0663"}, "RANK is '\u0663'; expected a whole number"),
        (
            {"MASTER_PORT": "70000"},
            "MASTER_PORT is '70000'; expected a whole number from 1 to 65535",
        ),
    ],
)
def test_nonsense_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        read_launch_info({**TORCHRUN, **changes})


@pytest.mark.parametrize(
    ("text", "machine", "processes"),
    [
        ("4(x2)", "1", 4),
        ("4(x2),3", "0", 4),
        ("4(x2),3", "2", 3),
        ("2,4", "1", 4),
        ("3", None, 3),
        ("4(x2),3", None, 4),
    ],
)
def test_srun_says_how_many_processes_each_machine_has(text, machine, processes):
    more = {} if machine is None else {"SLURM_NODEID": machine}
    info = read_launch_info(
        {**SRUN, "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": text, **more}
    )
    assert info is not None and info.local == LocalProcess(rank=0, processes=processes)


@pytest.mark.parametrize("text", ["", "four", "4(x2", "4(2)", "4,,3", "0", "4(x99999999)"])
def test_what_srun_says_is_refused_in_one_line_where_it_makes_no_sense(text):
    with pytest.raises(ValueError, match=r"^SLURM_STEP_TASKS_PER_NODE is ") as caught:
        read_launch_info({**SRUN, "SLURM_STEP_TASKS_PER_NODE": text})
    assert str(caught.value) == (
        f"SLURM_STEP_TASKS_PER_NODE is {text!r}; expected the number of processes of each "
        "machine, such as '4(x2),3'"
    )


@pytest.mark.parametrize("nodes", range(1, 13))
@pytest.mark.parametrize("machines", [1, 2, 3, 4])
def test_no_two_workers_of_a_machine_get_the_same_gpu(machines, nodes):
    # Processes have unequal shares: of 12 workers on 2 machines of 4 processes, 1, 2, 1, 2, ...
    if nodes % machines:
        return
    shares = assign_workers_to_nodes([Worker(0, column) for column in range(12)], nodes)
    beside = nodes // machines
    for machine in range(machines):
        taken, total = [], 0
        for rank in range(beside):
            node = machine * beside + rank
            share = compute_gpu_share(
                [len(workers) for workers in shares],
                node,
                LocalProcess(rank=rank, processes=beside),
            )
            taken += range(share.first, share.first + len(shares[node]))
            total = share.processes
        assert sorted(taken) == list(range(total)) and total == sum(
            map(len, shares[machine * beside :][:beside])
        )


def test_a_process_that_launchers_told_nothing_of_takes_the_first_gpus():
    assert compute_gpu_share([3, 3], 1, LocalProcess()) == GpuShare(first=0, processes=3)


@pytest.mark.slow
def test_torchrun_trains_as_one_process_does_also_when_a_worker_dies(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "slipstream",
        "train",
        str(tmp_path / "job.toml"),
        "--out",
        str(out),
        "--method",
        "greedy",
        "--kill",
        "1.1@3",
        "--heartbeat-timeout",
        "30",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env=command_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "worker 1.1 was killed by SIGKILL" in done.stderr
    assert losses_in(out) == pytest.approx(judge_of_text(JOB).losses, rel=0, abs=1e-9)


def test_the_first_of_the_processes_of_a_worker_is_its_node():
    """Eight processes on each of two machines, two for each worker."""
    nodes = [
        group_ranks(
            LaunchInfo(
                node=8 * machine + rank, nodes=16, local=LocalProcess(rank=rank, processes=8)
            ),
            2,
        )
        for machine in range(2)
        for rank in range(8)
    ]
    places = []
    for info in nodes[8:]:
        places.append(None if info is None else (info.node, info.local.rank))
    assert places == [(4, 0), None, (5, 1), None, (6, 2), None, (7, 3), None]
    assert (
        nodes[0] == LaunchInfo(node=0, nodes=8, local=LocalProcess(rank=0, processes=4))
        and nodes[1] is None
    )
    for processes, here in ((6, 3), (8, 2)):
        with pytest.raises(
            ValueError,
            match=f"^{processes} processes were started, {here} of them on this machine; "
            "expected a multiple of --ranks-per-worker, 4, on each$",
        ):
            group_ranks(LaunchInfo(nodes=processes, local=LocalProcess(processes=here)), 4)
