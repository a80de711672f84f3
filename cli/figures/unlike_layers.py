"""Show published pipelines beside ours on models of unequal layers: `slipstream reproduce unlike-layers`."""

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


def reproduce_unlike_layers(progress: CountCallback, models: Sequence[MeasuredModel] = SMALLER,
                            name: str = "unlike-layers") -> Figure:
    """Return the figure called `name`, with the throughput of each published schedule and of Slipstream's on each of
    the `models`."""
    results = []
    with ProcessPoolExecutor(min(len(models), os.cpu_count() or 1), get_context("spawn")) as pool:
        for one in pool.map(compare_model, models):
            results.append(one)
            progress(len(results), len(models))
    over_others = [one.best_rival.seconds / one.ours.seconds for one in results]
    lost, lost_of_best = ([share for one in results if (share := getattr(one, key)) is not None]
                          for key in ("dead", "dead_of_best"))
    findings = {
        "over interleaved 1F1B with uniform stages, mean": mean(one.base / one.ours.seconds for one in results),
        "over interleaved 1F1B with uniform stages, at most": max(one.base / one.ours.seconds for one in results),
        "the same, published of AdaPtis on its models, mean": 1.42,
        "the same with each worker stepping by itself, mean": mean(one.base / one.staggered for one in results),
        "over the best of all others with layers divided for it, geometric mean": geometric_mean(over_others),
        "over the best of all others with layers divided for it, at least": min(over_others),
        "over the best of all others with layers divided for it, at most": max(over_others),
        "above the bound for any placement, mean": mean(one.ours.seconds / one.bound - 1 for one in results),
        **({"one worker of four pipelines dead, at once, ours: throughput lost, mean": mean(lost)} if lost else {}),
        **({"the same in the placement of the best of all others, by our planner": mean(lost_of_best)}
           if lost_of_best else {}),
        "the same, of all others by themselves: a replica": 1 / PIPELINES}
    for model, one in zip(models, results, strict=True):
        findings |= _published_findings(model, one)
    return Figure(
        name=name, title="Pipelines on models whose layers are unlike", kind="bars", x_label="",
        y_label="throughput, interleaved 1F1B with uniform stages = 1", x=tuple(model.name for model in models),
        series=(*(Series(name=of, values=tuple(None if (best := one.divided[of]) is None else one.base / best.seconds
                                               for one in results)) for of in NAMES),
                Series(name="ours", values=tuple(one.base / one.ours.seconds for one in results))),
        header=HEADER, rows=tuple(_table_row(model, one) for model, one in zip(models, results, strict=True)),
        findings=findings, assumptions=(
            "milliseconds from the first op of an iteration to its last",
            "times of layers: as AdaPtis' authors publish them with their simulator (github.com/guojihu-hana/SimPipe); "
            "those of Gemma and DeepSeek, which are not published, are estimated as by `slipstream new --model`, "
            f"products at {ESTIMATED_ON.efficiency:.0%} of the peak of an {ESTIMATED_ON.gpu.name}",
            "not published, and assumed: 4 workers for models of up to 20 billion parameters, else 8; twice as many "
            "micro-batches as workers, as in the example of their simulator; transfers and steps take no time there",
            "memory: no worker holds more than the fullest one of interleaved 1F1B with uniform stages (the best of "
            f"{', '.join(map(str, CHUNKS))} virtual stages a worker), {BYTES_HELD} bytes a parameter included; a dash: "
            "no division has room",
            "orders of others as published; layers divided: the best of some hundred divisions, of interleaved 1F1B "
            "with the best number of virtual stages",
            f"each search of ours has as many counted steps as {PLAN_SECONDS:g} s of a processor have; all step "
            "together, but in the column that says otherwise",
            f"one dead: worker {DEAD_PIPELINE}.s of {PIPELINES} pipelines, s in the middle; every layer stays"))


HEADER = ("", "interleaved 1F1B", *(f"{name}, divided" for name in NAMES), "ours", "bound",
          "our placement", "over interleaved", "over the best", "ours, staggered", "one dead, ours",
          "one dead, placement of the best")


def _table_row(model: MeasuredModel, one: ModelResult) -> tuple[str, ...]:
    return (model.name, _format_ms(one.uniform["interleaved 1F1B"]),
            *(_format_ms(one.divided[name]) for name in NAMES), _format_ms(one.ours), f"{1000 * one.bound:.1f}",
            one.ours.arrangement.description, f"{one.base / one.ours.seconds:.2f}",
            f"{one.best_rival.seconds / one.ours.seconds:.2f}", f"{1000 * one.staggered:.1f}", _percent(one.dead),
            _percent(one.dead_of_best))


def _published_findings(model: MeasuredModel, one: ModelResult) -> dict[str, float]:
    """Return the published iteration times of a model and the time computed for 1F1B, in milliseconds, by description;
    empty if there are none to compare."""
    plain = one.uniform["1F1B"]
    if model.name not in OCTOPIPE or plain is None:
        return {}
    _, _, one_f_one_b, theirs = OCTOPIPE[model.name]
    return {f"{model.name}: 1F1B with uniform stages, milliseconds": 1000 * plain.seconds,
            f"{model.name}: the same, published": 1000 * one_f_one_b,
            f"{model.name}: AdaPtis' own plan, published": 1000 * theirs}


def _format_ms(found: DividedPipeline | None) -> str:
    return "-" if found is None else f"{1000 * found.seconds:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"-{100 * share:.0f} %"
