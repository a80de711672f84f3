"""`slipstream jitter`: how a schedule stands noise and stragglers."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from cli.console import duration, err, out, print_json, refuse
from cli.plan import Json
from schedules.codec import read
from schedules.document import DocumentError
from schedules.schedule import Worker
from schedules.timing import Noise, replay

ScheduleFile = Annotated[Path, typer.Argument(metavar="FILE", help="A schedule, as `slipstream plan --out` writes it.")]
Spread = Annotated[float, typer.Option("--noise", metavar="SHARE", min=0, max=2, help=(
    "Standard deviation of op times, as a share of them (log-normal)."))]
Slow = Annotated[list[str] | None, typer.Option("--slow", metavar="D.S=FACTOR", help=(
    "A straggler: a worker whose ops take so many times as long; may be repeated."))]
Replays = Annotated[int, typer.Option("--replays", metavar="N", min=1, max=1_000_000, help="How many.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**31 - 1, help="Seed of the noise.")]


def jitter(file: ScheduleFile, noise: Spread = 0.05, slow: Slow = None, replays: Replays = 10_000, seed: Seed = 0,
           json: Json = False) -> None:
    """Replay a schedule thousands of times with noise in its op times, or with a straggler.

    Workers keep the planned order and start each op as early as they can; iterations follow each other.
    """
    try:
        schedule = read(file)
    except DocumentError as error:
        refuse(error)
    try:
        with err.status("replaying"):
            seconds = replay(schedule, Noise(spread=noise, slow=dict(map(_straggler, slow or ()))), replays=replays,
                             seed=seed)
    except ValueError as error:
        refuse(f"{file}: {error}")
    planned = schedule.seconds(schedule.period_ticks)
    low, middle, high = np.percentile(seconds, (5, 50, 95)).tolist()
    answer = {"planned": planned, "mean": float(seconds.mean()), "p5": low, "p50": middle, "p95": high,
              "replays": replays}
    if json:
        print_json(answer)
        return
    out.print(f"period planned {duration(planned)}; over {replays:,} replays {duration(answer['mean'])} on average, "
              f"{answer['mean'] / planned:.1%} of it; 5 % below {duration(low)}, 5 % above {duration(high)}",
              highlight=False, soft_wrap=True)


def _straggler(text: str) -> tuple[Worker, float]:
    name, equals, factor = text.partition("=")
    try:
        if not equals:
            raise ValueError(f"{text!r}: expected D.S=FACTOR, for example 1.2=1.5")
        return Worker.parse(name), float(factor)
    except ValueError as error:
        refuse(f"--slow: {error}")
