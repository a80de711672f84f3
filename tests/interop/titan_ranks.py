"""One rank of torchtitan: it runs exported schedules by their flags, and compares gradients with one process.

    python -m tests.interop.titan_ranks RANK FOLDER...

Each FOLDER is one that `slipstream export --to torchtitan` wrote, for 2 ranks and a model of 6 decoder layers. The
whole way is torchtitan's: its command line, meshes, split of the model, and schedule. Exits 0 when all gradients agree.
"""

import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

MODEL = TransformerModelArgs(dim=32, n_layers=6, n_heads=2, vocab_size=64, multiple_of=16, max_seq_len=8)


def model() -> nn.Module:
    torch.manual_seed(0)
    whole = Transformer(MODEL).double()
    with torch.no_grad():
        whole.init_weights(torch.device("cpu"))
    return whole


def tokens(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    text = torch.randint(0, MODEL.vocab_size, (samples, MODEL.max_seq_len + 1))
    return text[:, :-1], text[:, 1:]


def expected(config: JobConfig) -> dict[str, torch.Tensor]:
    """Gradients of every parameter, by plain backwards of one sample after the other."""
    whole, loss = model(), build_cross_entropy_loss(config)
    for value, target in zip(*(part.split(1) for part in tokens(config.training.local_batch_size)), strict=True):
        loss(whole(value), target).backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


def run(folder: Path) -> None:
    config = ConfigManager().parse_args(shlex.split((folder / "flags").read_text()))
    degrees = config.parallelism
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=degrees.pipeline_parallel_degree, ep=1, etp=1,
                        world_size=dist.get_world_size())
    schedule, parts, first, last = pipeline_llm(model(), dims, config, torch.device("cpu"), MODEL,
                                                lambda part, *_: part, build_cross_entropy_loss(config))
    value, target = tokens(config.training.local_batch_size)
    schedule.step(*([value] if first else []), target=target if last else None, losses=[] if last else None,
                  return_outputs=False)
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
    dist.init_process_group("gloo", init_method=f"file://{folders[0].parent / 'meet'}", rank=rank, world_size=2)
    for folder in folders:
        run(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
