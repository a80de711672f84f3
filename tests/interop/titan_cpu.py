"""torchtitan's own training program, on CPUs: without a GPU it takes CUDA for granted, and asks it for its memory.

    python -m tests.interop.titan_cpu --module ... --config ...

The file that TITAN_METRICS names gets a line of JSON for each step, with all digits.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**34, name="CPU")
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.current_device = lambda: 0
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda device=None: None

if __name__ == "__main__":
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.distributed import utils
    from torchtitan.train import main

    def log(self, step, loss, most, norm, extra_metrics=None):
        rate = next(value for name, value in extra_metrics.items() if name.startswith("lr/"))
        with Path(os.environ["TITAN_METRICS"]).open("a") as file:
            file.write(json.dumps({"loss": loss, "norm": norm, "rate": rate}) + "\n")

    MetricsProcessor.log = log
    utils.set_pg_timeouts = lambda **_: None  # for NCCL
    main()
