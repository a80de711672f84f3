"""Scale to 1,536 GPUs with 1, 5 and 10 % of the workers failed."""

from benchmarks.figures import published
from slipstream.cli.figures.figure import Cell, Figure, Series
from slipstream.planner.budget import CountCallback
from slipstream.planner.job.file import Job, StageTimes
from slipstream.planner.simulation.throughput import Throughputs

GPUS = (96, 192, 384, 768, 1536)
SHARES = (0.01, 0.05, 0.10)
STAGES = 8
MICROBATCHES = (8, 16, 32)
NOMINAL = 1


def job(gpus: int, microbatches: int) -> Job:
    """Return a job of 8 equal stages, with F = I = W = optimizer."""
    unit_times = (1.0,) * STAGES
    times = StageTimes(
        forward=unit_times,
        backward_input=unit_times,
        backward_weight=unit_times,
        optimizer=unit_times,
        all_reduce=(0.0,) * STAGES,
        transfer=0.0,
    )
    pipelines = gpus // STAGES
    return Job(
        name=f"{gpus} GPUs",
        pipelines=pipelines,
        stages=STAGES,
        microbatches=(microbatches,) * pipelines,
        time=times,
        columns=tuple(range(STAGES)),
    )


def shares(gpus: int, microbatches: int) -> list[tuple[float, float, float]]:
    """Return throughputs over fault-free 1F1B, for each share of failures.

    They are of this planner settled, ReCycle, and the work-conserving limit. With fewer failures
    this planner is not slower, because live workers may idle.
    """
    throughputs = Throughputs(job(gpus, microbatches), settle_seconds=published.SETTLE_SECONDS)
    fault_free = throughputs.one_f_one_b_rate(gpus // STAGES)
    found: list[tuple[float, float, float]] = []
    for share in reversed(SHARES):
        failures = round(share * gpus)
        down = throughputs.loads.spread_evenly(failures)
        assert down is not None
        ours = (
            max(throughputs.planned_rate(down), throughputs.rebalanced_answer(failures)[0])
            / fault_free
        )
        found.append(
            (
                max([ours, *(more for more, *_ in found)]),
                throughputs.recycle_rate(down) / fault_free,
                throughputs.work_conserving_rate(gpus - failures) / fault_free,
            )
        )
    return found[::-1]


def reproduce(progress: CountCallback) -> Figure:
    """Compute three families of lines over the number of GPUs."""
    found: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for microbatches in MICROBATCHES:
        for gpus in GPUS:
            found[microbatches, gpus] = shares(gpus, microbatches)
            progress(len(found), len(MICROBATCHES) * len(GPUS))
    series = []
    for number, share in enumerate(SHARES):
        for which, name in enumerate(("slipstream", "recycle")):
            lists = []
            for microbatches in MICROBATCHES:
                lists.append([found[microbatches, gpus][number][which] for gpus in GPUS])
            series.append(published.band(f"{name}, {share:.0%} failed", lists, NOMINAL))
        series.append(
            Series(
                name=f"fault-scaled, {share:.0%} failed",
                is_reference=True,
                values=tuple(1 - round(share * gpus) / gpus for gpus in GPUS),
            )
        )
    nominal = {gpus: found[MICROBATCHES[NOMINAL], gpus] for gpus in GPUS}
    rows: list[tuple[Cell, ...]] = []
    for gpus in GPUS:
        for number, share in enumerate(SHARES):
            failed = round(share * gpus)
            rounded = (round(value, 4) for value in nominal[gpus][number])
            rows.append((gpus, f"{share:.0%}", failed, *rounded, round(1 - failed / gpus, 4)))
    largest = nominal[GPUS[-1]]
    return Figure(
        name="scaling",
        title="Scaling with failures, pipelines of 8 stages",
        kind="lines",
        x_label="GPUs",
        y_label="throughput / fault-free 1F1B",
        x=tuple(map(float, GPUS)),
        series=tuple(series),
        logarithmic_x=True,
        header=(
            "GPUs",
            "failed",
            "workers",
            "slipstream",
            "recycle",
            "work-conserving",
            "fault-scaled",
        ),
        rows=tuple(rows),
        findings={
            f"slipstream / fault-free 1F1B, {GPUS[-1]} GPUs, {share:.0%} failed": largest[number][0]
            for number, share in enumerate(SHARES)
        },
        assumptions=(
            f"{STAGES} stages, F = I = W, optimizer as long as a forward, transfers hidden, "
            f"memory unlimited; {', '.join(map(str, MICROBATCHES))} micro-batches a pipeline make "
            f"the band, {MICROBATCHES[NOMINAL]} the line; models, grids and micro-batches of the "
            "published simulation are not known here, and none of its points, so that there is "
            "nothing to draw beside",
        ),
    )
