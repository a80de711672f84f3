"""Ours beside others on published layers: the figures of the source come out, and all have the same memory."""

import pytest

from slipstream.cli.pipelines import unlike_layers
from slipstream.cli.pipelines.measured_layers import MODELS
from slipstream.cli.pipelines.unlike_layers import NAMES, OCTOPIPE, Bench, reproduce_unlike_layers
from slipstream.schedules.memory import memory_peaks

BY_NAME = {model.name: model for model in MODELS}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_have_the_parameters_of_their_names(model):
    """As their makers count them, in billions; of nemotron-h-4b, embedding and head are large."""
    named = float(model.name.rpartition("-")[2].rstrip("b"))
    counted = sum(map(model.parameters, model.kinds)) / 1e9
    assert counted == pytest.approx(named, rel=0.13) or (model.name == "gemma-2b" and counted < 3.1)


def test_1f1b_takes_what_the_authors_simulator_says():
    """It rounds each layer to hundredths of a millisecond."""
    for name, (workers, microbatches, one_f_one_b, theirs) in OCTOPIPE.items():
        bench = Bench(BY_NAME[name])
        assert (bench.workers, bench.microbatches) == (workers, microbatches)
        assert bench.best("1F1B", divided=False).seconds == pytest.approx(one_f_one_b, rel=1e-3)
        assert theirs < one_f_one_b


def test_divided_is_no_worse_and_nobody_has_more_memory(monkeypatch):
    monkeypatch.setattr(unlike_layers, "DIVISIONS", 20)
    bench = Bench(BY_NAME["gemma-2b"])
    for name in NAMES:
        uniform, divided = (bench.best(name, divided=how) for how in (False, True))
        if uniform is not None:
            assert divided.seconds <= uniform.seconds
        assert divided is None or divided.held <= bench.room * (1 + 1e-9)


@pytest.mark.slow
def test_the_table_of_one_model(monkeypatch):
    monkeypatch.setattr(unlike_layers, "DIVISIONS", 20)
    monkeypatch.setattr(unlike_layers, "PLAN_SECONDS", 0.5)
    model = BY_NAME["gemma-2b"]
    figure = reproduce_unlike_layers(lambda done, total: None, [model])
    row = dict(zip(figure.header, figure.rows[0], strict=True))
    assert float(row["bound"]) <= float(row["ours"]) <= float(row["interleaved 1F1B"]) / 1.2
    bench = Bench(model)
    schedule = bench.ours("synchronous").plan.schedule
    weights = [sum(bench.model.by_layer("weights")[layer] for first, end in held for layer in range(first, end))
               for held in schedule.grid.held_by_column]
    peaks = memory_peaks(schedule)
    assert all(weights[worker.column] + peak * schedule.memory.unit <= bench.room + 0.2
               for worker, peak in peaks.items())
