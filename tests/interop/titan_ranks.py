"""One rank of torchtitan.

It runs exported schedules by their flags, and compares gradients with one process.

    python -m tests.interop.titan_ranks RANK FOLDER...

Each FOLDER is one that `slipstream export --to torchtitan` wrote, for 2 ranks and a model of 6
decoder layers. The whole way is torchtitan's: its command line, meshes, split of the model, and
schedule. Exits 0 when all gradients agree.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import ScaledDotProductAttention

CONTEXT = 8


def model(config: Any) -> nn.Module:
    torch.manual_seed(0)
    whole = config.model_spec.model.build().double()
    with torch.no_grad():
        for parameter in whole.parameters():
            nn.init.normal_(parameter, std=0.05)
    return whole


def tokens(samples: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    text = torch.randint(0, vocabulary, (samples, CONTEXT + 1))
    return text[:, :-1], text[:, 1:]


def loss(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return cross_entropy_loss(logits, target), {}


def expected(config: Any) -> dict[str, torch.Tensor]:
    """Gradients of every parameter, by plain backwards of one sample after the other."""
    whole = model(config)
    text = tokens(config.training.local_batch_size, config.model_spec.model.vocab_size)
    for value, target in zip(*(part.split(1) for part in text), strict=True):
        loss(whole(value), target)[0].backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


def run(folder: Path) -> None:
    config = ConfigManager().parse_args(
        [
            "--module",
            "llama3",
            "--config",
            "llama3_debugmodel",
            *shlex.split((folder / "flags").read_text()),
        ]
    )
    # One document a sample, whose mask need not be given.
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    # Plain tensors on CPUs.
    config.parallelism = replace(config.parallelism, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    schedule, parts, first, last = pipeline_llm(
        model(config),
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config.model_spec.model,
        parallelize_fn=lambda part, **_: part,
        loss_fn=loss,
    )
    value, target = tokens(config.training.local_batch_size, config.model_spec.model.vocab_size)
    schedule.step(
        *([value] if first else []),
        target=target if last else None,
        losses=[] if last else None,
        return_outputs=False,
    )
    wanted = expected(config)
    for part in parts:
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=1e-9)
    count = torch.tensor(sum(1 for part in parts for _ in part.parameters()))
    dist.all_reduce(count)
    assert count == len(wanted), "the ranks do not hold each parameter once"


def main() -> None:
    rank, folders = int(sys.argv[1]), list(map(Path, sys.argv[2:]))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folders[0].parent / 'meet'}", rank=rank, world_size=2
    )
    for folder in folders:
        run(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
