"""The loop of docs/neighbours.md, as it stands there."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slipstream.runtime import torch_pipelining
from slipstream.schedules.schedule import Worker
from tests.generate import planned
from tests.jobs import grid
from tests.runtime.torch_pipelining.threads import build_stage, read_microbatch, with_workers

PAGE = Path(__file__).parents[3] / "docs" / "neighbours.md"
ITERATIONS = 4


@pytest.mark.usefixtures("one_process")
def test_the_loop_of_the_page_trains_as_one_process_does():
    (loop,) = re.findall(r"```python\n(place = .*?)```", PAGE.read_text(), re.DOTALL)
    schedule = planned(grid(2, 2, [2, 3]), [Worker(1, 1)], optimizer="synchronous")

    def run(place):
        names = {
            **vars(torch_pipelining),
            "torch": torch,
            "build_stage": build_stage,
            "iterations": ITERATIONS,
            "partial": partial,
            "loss_fn": nn.functional.mse_loss,
            "read_microbatch": lambda iteration, pipeline, index: read_microbatch(
                pipeline, index + 5 * iteration
            ),
            "Routes": SimpleNamespace(read=str),
            "Place": SimpleNamespace(take=lambda _: place),
        }
        exec(loop, names)
        return names["modules"]

    model = nn.Sequential(*map(build_stage, range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        for pipeline, count in enumerate([2, 3]):
            for index in range(count):
                value, target = read_microbatch(pipeline, index + 5 * iteration)
                (nn.functional.mse_loss(model(value), target) / 5).backward()
        optimizer.step()
    for modules in with_workers(schedule, run).values():
        for stage, module in modules.items():
            for parameter, other in zip(
                module.parameters(), model[stage].parameters(), strict=True
            ):
                torch.testing.assert_close(parameter, other, rtol=0, atol=1e-12)
