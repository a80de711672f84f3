"""Leads a training of `benchmarks.chaos`, with failures, until it is killed by itself.

    python -m benchmarks.chaos_leader GRID:INDEX ITERATIONS SEED OUT NEWS DIES committed|later

Iteration DIES is where: right after its loss is written, or some milliseconds later. Recoveries go to the file NEWS.
"""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch

from benchmarks.chaos import failures, scheduler, settings
from planner.plan import plan_job
from runtime.coordinator.recovery import Recovery
from runtime.errors import RunError
from runtime.launch import Resilience, RunOptions, run


def main(name: str, iterations: str, seed: str, out: str, news: str, dies: str, when: str) -> None:
    torch.set_num_threads(1)
    grid, _, index = name.partition(":")
    setting, rng = settings(grid, int(iterations))[int(index)], random.Random(seed)
    injections, returns = failures(setting, rng, 0)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def progress(iteration: int, _: float) -> None:
        if iteration == int(dies):
            if when == "committed":
                die()
            threading.Timer(rng.uniform(0.001, 0.1), die).start()

    def tell(one: Recovery | str) -> None:
        if isinstance(one, Recovery):
            with Path(news).open("ab") as file:
                file.write(msgspec.json.encode(one) + b"\n")

    resilience = Resilience(scheduler=scheduler(setting), heartbeat_timeout_seconds=setting.heartbeat_timeout_seconds,
                            checkpoint_every=7, injections=tuple(injections), returns=tuple(returns))
    try:
        run(plan_job(setting.job, method="greedy").schedule, setting.config, out=Path(out), progress=progress,
            resilience=resilience, options=RunOptions(notify=tell))
    except RunError as error:  # too few were left
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
