"""Show published pipelines beside ours: `slipstream reproduce unlike-layers`."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import geometric_mean, mean

from slipstream.cli.figures.figure import Figure, Series
from slipstream.planner.budget import CountCallback
from slipstream.planner.job.estimate import BYTES_HELD
from slipstream.planner.published.measured_layers import ESTIMATED_ON, MeasuredModel
from slipstream.planner.published.unlike_layers import (
    CHUNKS,
    DEAD_PIPELINE,
    NAMES,
    OCTOPIPE,
    PIPELINES,
    PLAN_SECONDS,
    SMALLER,
    DividedPipeline,
    ModelResult,
    compare_model,
)


def reproduce_unlike_layers(
    progress: CountCallback, models: Sequence[MeasuredModel] = SMALLER, name: str = "unlike-layers"
) -> Figure:
    """Return the figure called `name`: the throughput of each schedule on each model.

    The schedules are the published ones and Slipstream's; throughputs are multiples of that of
    interleaved 1F1B with uniform stages. Models are compared in parallel, in a process for each
    core at most; `progress` is called after each.
    """
    results = []
    # Models are independent of each other, so they are compared in parallel.
    with ProcessPoolExecutor(min(len(models), os.cpu_count() or 1), get_context("spawn")) as pool:
        for result in pool.map(compare_model, models):
            results.append(result)
            progress(len(results), len(models))
    # Each throughput is relative to interleaved 1F1B with uniform stages.
    findings = _summarize(results)
    series = []
    for rival in NAMES:
        values: list[float | None] = []
        for result in results:
            best = result.divided[rival]
            values.append(None if best is None else result.base / best.seconds)
        series.append(Series(name=rival, values=tuple(values)))
    series.append(Series(name="ours", values=tuple(_over_interleaved(results))))
    for model, result in zip(models, results, strict=True):
        findings |= _published_findings(model, result)
    return Figure(
        name=name,
        title="Pipelines on models whose layers are unlike",
        kind="bars",
        x_label="",
        y_label="throughput, interleaved 1F1B with uniform stages = 1",
        x=tuple(model.name for model in models),
        series=tuple(series),
        header=HEADER,
        rows=tuple(map(_table_row, models, results)),
        findings=findings,
        assumptions=(
            "milliseconds from the first op of an iteration to its last",
            "times of layers: as AdaPtis' authors publish them with their simulator "
            "(github.com/guojihu-hana/SimPipe); those of Gemma and DeepSeek, which are not "
            "published, are estimated as by `slipstream new --model`, products at "
            f"{ESTIMATED_ON.efficiency:.0%} of the peak of an {ESTIMATED_ON.gpu.name}",
            "not published, and assumed: 4 workers for models of up to 20 billion parameters, else "
            "8; twice as many micro-batches as workers, as in the example of their simulator; "
            "transfers and steps take no time there",
            "memory: no worker holds more than the fullest one of interleaved 1F1B with uniform "
            f"stages (the best of {', '.join(map(str, CHUNKS))} virtual stages a worker), "
            f"{BYTES_HELD} bytes a parameter included; a dash: no division has room",
            "orders of others as published; layers divided: the best of some hundred divisions, of "
            "interleaved 1F1B with the best number of virtual stages",
            f"each search of ours has as many counted steps as {PLAN_SECONDS:g} s of a processor "
            "have; all step together, but in the column that says otherwise",
            f"one dead: worker {DEAD_PIPELINE}.s of {PIPELINES} pipelines, s in the middle; every "
            "layer stays",
        ),
    )


def _over_interleaved(results: Sequence[ModelResult]) -> list[float]:
    """Return our throughput on each model, as a multiple of interleaved 1F1B's."""
    return [result.base / result.ours.seconds for result in results]


def _summarize(results: Sequence[ModelResult]) -> dict[str, float]:
    """Return the numbers that summarize the results of all models, by description."""
    over_interleaved = _over_interleaved(results)
    staggered = [result.base / result.staggered for result in results]
    over_others = [result.best_rival.seconds / result.ours.seconds for result in results]
    above_bound = [result.ours.seconds / result.bound - 1 for result in results]
    lost = [result.dead for result in results if result.dead is not None]
    lost_of_best = [result.dead_of_best for result in results if result.dead_of_best is not None]
    # Means of throughputs, and geometric means of ratios to the best schedule of each model.
    beside_others = "over the best of all others with layers divided for it"
    findings = {
        "over interleaved 1F1B with uniform stages, mean": mean(over_interleaved),
        "over interleaved 1F1B with uniform stages, at most": max(over_interleaved),
        "the same, published of AdaPtis on its models, mean": 1.42,
        "the same with each worker stepping by itself, mean": mean(staggered),
        f"{beside_others}, geometric mean": geometric_mean(over_others),
        f"{beside_others}, at least": min(over_others),
        f"{beside_others}, at most": max(over_others),
        "above the bound for any placement, mean": mean(above_bound),
    }
    if lost:
        name = "one worker of four pipelines dead, at once, ours: throughput lost, mean"
        findings[name] = mean(lost)
    if lost_of_best:
        name = "the same in the placement of the best of all others, by our planner"
        findings[name] = mean(lost_of_best)
    findings["the same, of all others by themselves: a replica"] = 1 / PIPELINES
    return findings


HEADER = (
    "",
    "interleaved 1F1B",
    *(f"{name}, divided" for name in NAMES),
    "ours",
    "bound",
    "our placement",
    "over interleaved",
    "over the best",
    "ours, staggered",
    "one dead, ours",
    "one dead, placement of the best",
)


def _table_row(model: MeasuredModel, result: ModelResult) -> tuple[str, ...]:
    return (
        model.name,
        _format_ms(result.uniform["interleaved 1F1B"]),
        *(_format_ms(result.divided[name]) for name in NAMES),
        _format_ms(result.ours),
        f"{1000 * result.bound:.1f}",
        result.ours.arrangement.description,
        f"{result.base / result.ours.seconds:.2f}",
        f"{result.best_rival.seconds / result.ours.seconds:.2f}",
        f"{1000 * result.staggered:.1f}",
        _percent(result.dead),
        _percent(result.dead_of_best),
    )


def _published_findings(model: MeasuredModel, result: ModelResult) -> dict[str, float]:
    """Return a model's computed and published milliseconds of an iteration, by description."""
    plain = result.uniform["1F1B"]
    # Nothing to compare with: no published result, or 1F1B does not fit.
    if model.name not in OCTOPIPE or plain is None:
        return {}
    _, _, one_f_one_b, theirs = OCTOPIPE[model.name]
    return {
        f"{model.name}: 1F1B with uniform stages, milliseconds": 1000 * plain.seconds,
        f"{model.name}: the same, published": 1000 * one_f_one_b,
        f"{model.name}: AdaPtis' own plan, published": 1000 * theirs,
    }


def _format_ms(found: DividedPipeline | None) -> str:
    return "-" if found is None else f"{1000 * found.seconds:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"-{100 * share:.0f} %"
