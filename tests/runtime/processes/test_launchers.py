"""Processes started one by one by others: what they are told, and that training by torchrun gives the same numbers."""

import subprocess
import sys

import pytest

from runtime.processes.launchers import Launched, Machine, launched, to_open
from runtime.protocol.rendezvous import Rendezvous
from tests.runtime.running import command_environment, judge_of_text, losses_in, tiny_text

JOB = tiny_text(pipelines=2, iterations=8)
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host",
            "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "MASTER_ADDR": "host"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "fe80::1", "MASTER_PORT": "99"}


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, None),
    ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    (TORCHRUN, Launched(node=3, nodes=4, machine=Machine(rank=1, processes=2), master=Rendezvous("host", 1234),
                        agent=True)),
    (SRUN, Launched(node=2, nodes=8, machine=Machine(rank=2, processes=4), master=Rendezvous("host", 29500))),
    (MPIRUN, Launched(node=0, nodes=2, machine=Machine(), master=Rendezvous("fe80::1", 99))),
])
def test_what_launchers_tell(environment, expected):
    assert launched(environment) == expected


def test_node_0_listens_at_the_master_port_unless_torchrun_does():
    torchrun, mpirun = launched(TORCHRUN), launched(MPIRUN)
    assert torchrun is not None and to_open(torchrun) == Rendezvous("host", 0)
    assert mpirun is not None and to_open(mpirun) == Rendezvous("fe80::1", 99)


@pytest.mark.parametrize(("changes", "message"), [
    ({"MASTER_ADDR": ""}, "RANK and WORLD_SIZE say that this is one of 4 processes: set MASTER_ADDR"),
    ({"RANK": "4"}, "RANK is '4'; expected a whole number from 0 to 3"),
    ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'; expected a whole number from 1 to 65535"),
])
def test_nonsense_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        launched({**TORCHRUN, **changes})


def test_torchrun_trains_as_one_process_does_also_when_a_worker_dies(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "cli",
               "train", str(tmp_path / "job.toml"), "--out", str(out), "--method", "greedy", "--kill", "1.1@3",
               "--heartbeat-timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path,
                          env=command_environment())
    assert done.returncode == 0, done.stderr
    assert "worker 1.1 was killed by SIGKILL" in done.stderr
    assert losses_in(out) == pytest.approx(judge_of_text(JOB).losses, rel=0, abs=1e-9)
