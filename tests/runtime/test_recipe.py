"""A whole recipe has the numbers of torch's own in one process.

It has schedule, parameter groups, AdamW's options and clipping, with failures and a resume in
between.
"""

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.checkpoints.parameters import load_parameters
from slipstream.runtime.config import ConfigError, RunConfig, parse_run_config
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.events import METRICS, decode_metrics
from slipstream.runtime.launch import Resilience, run
from slipstream.runtime.models.layered_model import build_model, seeded_for_layer
from tests.runtime.failing import JOB, TIMEOUT_SECONDS, at, dead, planned
from tests.runtime.running import tiny

HALF = 5
"""Iterations until the resume."""
END = 10
"""Iterations of all."""
WARMUP = 3
"""Iterations of the warm-up."""
CLIP = 1.5
CONFIG = parse_run_config(
    {"blocks": 2, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
    {
        "batch": 1,
        "dtype": "float64",
        "device": "cpu",
        "iterations": END,
        "learning_rate": 0.01,
        "clip_norm": CLIP,
        "learning_rate_schedule": "cosine",
        "final_learning_rate": 0.002,
        "warmup_iterations": WARMUP,
        "schedule_iterations": END,
        "betas": (0.8, 0.9),
        "epsilon": 1e-6,
        "amsgrad": True,
        "weight_decay": 0.2,
        "parameter_groups": [
            {"parameters": "0.*", "learning_rate": 0.004, "weight_decay": 0.0},
            {"parameters": "*.mlp_norm.*", "weight_decay": 0.3, "betas": (0.7, 0.95)},
        ],
    },
)
PLACES = [at("1.0", 2, "O"), at("0.1", 7, 3)]


def plain_torch(config: RunConfig) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, parameters and gradient norms of one process, with torch's classes alone."""
    training, cpu = config.training, torch.device("cpu")
    model, corpus = build_model(config.model, training.seed, torch.float64, cpu), load_data(config)
    layers = nn.ModuleList(model.build(layer) for layer in range(model.layers))
    named = dict(layers.named_parameters())
    first = [parameter for name, parameter in named.items() if name.startswith("0.")]
    norms = [parameter for name, parameter in named.items() if ".mlp_norm." in name]
    others = [
        parameter
        for name, parameter in named.items()
        if not name.startswith("0.") and ".mlp_norm." not in name
    ]
    matrices = [parameter for parameter in others if parameter.dim() >= 2]
    vectors = [parameter for parameter in others if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": first, "lr": 0.004, "weight_decay": 0.0},
            {"params": norms, "weight_decay": 0.3, "betas": (0.7, 0.95)},
            {"params": matrices, "weight_decay": 0.2},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-6,
        amsgrad=True,
    )
    # CosineAnnealingLR ends at the same rate in all groups: here each ends at the same share of its
    # own.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shares().__getitem__)
    losses, totals = [], []
    for iteration in range(training.iterations):
        total = 0.0
        for pipeline, count in enumerate(JOB.microbatches):
            for index in range(count):
                microbatch = Microbatch(iteration, pipeline, index)
                value, target = corpus.batch(microbatch, training.batch, config.model.context)
                for layer, module in enumerate(layers):
                    with seeded_for_layer(training.seed, *microbatch, layer, cpu):
                        value = module(value)
                loss = model.loss(value, target) / sum(JOB.microbatches)
                loss.backward()
                total += loss.item()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in named.values()])
        for parameter in named.values():  # clip_grad_norm_ adds 1e-6 to the norm
            parameter.grad.mul_(min(1.0, CLIP / (norm + 1e-6)))  # as torch clips
        totals.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return losses, {name: parameter.detach() for name, parameter in named.items()}, totals


def lines(out):
    return [decode_metrics(line) for line in (out / METRICS).read_bytes().splitlines()]


def shares() -> list[float]:
    """The learning rate of each iteration by torch's schedulers, as a share of the highest."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1),
            CosineAnnealingLR(optimizer, END - WARMUP, 0.2),
        ],
        [WARMUP],
    )
    found = []
    for _ in range(END + 1):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_failures_and_a_resume_change_no_number(fork_server, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    half = replace(CONFIG, training=replace(CONFIG.training, iterations=HALF))
    parts = []
    for config, out, resume in ((half, first, None), (CONFIG, second, first)):
        checkpoint = None if resume is None else open_latest(resume / "checkpoints")
        parts.append(
            run(
                planned(JOB)(()),
                config,
                out=out,
                fork_server=fork_server,
                resilience=Resilience(
                    scheduler=planned(JOB),
                    heartbeat_timeout_seconds=TIMEOUT_SECONDS,
                    checkpoint_every=HALF,
                    resume=checkpoint,
                    injections=(PLACES[0 if resume is None else 1],),
                ),
            )
        )
    assert [dead(part) for part in parts] == [["1.0"], ["0.1"]]
    losses, parameters, norms = plain_torch(CONFIG)
    assert max(norms) > CLIP > min(norms), "some iterations are clipped"
    assert [*parts[0].losses, *parts[1].losses] == pytest.approx(losses, abs=1e-9)
    metrics = [*lines(first), *lines(second)]
    assert [line.gradient_norm for line in metrics] == pytest.approx(norms, rel=1e-9)
    rates = [0.01 * share for share in shares()[:END]]
    assert [line.learning_rate for line in metrics] == pytest.approx(rates)
    found = load_parameters(second)
    assert found.keys() == parameters.keys()
    for name, theirs in parameters.items():
        torch.testing.assert_close(found[name], theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*.tokens.wieght", "matches no parameter; there is, for example, '0.tokens.weight'"),
        ("0.tokens.*", "matches only parameters of groups before it"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(pattern, said, tmp_path):
    config = tiny(parameter_groups=({"parameters": "0.*"}, {"parameters": pattern}))
    with pytest.raises(
        ConfigError, match=r"^training.parameter_groups\[1\].parameters is "
    ) as caught:
        run(planned(JOB)(()), config, out=tmp_path)
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())
