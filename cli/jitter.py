"""Implement `slipstream jitter`: replay with noise, stragglers, or unequal samples."""

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from slipstream.cli.shared.console import duration, err, out, print_json, refuse
from slipstream.cli.shared.options import (
    Json,
    ScheduleFile,
    Seed,
    parse_workers,
    read_schedule_or_refuse,
)
from slipstream.planner.job.profiler_trace import ProfilerTraceError
from slipstream.planner.job.straggler_trace import SUFFIX, read_straggler_trace
from slipstream.schedules.dealing import CostError, Dealer, costs_of, read_lengths, require_costs
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.timing import Noise, replay_with_noise

Spread = Annotated[
    float,
    typer.Option(
        "--noise",
        metavar="SHARE",
        min=0,
        max=2,
        help=("Standard deviation of op times, as a share of them (log-normal)."),
    ),
]
Slow = Annotated[
    list[str] | None,
    typer.Option(
        "--slow",
        metavar="D.S=FACTOR",
        help=("A straggler: a worker whose ops take so many times as long; may be repeated."),
    ),
]
Replays = Annotated[
    int, typer.Option("--replays", metavar="N", min=1, max=1_000_000, help="How many replays.")
]


Lengths = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        metavar="FILE",
        help=(
            "Samples that are not alike: a line each, with the lengths of its documents in "
            "tokens; or a .parquet file of StragglerAnalysis, with the times of ops. Says what "
            "the plan loses by them, and what dealing them gives back."
        ),
    ),
]
Attention = Annotated[
    float,
    typer.Option(
        "--attention",
        metavar="SHARE",
        min=0,
        max=1,
        help=(
            "With --lengths in tokens: the share of F and I that grows with the squares of "
            "documents' lengths; the rest grows with tokens."
        ),
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        min=1,
        max=2**31 - 1,
        help=("With --lengths in tokens: the most tokens a sample has; more is refused."),
    ),
]
SWAPS = (1, 100, 300, 1000, 3000, 6000, 10_000, 30_000)
DEFAULT_SWAPS = 6000
ERRORS = (0.05, 0.1, 0.2)
MAX_ITERATIONS = 50


def jitter(
    file: ScheduleFile,
    noise: Spread = 0.05,
    slow: Slow = None,
    replays: Replays = 10_000,
    seed: Seed = 0,
    lengths: Lengths = None,
    attention: Attention = 0.3,
    context: Context = None,
    json: Json = False,
) -> None:
    """Replay a schedule thousands of times with noise in op times, with a straggler, or with
    unequal samples.

    Workers keep the planned order and start each op as early as they can; iterations follow each
    other.
    """
    schedule = read_schedule_or_refuse(file)
    if lengths is not None:
        _replay_samples(schedule, file, lengths, attention, context, seed, json)
        return
    try:
        with err.status("replaying"):
            seconds = replay_with_noise(
                schedule,
                Noise(spread=noise, slow=dict(map(_parse_slow, slow or ()))),
                replays=replays,
                seed=seed,
            )
    except ValueError as error:
        refuse(f"{file}: {error}")
    # Noise lengthens most iterations, as an op waits for the latest of those before it.
    planned = schedule.seconds(schedule.period_ticks)
    low, middle, high = np.percentile(seconds, (5, 50, 95)).tolist()
    answer = {
        "planned": planned,
        "mean": float(seconds.mean()),
        "p5": low,
        "p50": middle,
        "p95": high,
        "replays": replays,
    }
    if json:
        print_json(answer)
        return
    out.print(
        f"period planned {duration(planned)}; over {replays:,} replays {duration(answer['mean'])} "
        f"on average, {100 * answer['mean'] / planned:.1f} % of it; 5 % below {duration(low)}, 5 "
        f"% above {duration(high)}",
        soft_wrap=True,
    )


