"""Leads a training of `benchmarks.chaos`, with failures, until it is killed by itself.

    python -m benchmarks.chaos_leader NAME ITERATIONS SEED OUT NEWS DIES committed|later

NAME is a scenario's. Iteration DIES is where: right after its loss is written, or some milliseconds later. Recoveries
go to the file NEWS, and before it dies, the pids of its fork server and of its workers, by their names.
"""

import json
import os
import random
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from benchmarks.chaos_checks import ChaosError, Survivors, below
from benchmarks.chaos_scenario import resilience, scenario, watching_closely
from slipstream.planner.plan import plan_job
from slipstream.runtime.coordinator.recovery import Recovery
from slipstream.runtime.coordinator.slow_workers import SpeedEvent
from slipstream.runtime.errors import RunError
from slipstream.runtime.launch import RunOptions, run
from slipstream.runtime.processes.fork_server import ForkServer


def main(name: str, iterations: str, seed: str, out: str, news: str, dies: str, when: str) -> None:
    torch.set_num_threads(1)
    setting, rng = scenario(name, int(iterations)), random.Random(seed)
    survivors = Survivors({}, lambda: fork_server.pids)

    def enter(line: bytes) -> None:
        with Path(news).open("ab") as file:
            file.write(line + b"\n")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def progress(iteration: int, _: float) -> None:
        survivors.look(fork_server.pids)
        if iteration == int(dies):
            enter(json.dumps({"fork server": below(os.getpid())[0], **fork_server.pids}).encode())
            if when == "committed":
                die()
            threading.Timer(rng.uniform(0.001, 0.1), die).start()

    def tell(one: Recovery | SpeedEvent | str) -> None:
        if isinstance(one, Recovery):
            enter(msgspec.json.encode(one))

    with ExitStack() as stack:
        fork_server = stack.enter_context(ForkServer())
        stack.enter_context(watching_closely())
        try:
            run(plan_job(setting.job, method="greedy").schedule, setting.config, out=Path(out), progress=progress,
                resilience=resilience(setting, rng), fork_server=fork_server,
                options=RunOptions(notify=tell, observe=survivors.observe, topology=setting.nodes))
            survivors.require()
        except (RunError, ChaosError) as error:  # too few were left, or a survivor was started again
            print(error, file=sys.stderr)
            sys.exit(1 if isinstance(error, RunError) else 3)


if __name__ == "__main__":
    main(*sys.argv[1:])
