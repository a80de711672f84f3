"""Ours beside others on published layers.

The figures of the source come out, and all have the same memory.
"""

import msgspec
import pytest

from slipstream.planner.published import unlike_layers
from slipstream.planner.published.measured_layers import MODELS
from slipstream.planner.published.unlike_layers import NAMES, OCTOPIPE, ModelBenchmark
from slipstream.schedules.memory import memory_peaks

BY_NAME = {model.name: model for model in MODELS}


COUNTED = {"gemma-2b": 2.51, "gemma-7b": 8.54, "gemma-2-27b": 27.2}
"""Billions of parameters, of models that have others than their names say."""


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_have_the_parameters_that_their_makers_count(model):
    """In billions. Gemma's head is its embedding."""
    named = COUNTED.get(model.name) or float(model.name.rpartition("-")[2].rstrip("b"))
    counted = (
        sum(model.shape_of_layer(kind).parameters for kind in model.kinds)
        - (model.name in COUNTED) * model.shape_of_layer("E").parameters
    )
    assert counted / 1e9 == pytest.approx(named, rel=0.13)


def test_1f1b_takes_what_the_authors_simulator_says():
    """It rounds each layer to hundredths of a millisecond."""
    for name, (workers, microbatches, one_f_one_b, theirs) in OCTOPIPE.items():
        bench = ModelBenchmark(BY_NAME[name])
        assert (bench.workers, bench.microbatches) == (workers, microbatches)
        assert bench.find_best("1F1B", divided=False).seconds == pytest.approx(
            one_f_one_b, rel=1e-3
        )
        assert theirs < one_f_one_b


def test_divided_is_no_worse_and_nobody_has_more_memory(monkeypatch):
    monkeypatch.setattr(unlike_layers, "TRIED_DIVISIONS", 20)
    bench = ModelBenchmark(BY_NAME["gemma-2b"])
    for name in NAMES:
        uniform, divided = (bench.find_best(name, divided=how) for how in (False, True))
        if uniform is not None:
            assert divided.seconds <= uniform.seconds
        assert divided is None or divided.megabytes <= bench.memory * (1 + 1e-9)


def test_stages_of_one_layer_each_have_one_division(monkeypatch):
    """With two stages a worker, no layer of eight can move."""
    monkeypatch.setattr(unlike_layers, "TRIED_DIVISIONS", 2)
    model = msgspec.structs.replace(BY_NAME["llama-3-8b"], pattern="T" * 6)
    bench = ModelBenchmark(model)
    assert bench.uniform(8) == (1,) * 8
    divided = bench.find_best("interleaved 1F1B", divided=True)
    assert divided.arrangement.counts == (1,) * 8 and divided.megabytes <= bench.memory * (1 + 1e-9)


def test_ours_has_no_more_memory_either(monkeypatch):
    monkeypatch.setattr(unlike_layers, "PLAN_SECONDS", 0.2)
    bench = ModelBenchmark(BY_NAME["gemma-2b"])
    schedule = bench.find_own_placement("synchronous").plan.schedule
    of_layer = bench.model.values_by_layer("weights")
    weights = []
    for ranges in schedule.grid.held_layers_by_column:
        weights.append(sum(of_layer[layer] for first, end in ranges for layer in range(first, end)))
    assert all(
        weights[worker.column] + peak * schedule.memory.unit <= bench.memory + 0.2
        for worker, peak in memory_peaks(schedule).items()
    )
