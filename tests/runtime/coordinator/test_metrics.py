"""Metrics: one line an iteration, whatever is run again, in the file and for TensorBoard."""

import math
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.cli.train import peak_of_gpu
from slipstream.runtime.computing.slices import find_forms
from slipstream.runtime.config import ConfigError, TrainingConfig, parse_run_config
from slipstream.runtime.coordinator.records import metrics as tensorboard
from slipstream.runtime.coordinator.records import run_log
from slipstream.runtime.coordinator.records.metrics import (
    IterationWork,
    MetricsBuilder,
    read_recovery_count,
)
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.coordinator.records.writer_thread import Writer
from slipstream.runtime.events import METRICS, OrderGiven, Resumed, decode_metrics
from slipstream.runtime.models.flops import counting_flops
from slipstream.runtime.models.layered_model import build_model
from tests.runtime.coordinator.clock import Clock

CONFIG = TrainingConfig(learning_rate=0.1, learning_rate_schedule="linear", iterations=10)
WORK = IterationWork(tokens=600, flops=1e9, peak_flops=1e9)


def lines(folder):
    return [decode_metrics(line) for line in (folder / METRICS).read_bytes().splitlines()]


def scalars(folder, tag):
    """What TensorBoard would show: iterations and values."""
    found = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=True
    )
    found.Reload()
    return [(scalar.step, scalar.value) for scalar in found.Scalars(tag)]


@pytest.fixture
def clock(monkeypatch):
    """What the log takes for the time of day."""
    clock = Clock()
    clock.time = clock.monotonic
    monkeypatch.setattr(run_log, "time", clock)
    return clock


def order(live=4, phase="whole"):
    return OrderGiven(order=1, schedule="0" * 16, live=live, planned_period=1.0, phase=phase)


def commit(log, clock, iteration, at, loss=2.0):
    clock.now = at
    log.write_iteration(iteration, loss, 0.5, gradient_norm=3.0, evaluation=1.5)


def recorded(folder, first=0):
    return RunLog(
        folder,
        first,
        metrics=MetricsBuilder(CONFIG, WORK, read_recovery_count(folder)),
        tensorboard=folder / "shown",
    )


def test_each_iteration_has_one_line_whatever_is_repeated(clock, tmp_path):
    log = recorded(tmp_path)
    log.write(order())
    for iteration in range(4):
        commit(log, clock, iteration, 102.0 + 2 * iteration)
    clock.now = 109.0
    log.write(order(3, "at once"))
    log.write(Resumed(pause=1.0, live=3))
    log.drop_iterations_from(2)
    commit(log, clock, 2, 112.0, loss=math.nan)
    assert [(line.iteration, line.live, line.recoveries) for line in lines(tmp_path)] == [
        (0, 4, 0),
        (1, 4, 0),
        (2, 3, 1),
    ]
    assert scalars(tmp_path / "shown", "loss/training") == [(0, 2.0), (1, 2.0)]
    # Another process, while nobody has closed the files: its predecessor was killed, in the middle
    # of a line.
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"iteration": 3, "lo')
    clock.now = 200.0
    with recorded(tmp_path, 3) as other:
        other.write(order(3, "at once"))
        commit(other, clock, 3, 201.0)
    found = lines(tmp_path)
    assert [(line.iteration, line.recoveries) for line in found] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [line.tokens_per_second for line in found] == [300.0, 300.0, 150.0, 600.0]
    assert [line.mfu for line in found] == [
        0.125,
        0.125,
        pytest.approx(1 / 12, abs=1e-6),
        pytest.approx(1 / 3, abs=1e-6),
    ]
    for tag, name in (
        ("learning rate", "learning_rate"),
        ("workers/live", "live"),
        ("speed/mfu", "mfu"),
    ):
        assert scalars(tmp_path / "shown", tag) == [
            (line.iteration, pytest.approx(getattr(line, name), rel=1e-6)) for line in found
        ]


def test_what_nobody_knows_is_null(tmp_path):
    """An iteration that another coordinator had committed, before this one has given an order."""
    with recorded(tmp_path) as log:
        log.write_iteration(0, math.nan)
    (line,) = lines(tmp_path)
    assert (
        line.live
        is line.phase
        is line.loss
        is line.gradient_norm
        is line.tokens_per_second
        is line.mfu
        is None
    )


def test_without_its_package_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[tensorboard\]'"):
        recorded(tmp_path)


def test_operations_are_those_of_the_formula():
    """The operations of a model are those of the formula.

    It is 2 operations a weight and token in the forward, 4 in the backward, and attention
    (Chowdhery et al., 2022).
    """
    config = parse_run_config({"blocks": 3, "width": 64, "heads": 4, "context": 32}, {"batch": 2})
    with counting_flops() as flops:
        find_forms(build_model(config.model, 0, torch.float32, torch.device("cpu")), config)
    tokens, width, blocks, vocabulary, context = 2 * 32, 64, 3, 256, 32
    weights = 12 * blocks * width**2 + vocabulary * width
    assert flops.training_flops(microbatches=5) == 5 * tokens * (
        6 * weights + 12 * blocks * width * context
    )


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A1000", None),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L4", None),
    ],
)
def test_peaks_by_name(device, peak):
    assert peak_of_gpu(device) == peak


SAMPLE = re.compile(r'slipstream_(\w+)\{run="([^"]*)"(?:,phase="([a-z ]+)")?\} (\S+)')


def test_prometheus_reads_the_newest_iteration(clock, tmp_path):
    file = tmp_path / "run.prom"
    with RunLog(tmp_path, 0, metrics=MetricsBuilder(CONFIG, WORK), prometheus=file) as log:
        log.write(order())
        commit(log, clock, 0, 102.0)
        log.write(order(3, "at once"))
        log.write(Resumed(pause=1.0, live=3))
        commit(log, clock, 1, 104.0, loss=math.nan)
    text = file.read_text().splitlines()
    samples = {match[1]: match for match in map(SAMPLE.fullmatch, text) if match}
    assert {
        name: float(samples[name][4]) for name in ("iteration", "live_workers", "recoveries_total")
    } == {"iteration": 1, "live_workers": 3, "recoveries_total": 1}
    assert float(samples["tokens_per_second"][4]) == 300.0 and samples["phase"][3] == "at once"
    assert "loss" not in samples and {match[2] for match in samples.values()} == {str(tmp_path)}
    assert len(text) == 3 * len(samples), "each has its help and type"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".new")]


def test_a_file_for_prometheus_that_cannot_be_written_does_not_end_the_run(clock, tmp_path):
    problems, write = [], Writer()
    write.report_problem = problems.append
    file = tmp_path / "gone" / "run.prom"
    with RunLog(tmp_path, 0, write, metrics=MetricsBuilder(CONFIG, WORK), prometheus=file) as log:
        for iteration in range(3):
            if iteration == 2:
                file.parent.mkdir()
            commit(log, clock, iteration, 102.0 + iteration)
    assert problems == [
        f"{file} cannot be written: No such file or directory; the run continues",
        f"{file} is written again",
    ]
