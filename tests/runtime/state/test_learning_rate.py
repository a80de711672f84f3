"""Learning rates are those of torch's own schedulers."""

import pytest
import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.state.step_factors import is_scheduled, learning_rate_at

PEAK = 0.02
FINAL = 0.003
WARMUP = 4
END = 15


def torch_schedule(optimizer: torch.optim.Optimizer, name: str, decay: int) -> LRScheduler:
    """The same from torch's parts, over END iterations."""
    length = END - WARMUP
    warmup = LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)
    constant = ConstantLR(optimizer, 1.0, 1)
    linear = LinearLR(optimizer, 1.0, FINAL / PEAK, decay if name == "wsd" else length)
    match name:
        case "constant":
            return SequentialLR(optimizer, [warmup, constant], [WARMUP])
        case "linear":
            return SequentialLR(optimizer, [warmup, linear], [WARMUP])
        case "wsd":
            return SequentialLR(optimizer, [warmup, constant, linear], [WARMUP, END - decay])
        case _:
            return SequentialLR(
                optimizer, [warmup, CosineAnnealingLR(optimizer, length, FINAL)], [WARMUP]
            )


def config(name: str, **more: object) -> TrainingConfig:
    final = {} if name == "constant" else {"final_learning_rate": FINAL}
    return TrainingConfig(
        learning_rate=PEAK,
        learning_rate_schedule=name,
        warmup_iterations=WARMUP,
        iterations=END,
        **final,
        **more,
    )


@pytest.mark.parametrize(
    ("name", "decay"),
    [("constant", None), ("linear", None), ("cosine", None), ("wsd", 5), ("wsd", 1)],
)
def test_equal_to_torchs(name: str, decay: int | None) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = torch_schedule(optimizer, name, decay or 0)
    ours = config(name) if decay is None else config(name, decay_iterations=decay)
    for iteration in range(END):
        assert learning_rate_at(ours, iteration) == pytest.approx(
            schedule.get_last_lr()[0], rel=1e-12
        ), iteration
        optimizer.step()
        schedule.step()
    assert (
        learning_rate_at(ours, END)
        == learning_rate_at(ours, END + 99)
        == pytest.approx(PEAK if name == "constant" else FINAL)
    )


def test_what_is_not_said() -> None:
    assert not is_scheduled(TrainingConfig()) and not is_scheduled(
        TrainingConfig(warmup_iterations=1)
    )
    assert [
        learning_rate_at(TrainingConfig(learning_rate=0.1), iteration) for iteration in (0, 7)
    ] == [
        0.1,
        0.1,
    ]
    # A tenth of the iterations decay, to zero; the schedule may be longer than the run, or shorter.
    wsd = TrainingConfig(
        learning_rate=1.0, learning_rate_schedule="wsd", iterations=5, schedule_iterations=40
    )
    assert [learning_rate_at(wsd, iteration) for iteration in (0, 36, 38, 40)] == [
        1.0,
        1.0,
        0.5,
        0.0,
    ]
    # Warm-up alone may take all there is.
    full = TrainingConfig(
        learning_rate=1.0, learning_rate_schedule="cosine", iterations=4, warmup_iterations=4
    )
    assert [learning_rate_at(full, iteration) for iteration in range(4)] == [0.25, 0.5, 0.75, 1.0]