def _replay_samples(
    schedule: Schedule,
    file: Path,
    lengths: Path,
    attention: float,
    context: int | None,
    seed: int,
    json: bool,
) -> None:
    try:
        dealer = Dealer(schedule)
        costs = _read_costs(lengths, dealer, attention, context)
        with err.status("dealing"):
            answer = _measure_dealing(dealer, costs, seed, schedule.seconds(schedule.period_ticks))
    except ProfilerTraceError as error:
        refuse(error)
    except CostError as error:
        refuse(error if str(error).startswith(str(lengths)) else f"{lengths}: {error}")
    except ValueError as error:
        refuse(f"{file}: {error}")
    if json:
        print_json(answer)
        return
    # Shares are of the time without dealing.
    undealt = answer["as_they_come"]
    out.print(
        f"{answer['iterations']} iterations of {dealer.samples} samples: planned as equal "
        f"{duration(answer['planned'])}, as they come {duration(undealt)}; dealt, by swaps:",
        soft_wrap=True,
    )
    for row in answer["dealt"]:
        out.print(
            f"  {row['swaps']:>6,} swaps  {duration(row['mean'])}, "
            f"{100 * row['mean'] / undealt:.1f} % of that, {row['cpu_seconds'] * 1e3:.1f} ms of "
            "CPU an iteration",
            soft_wrap=True,
        )
    for row in answer["errors"]:
        out.print(
            f"  costs known to {100 * row['error']:.0f} %  {duration(row['mean'])}, "
            f"{100 * row['mean'] / undealt:.1f} %",
            soft_wrap=True,
        )


def _read_costs(
    lengths: Path, dealer: Dealer, attention: float, context: int | None
) -> npt.NDArray[np.float64]:
    """Return times of F, I and W over their means, [iterations, samples, (stages,) 3]."""
    # The file has measured times, or lengths, which `attention` and `context` turn into times.
    if lengths.suffix == SUFFIX:
        trace_costs = read_straggler_trace(lengths).sample_costs()[:MAX_ITERATIONS]
        require_costs(trace_costs[0], dealer.samples, dealer.stages)
        return trace_costs
    all_costs = costs_of(read_lengths(lengths, context), attention)
    iterations = min(len(all_costs) // dealer.samples, MAX_ITERATIONS)
    if not iterations:
        raise CostError(
            f"{len(all_costs)} samples; expected at least {dealer.samples}, those of an iteration"
        )
    return all_costs[: iterations * dealer.samples].reshape(iterations, dealer.samples, 3)


def _measure_dealing(
    dealer: Dealer, costs: npt.NDArray[np.float64], seed: int, planned: float
) -> dict[str, Any]:
    """Return mean iteration times in seconds for JSON: `planned`, without and with dealing."""
    # Dealt are the samples with several numbers of swaps, and by costs with several errors.
    dealer.deal(costs[0], seed=seed, swaps=1)  # compiled before it is timed

    def mean_time(batches: npt.NDArray[np.float64], swaps: int) -> tuple[float, float]:
        start_time = time.process_time()
        dealt = [
            dealer.deal(batch, seed=seed + number, swaps=swaps).sample
            for number, batch in enumerate(batches)
        ]
        cpu_seconds = (time.process_time() - start_time) / len(batches)
        return float(dealer.iteration_seconds(costs, dealt).mean()), cpu_seconds

    rows = []
    for swaps in SWAPS:
        seconds, cpu_seconds = mean_time(costs, swaps)
        rows.append(
            {"swaps": dealer.affordable_swaps(swaps), "mean": seconds, "cpu_seconds": cpu_seconds}
        )
    random, errors = np.random.default_rng(seed), []
    # In training, costs are guesses: deal by wrong ones, and time by those that are right.
    for error in ERRORS:  # of a sample, alike for all of its ops
        factors = random.lognormal(-(error**2) / 2, error, costs.shape[:2])
        errors.append(
            {
                "error": error,
                "mean": mean_time(
                    costs * np.expand_dims(factors, tuple(range(2, costs.ndim))), DEFAULT_SWAPS
                )[0],
            }
        )
    return {
        "planned": planned,
        "iterations": len(costs),
        "as_they_come": mean_time(costs, 0)[0],
        "dealt": rows,
        "errors": errors,
    }


def _parse_slow(text: str) -> tuple[Worker, float]:
    name, _, factor = text.partition("=")
    try:
        times = float(factor)
    except ValueError:
        refuse(f"--slow: {text!r}: expected D.S=FACTOR, for example 1.2=1.5")
    return parse_workers("--slow", [name])[0], times
