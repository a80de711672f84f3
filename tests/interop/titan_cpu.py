"""torchtitan's own training program, or ours in its place, on CPUs.

torchtitan takes CUDA for granted, and asks it for its memory.

    python -m tests.interop.titan_cpu PROGRAM --module ... --config ...

PROGRAM is torchtitan.train or slipstream.cli.torchtitan.

The file that TITAN_METRICS names gets a line of JSON for each step, with all digits. TITAN_DTYPE is
that of the training, also one that torchtitan does not offer. Norms are added up in float64:
torch's own, on CPUs and in float32, is off by 1e-4 for parameters of millions of elements.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(
    total_memory=2**34, name="CPU"
)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.current_device = lambda: 0
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda device=None: None


def double_norm(tensors, *_):
    wholes = []
    for tensor in tensors:
        wholes.append(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
    return torch.stack([whole.double().square().sum() for whole in wholes]).sum().sqrt()


def main() -> None:
    from torchtitan import config
    from torchtitan.components import loss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.distributed import utils

    theirs = MetricsProcessor.log

    def log(self, step, average, highest, norm, extra_metrics=None):
        rate = next(value for name, value in extra_metrics.items() if name.startswith("lr/"))
        with Path(os.environ["TITAN_METRICS"]).open("a") as file:
            file.write(
                json.dumps(
                    {
                        "step": step,
                        "loss": average,
                        "norm": norm,
                        "rate": rate,
                        "tokens": extra_metrics["n_tokens_seen"],
                        "of_a_device": self.ntokens_since_last_log,
                    }
                )
                + "\n"
            )
        theirs(self, step, average, highest, norm, extra_metrics)

    MetricsProcessor.log = log
    utils.set_pg_timeouts = lambda **_: None  # for NCCL
    if os.environ["TITAN_DTYPE"] == "float64":
        config.TORCH_DTYPE_MAP["float64"] = torch.float64
        loss.cross_entropy_loss = lambda logits, labels, **_: torch.nn.functional.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(0, 1),
            reduction="sum",
            ignore_index=loss.IGNORE_INDEX,
        )
    torch.nn.utils.get_total_norm = double_norm
    program = sys.argv.pop(1)
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
