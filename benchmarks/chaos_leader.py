"""Lead a training of `benchmarks.chaos`, with failures, until this process kills itself.

    python -m benchmarks.chaos_leader NAME ITERATIONS SEED OUT NEWS DIES committed|later|joining \\
        ""|before|after

NAME is the name of a scenario. The process dies in iteration DIES: right after its loss is written,
some milliseconds later, or while a worker joins that was killed before. Just before or just after
this process, a worker is killed, too: the joining one or any. An empty last argument kills none.
Recoveries are written to the file NEWS, and before the process dies, the pids of its fork server
and of its workers, by name.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from benchmarks.chaos_checks import ChaosError, Survivors, below
from benchmarks.chaos_scenario import resilience, scenario, watching_closely
from slipstream.planner.plan import plan_job
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.errors import RunError
from slipstream.runtime.launch import RunOptions, run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.process_manager import Return
from slipstream.schedules.schedule import Worker

JOIN_SECONDS = 60.0
"""Maximum time, in seconds, to wait for the return of a worker."""
LATE = 10
"""Number of iterations after DIES by which this process dies in any case."""


def main(
    name: str,
    iterations: str,
    seed: str,
    out: str,
    news: str,
    dies: str,
    when: str,
    partner: str = "",
) -> None:
    torch.set_num_threads(1)
    setting, rng = scenario(name, int(iterations)), random.Random(seed)
    survivors = Survivors({}, lambda: fork_server.pids)

    def enter(line: bytes) -> None:
        with Path(news).open("ab") as file:
            file.write(line + b"\n")

    def die() -> None:
        pids = dict(fork_server.pids)
        enter(json.dumps({"fork server": below(os.getpid())[0], **pids}).encode())
        victim = (
            pids.get(joiner)
            if when == "joining" and rng.random() < 0.5
            else rng.choice([*pids.values()])
        )
        if partner == "before" and victim is not None:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.05))
        elif partner == "after" and victim is not None:
            subprocess.Popen(
                ["sh", "-c", f"sleep {rng.uniform(0, 0.3):.3f}; kill -9 {victim}"],
                start_new_session=True,
            )
        os.kill(os.getpid(), signal.SIGKILL)

    def die_when_it_joins(before: int | None) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        while fork_server.pids.get(joiner, before) == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 1.0))
        die()

    def progress(iteration: int, _: float) -> None:
        survivors.look(fork_server.pids)
        if when == "joining" and iteration == int(dies) - 2 and joiner in fork_server.pids:
            pid = fork_server.pids[joiner]
            os.kill(pid, signal.SIGKILL)
            threading.Thread(target=die_when_it_joins, args=(pid,), daemon=True).start()
        elif when != "joining" and iteration == int(dies):
            if when == "committed":
                die()
            threading.Timer(rng.uniform(0.001, 0.1), die).start()
        elif iteration == min(int(dies) + LATE, setting.iterations - 2):
            die()  # the one that was to join was dead already, or has not come

    def tell(news: Recovery | SpeedEvent | str) -> None:
        if isinstance(news, Recovery):
            enter(msgspec.json.encode(news))

    joiner = str(rng.choice(setting.workers))
    how = resilience(setting, rng)
    if when == "joining":
        how = replace(how, returns=(*how.returns, Return(Worker.parse(joiner), int(dies) - 1)))
    with ExitStack() as stack:
        fork_server = stack.enter_context(ForkServer())
        stack.enter_context(watching_closely())
        try:
            run(
                plan_job(setting.job, method="greedy").schedule,
                setting.config,
                out=Path(out),
                progress=progress,
                resilience=how,
                fork_server=fork_server,
                options=RunOptions(notify=tell, observe=survivors.observe, topology=setting.nodes),
            )
            survivors.require()
        # Too few were left, or a survivor was started again.
        except (RunError, ChaosError) as error:
            print(error, file=sys.stderr)
            sys.exit(1 if isinstance(error, RunError) else 3)


if __name__ == "__main__":
    main(*sys.argv[1:])
